"""Trained translators in the formats of other runtimes: Hugging Face transformers, CTranslate2."""

from typing import TYPE_CHECKING

from regard.lazy import on_demand

if TYPE_CHECKING:
    from regard.tasks.exports.write import export_run as export_run
    from regard.tasks.generation.config import ExportFormat as ExportFormat
else:
    __getattr__, __dir__, __all__ = on_demand(__name__)
