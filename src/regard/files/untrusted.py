"""Untrusted JSON, TOML, safetensors and torch's files of tensors: one reader of each, with one kind of error.

Accepted data has a bounded depth, finite values of at most 64 bits, unique names in each object, and valid UTF-8 text,
so it is safe to recurse into, compute with and print. No other file parses files; `tests/core/test_structure.py` names
the few exceptions, which parse this program's own output.
"""

import json
import math
import os
import re
import stat
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from regard.errors import DataError, MissingExtraError

DEEPEST = 100
"""The depth of nested lists and objects. Python allows 1,000 calls, and a level may need several."""
_NO_KEY = re.compile(r"""("[^"\n]*"|'[^'\n]*')|#.*""")
"""Texts and comments in a line of TOML: their dots separate no keys."""
SMALLEST_INTEGER, LARGEST_INTEGER = -(2**63), 2**64 - 1
LONGEST_INTEGER = 20


def parse_json(content: bytes | str) -> Any:
    r"""The value of a JSON text in UTF-8, with or without a byte order mark. DataError: it is incomplete, nested more
    than `DEEPEST` levels deep, repeats a name in one object, has a number that is not finite or needs more than 64
    bits, or half of a surrogate pair."""
    with _refusing("JSON"):
        value = json.loads(
            _text(content), object_pairs_hook=_without_doubles, parse_int=_integer, parse_constant=_no_constant
        )
        _check_values(value)
    return value


def parse_toml(content: bytes | str) -> dict[str, Any]:
    r"""The table of a TOML text in UTF-8, with or without a byte order mark, within the limits of `parse_json`."""
    import tomllib  # attention alone does not need it

    with _refusing("TOML"):
        text = _text(content)
        _check_keys(text)
        value = tomllib.loads(text)
        _check_values(value)
    return value


@contextmanager
def open_tensors(path: str | os.PathLike[str]) -> Iterator[Any]:
    """An open safetensors file: `keys()`, `metadata()`, `get_slice(name)` and `get_tensor(name)`."""
    library = safetensors_library()
    _require_file(path)
    with tensor_errors(path), library.safe_open(os.fspath(path), framework="pt") as file:
        yield file


def check_tensors(path: str | os.PathLike[str]) -> None:
    try:
        import safetensors
    except ImportError:
        raise MissingExtraError("safetensors", extra="train") from None
    _require_file(path)
    try:
        with safetensors.safe_open(os.fspath(path), framework="np"):
            pass
    except safetensors.SafetensorError as error:
        raise DataError(f"{path} is not a whole safetensors file ({error})") from None


def read_torch_tensors(path: str | os.PathLike[str]) -> dict[str, Any]:
    """The tensors of a file of `torch.save`, by `torch.load(weights_only=True)`, which runs no code of it."""
    import torch

    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of torch, about files of its older versions
            found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # of many kinds, for a damaged file
        if code := re.search(r"GLOBAL ([\w.]+)", str(error)):
            raise DataError(
                f"{path} is a pickle that names {code[1]}: it may run code when it is read, and torch.load("
                "weights_only=True) refuses it; have its owner save the tensors alone, as safetensors"
            ) from None
        raise DataError(f"{path} is not a whole file of torch.save ({type(error).__name__})") from None
    if not isinstance(found, dict) or not all(type(name) is str for name in found):
        raise DataError(f"{path} holds a {type(found).__name__}, expected tensors by name")
    if wrong := [name for name, one in found.items() if not isinstance(one, torch.Tensor)]:
        raise DataError(f"{path} holds {type(found[wrong[0]]).__name__} for {wrong[0]!r:.80}, expected tensors by name")
    return found


def _require_file(path: str | os.PathLike[str]) -> None:
    mode = os.stat(path).st_mode
    if not stat.S_ISREG(mode):
        kinds = {stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket"}
        raise DataError(f"{path} is {kinds.get(stat.S_IFMT(mode), 'a device')}, not a safetensors file")


@contextmanager
def tensor_errors(path: str | os.PathLike[str]) -> Iterator[None]:
    library = safetensors_library()
    try:
        yield
    except (library.SafetensorError, RuntimeError, AttributeError, MemoryError, OverflowError) as error:
        raise DataError(f"{path} is not a whole safetensors file ({str(error) or type(error).__name__})") from None


def safetensors_library() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise MissingExtraError("safetensors", extra="train") from None
    return safetensors


@contextmanager
def _refusing(language: str) -> Iterator[None]:
    try:
        yield
    except RecursionError:
        raise DataError(f"not {language}: it is more than {DEEPEST} levels deep") from None
    except UnicodeDecodeError as error:
        raise DataError(f"not {language}: expected UTF-8, got {error.reason}") from None
    except UnicodeEncodeError:
        raise DataError(f"not {language}: a text has half of a surrogate pair") from None
    except ValueError as error:  # the parsers' own errors are of this class
        raise DataError(f"not {language}: {error}") from None


def _text(content: bytes | str) -> str:
    return (content.decode() if isinstance(content, bytes) else content).removeprefix("\N{ZERO WIDTH NO-BREAK SPACE}")


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) < len(pairs):
        [(twice, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"it has the name {twice[:40]!r} twice in one object")
    return found


def _integer(digits: str) -> int:
    if len(digits) > LONGEST_INTEGER:
        raise ValueError(f"it has an integer of {len(digits)} digits, and 64 bits are the most")
    return int(digits)


def _no_constant(name: str) -> Any:
    raise ValueError(f"it has the number {name}, which JSON does not know")


def _check_keys(text: str) -> None:
    """Refuse keys of very many parts: the parser's memory grows with the square of their count."""
    for number, line in enumerate(text.splitlines(), 1):
        if line.count(".") > DEEPEST and _NO_KEY.sub("", line).count(".") > DEEPEST:
            raise ValueError(f"line {number} has a key of more than {DEEPEST} parts")


def _check_values(value: Any) -> None:
    level, depth = [value], 0
    while level:
        below: list[Any] = []
        for one in level:
            if isinstance(one, str):
                if not one.isascii():
                    one.encode()
            elif isinstance(one, dict | list):
                if depth == DEEPEST:
                    raise RecursionError
                below += one
                if isinstance(one, dict):
                    below += one.values()
            elif isinstance(one, float):
                if not math.isfinite(one):
                    raise ValueError("it has a number that is not finite")
            elif isinstance(one, int) and not SMALLEST_INTEGER <= one <= LARGEST_INTEGER:
                raise ValueError(f"it has an integer of {one.bit_length()} bits, and 64 are the most")
        level, depth = below, depth + 1
