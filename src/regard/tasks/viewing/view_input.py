"""The inputs of a view, as the command line gives them."""

from dataclasses import dataclass
from pathlib import Path

from regard.errors import DataError
from regard.tasks.text.lines import StrPath, read_lines

LONGEST_TITLE = 80


@dataclass(frozen=True, slots=True)
class ViewInput:
    text: str | None = None
    tokens: tuple[int, ...] | None = None
    """Ids of tokens, in place of a text."""
    target: str | None = None
    """The text that an encoder-decoder is to write; None lets it write its own."""
    image: Path | None = None
    audio: Path | None = None

    @property
    def title(self) -> str:
        """The text, or the name of the file; for tokens their number."""
        files = [path.name for path in (self.image, self.audio) if path is not None]
        text = self.text if self.tokens is None else f"{len(self.tokens)} tokens"
        title = " · ".join(" ".join(part.split()) or part for part in (*files, text or "") if part)
        return title if len(title) <= LONGEST_TITLE else f"{title[:LONGEST_TITLE]}…"

    @property
    def is_text(self) -> bool:
        return self.text is not None and self.tokens is None and self.image is None and self.audio is None


def said_of_unknown(count: int, total: int) -> str:
    """How much of a text a tokenizer does not know.

    >>> said_of_unknown(1, 3)
    '1 of 3 tokens (33%) stand for text that the vocabulary lacks'
    """
    return f"{count:,} of {total:,} tokens ({count / total:.0%}) stand for text that the vocabulary lacks"


def read_text(path: StrPath) -> str:
    text = "\n".join(read_lines(path))
    if not text.strip():
        place = "standard input" if str(path) == "-" else path
        raise DataError(f"there is no text in {place}: give one or more sentences")
    return text


def read_ids(path: Path) -> tuple[int, ...]:
    """The ids of tokens in a file of `numpy.save`, (T,) or (1, T)."""
    import numpy as np  # here, so that a text can be read before numpy is loaded

    try:
        found = np.load(path, allow_pickle=False)  # noqa: TID251  (it refuses pickles)
    except (OSError, ValueError, EOFError, MemoryError) as error:
        raise DataError(f"{path} is no file of numpy.save ({error!s:.200})") from None
    if not isinstance(found, np.ndarray) or found.dtype.kind not in "iu" or found.size not in found.shape:
        told = f"{found.dtype} {found.shape}" if isinstance(found, np.ndarray) else "an archive"
        raise DataError(f"{path} must hold whole numbers of the shape (tokens,); got {told}")
    return tuple(found.reshape(-1).tolist())
