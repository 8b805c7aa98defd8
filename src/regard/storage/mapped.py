"""Files of numbers that are memory-mapped: the numbers, a footer in JSON that says how to read them, its length, a
signature. A file that was cut short has no signature, and is told from one that is whole without reading it.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from regard.errors import RunFolderError

SIGNATURE = b"regard01"
TAIL_BYTES = 8 + len(SIGNATURE)
ADVICE = "delete it to have it made again"


def write_footer(file: IO[bytes], footer: Mapping[str, Any]) -> None:
    """What comes after the numbers."""
    written = file.write(json.dumps(footer).encode())
    file.write(written.to_bytes(8, "little") + SIGNATURE)


def open_mapped(path: Path) -> tuple[npt.NDArray[np.uint8], dict[str, Any]]:
    """The bytes before the footer, not yet read, and the footer.

    Raises:
        RunFolderError: the file is absent, cut short, or another program's.
    """
    try:
        raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        raise RunFolderError(f"expected tokenised text at {path}, got no such file; build it first") from None
    except (OSError, ValueError) as error:  # an empty file is a ValueError
        raise RunFolderError(f"expected tokenised text at {path}, cannot map it ({error}); {ADVICE}") from None
    if raw[-len(SIGNATURE) :].tobytes() != SIGNATURE:
        raise RunFolderError(
            f"expected tokenised text at {path}, got a file of another kind or one cut short; {ADVICE}"
        )
    footer_bytes = int.from_bytes(raw[-TAIL_BYTES : -len(SIGNATURE)].tobytes(), "little")
    try:
        footer = json.loads(raw[-TAIL_BYTES - footer_bytes : -TAIL_BYTES].tobytes())
    except ValueError:
        footer = None
    if not isinstance(footer, dict):
        raise damaged(path)
    return raw[: -TAIL_BYTES - footer_bytes], footer


def damaged(path: Path) -> RunFolderError:
    """The error for a footer that does not say what the file holds."""
    return RunFolderError(f"expected a footer that fits {path}, got damaged bytes; {ADVICE}")
