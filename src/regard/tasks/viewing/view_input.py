"""The inputs of a view, as the command line gives them, and their files."""

import wave
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from regard.errors import DataError, needs
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
        files = [path.name for path in (self.image, self.audio) if path is not None]
        text = self.text if self.tokens is None else f"{len(self.tokens)} tokens"
        title = " · ".join(" ".join(part.split()) or part for part in (*files, text or "") if part)
        return title if len(title) <= LONGEST_TITLE else f"{title[:LONGEST_TITLE]}…"


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


def read_image(path: Path) -> Any:
    with needs("pillow", extra="view"):
        from PIL import Image
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is no picture that can be read ({error})") from None


def read_audio(path: Path, rate: int) -> Any:
    """A sound in PCM as one channel, an array in -1..1, at so many samples a second."""
    import numpy as np

    try:
        with wave.open(str(path)) as file:
            own, width, channels = file.getframerate(), file.getsampwidth(), file.getnchannels()
            content = file.readframes(file.getnframes())
    except (OSError, EOFError, wave.Error) as error:
        raise DataError(f"{path} is no sound that can be read, expected WAV with PCM ({error})") from None
    content = content[: len(content) // (width * channels) * width * channels]
    if not content or own < 1:
        raise DataError(f"{path} has no samples")
    if width == 1:
        samples = (np.frombuffer(content, np.uint8).astype(np.float32) - 128) / 128
    else:  # integers of 2, 3 or 4 bytes, in the upper bytes of 4
        wide = np.zeros((len(content) // width, 4), np.uint8)
        wide[:, 4 - width :] = np.frombuffer(content, np.uint8).reshape(-1, width)
        samples = wide.view("<i4")[:, 0].astype(np.float32) / 2**31
    return _resampled(samples.reshape(-1, channels).mean(1), own, rate)


def _resampled(samples: Any, own: int, rate: int) -> Any:
    """The same sound at another rate: its spectrum, cut off or filled up with zeros."""
    length = max(1, round(len(samples) * rate / own))
    if own == rate:
        return samples
    import numpy as np

    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(samples))).astype(np.float32)
