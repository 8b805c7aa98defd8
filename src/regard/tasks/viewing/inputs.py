"""Texts and ids of tokens from files."""

from pathlib import Path

from regard.errors import DataError
from regard.tasks.text.lines import StrPath, read_lines


def read_text(path: StrPath) -> str:
    """The whole of a file of text, or of standard input for "-", without the end of its last line."""
    text = "\n".join(read_lines(path))
    if not text.strip():
        place = "standard input" if str(path) == "-" else path
        raise DataError(f"there is no text in {place}: give one or more sentences")
    return text


def read_ids(path: Path) -> tuple[int, ...]:
    """The ids of tokens in a file of `numpy.save`, (T,) or (1, T)."""
    import numpy as np  # here, so that a text can be read before numpy is loaded

    try:
        found = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise DataError(f"{path} is no file of numpy.save ({error!s:.200})") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.size not in found.shape:
        told = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else "an archive"
        raise DataError(f"{path} must hold whole numbers of the shape (tokens,); got {told}")
    return tuple(found.reshape(-1).tolist())
