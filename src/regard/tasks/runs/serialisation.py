"""Configurations on disk: frozen dataclasses become JSON and come back, and no value or type is guessed."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import ArgumentError, RunFolderError

T = TypeVar("T")


def to_plain(value: Any) -> Any:
    """Turn a dataclass into values for JSON.

    >>> to_plain((Path("a.tsv"), None, 0.5))
    ['a.tsv', None, 0.5]
    """
    if is_dataclass(value):
        return {field.name: to_plain(getattr(value, field.name)) for field in fields(value)}
    if isinstance(value, tuple | list):
        return [to_plain(item) for item in value]
    return str(value) if isinstance(value, Path) else value


def from_plain(cls: type[T], plain: Mapping[str, Any], *, source: Path) -> T:
    """Turn the values of `to_plain` into the dataclass again. An absent key has its default."""
    return _read(cls, plain, source, "")


def changed(settings: T, plain: Mapping[str, Any], *, source: Path) -> T:
    """Change the named values of a dataclass; a dataclass within it keeps its other values too."""
    return _read_dataclass(type(settings), plain, source, "", before=settings)


def _read(expected: Any, value: Any, source: Path, key: str, before: Any = None) -> Any:
    if is_dataclass(expected):
        return _read_dataclass(expected, value, source, key, before)
    origin, arguments = get_origin(expected), get_args(expected)
    if origin in (Union, types.UnionType):
        return _read_union(arguments, value, source, key)
    if origin is Literal:
        return value if value in arguments else _refuse(expected, value, source, key)
    if origin is tuple:
        return _read_tuple(arguments, value, source, key)
    if expected is Path and isinstance(value, str):
        return Path(value)
    if expected is float and type(value) is int:
        return float(value)
    return value if type(value) is expected else _refuse(expected, value, source, key)


def _read_dataclass(cls: Any, value: Any, source: Path, key: str, before: Any = None) -> Any:
    if not isinstance(value, Mapping):
        _refuse(cls, value, source, key)
    every, prefix = get_type_hints(cls), f"{key}." if key else ""
    hints = {one.name: every[one.name] for one in fields(cls)}
    unknown = sorted(set(value) - set(hints))
    if unknown:
        raise RunFolderError(f"{source}: unknown setting {prefix}{unknown[0]}; {cls.__name__} has {', '.join(hints)}")
    # An absent value of an inner dataclass has its default in the outer one, not in its own class.
    present = {one.name: getattr(before, one.name) if before is not None else _default(one) for one in fields(cls)}
    read = {name: _read(hints[name], item, source, prefix + name, present[name]) for name, item in value.items()}
    try:
        return cls(**read) if before is None else replace(before, **read)
    except (TypeError, ArgumentError) as error:  # a field without default is absent, or a value is out of range
        raise RunFolderError(f"{source}: {error}") from None


def _default(one: Field[Any]) -> Any:
    if one.default_factory is not MISSING:
        return one.default_factory()
    return None if one.default is MISSING else one.default


def _read_union(arguments: tuple[Any, ...], value: Any, source: Path, key: str) -> Any:
    if value is None and type(None) in arguments:
        return None
    (expected,) = (one for one in arguments if one is not type(None))
    return _read(expected, value, source, key)


def _read_tuple(arguments: tuple[Any, ...], value: Any, source: Path, key: str) -> Any:
    if not isinstance(value, list):
        raise RunFolderError(f"{source}: {key} must be a list, got {value!r}")
    return tuple(_read(arguments[0], item, source, f"{key}[{i}]") for i, item in enumerate(value))


def _refuse(expected: Any, value: Any, source: Path, key: str) -> Any:
    wanted = getattr(expected, "__name__", str(expected)) if get_origin(expected) is None else str(expected)
    raise RunFolderError(f"{source}: {key or 'the file'} must be {wanted.removeprefix('typing.')}, got {value!r}")
