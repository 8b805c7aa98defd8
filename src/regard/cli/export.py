"""`regard export`: write a run's translator for another runtime."""

from pathlib import Path

from regard.cli.loading import loading
from regard.cli.shared import Run
from regard.exports.formats import ExportFormat


def export(run: Run, /, *, to: ExportFormat, out: Path) -> None:
    """Write a run's translator for another runtime: Hugging Face transformers, CTranslate2 or ONNX.

    Args:
        run: the folder that `regard train` made.
        to: the runtime.
        out: a folder to make.
    """
    with loading():
        from regard.exports.write import export_run

    for path in export_run(run, to=to, out=out):
        print(path)
