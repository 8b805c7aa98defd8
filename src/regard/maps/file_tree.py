"""A tree of frozen objects as JSON and tensors. A file names their classes; fields have the declared types."""

import json
import math
import types
from collections.abc import Callable, Iterable
from dataclasses import fields, is_dataclass
from functools import cache
from types import ModuleType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from torch import Tensor

from regard.call import normalizations
from regard.call.biases import base as biases
from regard.call.biases import combined, of_vectors, relative
from regard.call.masks import base as masks
from regard.call.masks import basic, patterns, selection
from regard.call.scores import additive, custom, kernels
from regard.call.scores import base as scores
from regard.call.shapes import Dimensions, Sizes
from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.kernels.base import Call
from regard.maps.statistics import definitions as st
from regard.maps.statistics import of_softmax as fused_statistics
from regard.maps.statistics import pooling
from regard.tensors.tensor_tree import UNSAVED, rebuilt

NAMED: tuple[ModuleType, ...] = (
    *(combined, of_vectors, relative, biases),
    *(masks, basic, patterns, selection),
    *(additive, custom, kernels, scores, normalizations),
    *(st, pooling),
)
"""The modules with classes for files. A file has only the unique name of a class, so the class can move to another
module.
"""


def as_json_and_tensors(parts: tuple[Any, ...]) -> tuple[str, dict[str, Tensor]]:
    tensors: dict[str, Tensor] = {}
    names = {kind: name for name, kind in _kinds().items()}
    tree = json.dumps(_written(parts, names, tensors))
    try:
        parse_json(tree)
    except DataError as error:
        raise ArgumentError(f"this map cannot be saved: its parts are {error}; make it of fewer parts") from None
    return tree, tensors


def from_json_and_tensors(text: str, tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    tree = _read(parse_json(text), _kinds(), tensors)
    if not isinstance(tree, tuple):
        raise TypeError(f"a map is written as a tuple, got {type(tree).__name__}")
    return tree


def _kinds() -> dict[str, type]:
    found = {
        name: kind
        for module in NAMED
        for name, kind in vars(module).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    }
    return {**found, "Sizes": Sizes, "Dimensions": Dimensions, "Call": Call, "Doubled": fused_statistics.Doubled}


def _written(tree: Any, names: dict[type, str], tensors: dict[str, Tensor]) -> Any:
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"number": str(tree)}  # JSON has no infinities or NaN
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Tensor):
        name = f"tensor.{len(tensors)}"
        tensors[name] = tree.detach().contiguous().clone()
        return {"tensor": name}
    if isinstance(tree, tuple):
        return {"tuple": [_written(part, names, tensors) for part in tree]}
    # A normalization is callable, and of a known kind; a function of the caller's is of none.
    held = [] if type(tree) not in names else [getattr(tree, field.name) for field in fields(tree)]
    if (kind := names.get(type(tree))) is None or any(callable(one) and type(one) not in names for one in held):
        raise ArgumentError(
            f"this map cannot be saved: {tree} is a {type(tree).__name__}, a function or a class of one's own, which "
            "no file can hold; render it as a bool tensor (mask=) or a float tensor (bias=) before the call"
        )
    return {"kind": kind, "fields": {n: _written(getattr(tree, n), names, tensors) for n in _saved_fields(tree)}}


def _read(tree: Any, kinds: dict[str, type], tensors: dict[str, Tensor]) -> Any:
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "number" in tree:
        return float(tree["number"])
    if "tuple" in tree:
        return tuple([_read(part, kinds, tensors) for part in tree["tuple"]])
    kind = kinds[tree["kind"]]
    found = {name: _read(value, kinds, tensors) for name, value in tree["fields"].items()}
    check_fields(kind, found)
    made = rebuilt(kind, {f.name: f.default for f in fields(kind)} | found)
    # Recompute the extents from the ids: others would show keys of other documents.
    return made.placed() if isinstance(made, patterns.Documents) and made.places is not None else made


def check_fields(kind: Any, values: dict[str, Any]) -> None:
    hints = _hints(kind)
    if set(values) != set(hints):
        raise ValueError(f"{kind.__name__} has the fields {sorted(hints)}, got {sorted(values)}")
    for name, value in values.items():
        if not _is(value, hints[name]):
            raise ValueError(f"{kind.__name__} has {spelled(value)} as its {name}")


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return hints if issubclass(kind, tuple) else {name: hints[name] for name in _saved_fields(kind)}


def _saved_fields(kind: Any) -> list[str]:
    return [field.name for field in fields(kind) if field.metadata != UNSAVED]


def _is(value: Any, hint: Any) -> bool:
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(_is(value, one) for one in arguments)
    if origin is Literal:
        return value in arguments
    if origin is tuple:
        return type(value) is tuple and _all_are(value, arguments)
    if hint in (int, float, bool, str):
        return type(value) is hint or (hint is float and type(value) is int)
    if origin is not None or hint is Callable:
        return False  # files have nothing of this type
    return isinstance(value, hint)


def _all_are(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if hints[1:] == (...,):
        return all(_is(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_is, values, hints))


def spelled(value: Any) -> str:
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return repr(value)[:80] if isinstance(value, int | float | str | Iterable) else type(value).__name__
