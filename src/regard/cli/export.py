"""`regard export`: write a run's translator for another runtime."""

from pathlib import Path

from regard.cli.loading import loading
from regard.cli.shared import Run, refuse_taken_folder, require_task
from regard.tasks.exports.formats import ExportFormat
from regard.tasks.names import TRANSLATION


def export(run: Run, /, *, to: ExportFormat, out: Path) -> None:
    """Write a run's translator for another runtime: Hugging Face transformers, CTranslate2 or ONNX.

    Args:
        run: the folder that `regard train` made.
        to: the runtime.
        out: a folder to make.
    """
    require_task(run, TRANSLATION)
    refuse_taken_folder(out)
    with loading():
        from regard.tasks.exports.write import export_run

    for path in export_run(run, to=to, out=out):
        print(path)
