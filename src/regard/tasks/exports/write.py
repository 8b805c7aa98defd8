"""Write a trained translator in the format of another runtime."""

from collections.abc import Callable
from pathlib import Path

from regard.errors import RunFolderError
from regard.tasks.exports.ctranslate2 import to_ctranslate2
from regard.tasks.exports.huggingface import to_huggingface
from regard.tasks.exports.trained import ExportedRun, exported, transformer_of
from regard.tasks.generation.config import ExportFormat
from regard.tasks.translation.translator import Translator

WRITERS: dict[ExportFormat, Callable[[ExportedRun, Path], None]] = {
    "huggingface": to_huggingface,
    "ctranslate2": to_ctranslate2,
}


def export_run(folder: Path, *, to: ExportFormat, out: Path) -> list[Path]:
    """Write the best model of a translation run, and its tokenizers, for another runtime.

    Args:
        folder: the folder of the run.
        to: the name of the format.
        out: an empty folder, or one to make.

    Returns:
        The files written.

    Raises:
        RunFolderError: the folder is not a translation run, or `out` is not empty.
        ArgumentError: the format cannot express the run's model; the message says why.
        MissingExtraError: the library of the format is not installed.
        OSError: a file cannot be written.
    """
    config = transformer_of(folder)
    trained = exported(Translator.load(folder, device="cpu"), config)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise RunFolderError(f"{out} is not an empty folder; name another (--out)")
    out.mkdir(parents=True, exist_ok=True)
    try:
        WRITERS[to](trained, out)
    except BaseException:
        if not any(out.iterdir()):
            out.rmdir()
        raise
    return sorted(path for path in out.rglob("*") if path.is_file())
