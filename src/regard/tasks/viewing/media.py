"""Pictures and sounds from files."""

import wave
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.errors import DataError, needs

Wave = npt.NDArray[np.float32]


def read_image(path: Path) -> Any:
    with needs("pillow", extra="view"):
        from PIL import Image
    try:
        with Image.open(path) as image:
            return image.convert("RGB")
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"{path} is no picture that can be read ({error})") from None


def read_audio(path: Path, rate: int) -> Wave:
    """A sound in PCM as one channel, -1..1, at so many samples a second."""
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


def _resampled(samples: Wave, own: int, rate: int) -> Wave:
    """The same sound at another rate: its spectrum, cut off or filled up with zeros."""
    length = max(1, round(len(samples) * rate / own))
    if own == rate:
        return samples
    spectrum = np.fft.rfft(samples)[: length // 2 + 1]
    return (np.fft.irfft(spectrum, length) * (length / len(samples))).astype(np.float32)
