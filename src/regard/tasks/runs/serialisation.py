"""Configurations on disk: frozen dataclasses become JSON or TOML and come back, and no value or type is guessed."""

import types
from collections.abc import Mapping
from dataclasses import MISSING, Field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from regard.errors import ArgumentError, RunFolderError, needs
from regard.files.atomic import write_atomically
from regard.files.untrusted import parse_toml

T = TypeVar("T")


def to_plain(value: Any) -> Any:
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


HEADER = """\
# The settings of a run. Edit a copy and pass it on; flags on the command line override what stands here:
#     regard train --config run.toml --out runs/another
# A setting that is left out has its default.
"""


def write_toml(path: Path, task: str, config: Any) -> None:
    """Write a task and its settings; None is left out, because TOML has no such value."""
    with needs("tomli-w", extra="train"):
        import tomli_w
    write_atomically(path, HEADER + tomli_w.dumps({"task": task, **_without_none(to_plain(config))}))


def read_toml(path: Path) -> tuple[str | None, dict[str, Any]]:
    """Read the task of a file (None without one) and its settings, which are not checked yet."""
    try:
        settings = parse_toml(path.read_bytes())
    except OSError as error:
        raise ArgumentError(f"cannot read the settings in {path} ({error.strerror}); check the path") from None
    except ValueError as error:
        raise ArgumentError(f"{path} is {error}") from None
    return settings.pop("task", None), settings


def _without_none(plain: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _without_none(value) if isinstance(value, Mapping) else value
        for name, value in plain.items()
        if value is not None
    }
