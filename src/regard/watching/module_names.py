"""Choose the watched modules: by name, by pattern, by a list of these, or by a function."""

import difflib
from collections.abc import Callable, Collection, Iterable
from fnmatch import fnmatchcase

from torch import nn

from regard.errors import ArgumentError
from regard.tensors.torch_private import INSIDE_COMPILED

Names = str | Iterable[str] | Callable[[str], bool] | None


def modules_of(model: nn.Module) -> dict[str, nn.Module]:
    named = ((path.split("."), module) for path, module in model.named_modules())
    return {".".join(part for part in parts if part != INSIDE_COMPILED): module for parts, module in named}


def chooser(names: Names, paths: Collection[str]) -> Callable[[str], bool]:
    """A predicate for the chosen module paths; raises ArgumentError if a name matches no module, or is no string.

    A name stands for its module and everything inside it; `*`, `?` and `[...]` match as in file names.

    >>> wanted = chooser(["encoder", "decoder.*.cross"], ["encoder.0", "decoder.0.cross", "decoder.0.self"])
    >>> [wanted(path) for path in ("encoder.0", "decoder.0.cross", "decoder.0.self")]
    [True, True, False]
    """
    if names is None:
        return lambda path: True
    if callable(names):
        return names
    if not isinstance(names, Iterable):
        raise ArgumentError(f"names must be None, a name, a list of names or a function; got {names!r}")
    patterns = [names] if isinstance(names, str) else list(names)
    for pattern in patterns:
        if not isinstance(pattern, str):
            raise ArgumentError(f"names must be None, a name, a list of names or a function; got {pattern!r} in it")
        if not any(_matches(path, pattern) for path in paths):
            raise ArgumentError(_other_name(pattern, paths) or _unknown(pattern, paths))
    return lambda path: any(_matches(path, pattern) for pattern in patterns)


def _other_name(pattern: str, paths: Collection[str]) -> str:
    """The message for another name of a module that stands in several places; empty if it is none."""
    if not isinstance(paths, dict) or "" not in paths:
        return ""
    first = {id(module): path for path, module in paths.items()}
    for path, module in paths[""].named_modules(remove_duplicate=False):
        if _matches(path, pattern) and id(module) in first:
            return f"{path!r} is another name of {first[id(module)]!r}, one module in several places: give that name"
    return ""


def _unknown(pattern: str, paths: Collection[str]) -> str:
    return f"no module of the model is named {pattern!r}{_similar(pattern, paths)}"


def _matches(path: str, pattern: str) -> bool:
    return pattern == "" or fnmatchcase(path, pattern) or fnmatchcase(path, f"{pattern}.*")


def _similar(name: str, paths: Iterable[str]) -> str:
    close = difflib.get_close_matches(name, paths, n=3, cutoff=0.4)
    return f"; similar: {', '.join(close)}" if close else ""


def not_seen(name: str, seen: Iterable[str]) -> str:
    """The message for a name asked for but not seen.

    >>> not_seen("layers.3.atn", ["layers.3.attn"])
    "no attention of 'layers.3.atn' was seen; similar: layers.3.attn; seen.report() lists all"
    """
    return f"no attention of {name!r} was seen{_similar(name, list(dict.fromkeys(seen)))}; seen.report() lists all"
