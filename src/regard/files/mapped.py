"""Memory-mapped arrays in files.

A file holds the elements, a footer in JSON, the length of the footer, and a signature. A truncated file lacks the
signature, a check that reads only the end.
"""

import json
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any, ClassVar, Protocol, TypeVar, get_args, get_origin, get_type_hints

import numpy as np
import numpy.typing as npt

from regard.errors import RunFolderError
from regard.files.untrusted import parse_json

SIGNATURE = b"regard01"
TAIL_BYTES = 8 + len(SIGNATURE)
ADVICE = "delete it to have it made again"
DTYPES = {np.dtype(kind).str: np.dtype(kind) for kind in (np.uint16, np.int32)}


class Footer(Protocol):
    """The description of the elements in a file: a dataclass with JSON fields."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def numbers_bytes(self) -> int: ...


F = TypeVar("F", bound=Footer)


def write_footer(file: IO[bytes], footer: Footer) -> None:
    """Write the end of the file: the footer, its length and the signature."""
    written = file.write(json.dumps(asdict(footer)).encode())
    file.write(written.to_bytes(8, "little") + SIGNATURE)


def open_mapped(path: Path, footer_type: type[F]) -> tuple[npt.NDArray[np.uint8], F]:
    """The bytes before the footer, mapped but not yet read, and the footer.

    Raises:
        RunFolderError: the file is absent, cut short, another program's, or has another footer.
    """
    try:
        raw = np.asarray(np.memmap(path, dtype=np.uint8, mode="r"))
    except FileNotFoundError:
        raise RunFolderError(f"expected tokenised text at {path}, got no such file; build it first") from None
    except (OSError, ValueError) as error:  # an empty file raises a ValueError
        raise RunFolderError(f"expected tokenised text at {path}, cannot map it ({error}); {ADVICE}") from None
    if raw[-len(SIGNATURE) :].tobytes() != SIGNATURE:
        raise RunFolderError(
            f"expected tokenised text at {path}, got a file of another kind or one cut short; {ADVICE}"
        )
    footer_bytes = int.from_bytes(raw[-TAIL_BYTES : -len(SIGNATURE)].tobytes(), "little")
    numbers = raw[: -TAIL_BYTES - footer_bytes]
    try:
        footer = footer_type(**parse_json(raw[-TAIL_BYTES - footer_bytes : -TAIL_BYTES].tobytes()))
        _check_types(footer)
        fits = footer.numbers_bytes == len(numbers)
    except (ValueError, TypeError):  # not JSON, not an object, or other fields or types
        fits = False
    if not fits:
        raise RunFolderError(f"expected a footer that fits {path}, got damaged bytes; {ADVICE}")
    return numbers, footer


def item_bytes(dtype: str) -> int:
    """The bytes of an element of a token dtype.

    >>> item_bytes("<u2")
    2
    """
    if dtype not in DTYPES:
        raise ValueError(f"expected tokens of {' or '.join(DTYPES)}, got {dtype[:20]!r}")
    return DTYPES[dtype].itemsize


def _check_types(footer: Footer) -> None:
    for name, kind in get_type_hints(type(footer)).items():
        value = getattr(footer, name)
        items, kind = (value, get_args(kind)[0]) if get_origin(kind) is list else ([value], kind)
        if not isinstance(items, list) or any(type(one) is not kind or (kind is int and one < 0) for one in items):
            raise TypeError(f"the footer has another {name}")
