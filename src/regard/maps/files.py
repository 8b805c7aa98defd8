"""Maps on disk: their factors in safetensors, and in its header what the factors are, in JSON."""

import json
from dataclasses import fields, is_dataclass
from os import PathLike
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from regard import biases, kernels, masks, normalizations, patterns, relative, scores
from regard.backends import BACKENDS, choose
from regard.backends.base import Backend, Call
from regard.errors import ArgumentError, BackendError, DataError, MissingExtraError
from regard.maps import products, swapped
from regard.maps.trees import rebuilt
from regard.shapes import Sizes

FORMAT = "regard.AttentionMap 1"
Contents = tuple[Call, Tensor, Backend, tuple[int, ...], Tensor | None]


def _kinds() -> dict[str, type]:
    """The classes that a file may name: the frozen objects of a call, none of which holds a function."""
    modules: tuple[ModuleType, ...] = (biases, kernels, masks, normalizations, patterns, relative, scores, swapped)
    found = {
        f"{module.__name__.removeprefix('regard.')}.{name}": kind
        for module in modules
        for name, kind in vars(module).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    }
    return {**found, "shapes.Sizes": Sizes, "call": Call, "maps.products.Doubled": products.Doubled}


def save(
    path: str | PathLike[str],
    call: Call,
    state: Tensor,
    backend: str,
    leading: tuple[int, ...],
    value: Tensor | None,
) -> None:
    """Write a map's factors.

    Raises:
        ArgumentError: a part that no file can hold.
        MissingExtraError: safetensors is not installed.
    """
    save_file, _ = _safetensors()
    tensors: dict[str, Tensor] = {}
    names = {kind: name for name, kind in _kinds().items()}
    tree = _written((call, state, leading, value), names, tensors)
    header = {"format": FORMAT, "backend": backend, "map": json.dumps(tree)}
    save_file(tensors, str(path), metadata=header)


def load(path: str | PathLike[str], device: torch.device) -> Contents:
    """What `save` wrote.

    Raises:
        DataError: not such a file.
        MissingExtraError: safetensors is not installed.
    """
    _, safe_open = _safetensors()
    try:
        with safe_open(str(path), framework="pt", device=str(device)) as file:
            header = file.metadata() or {}
            if header.get("format") != FORMAT:
                raise DataError(f"{path} is not a saved attention map: its format is {header.get('format')!r}")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (not a mapping)
    except FileNotFoundError:
        raise
    except DataError:
        raise
    except Exception as error:  # safetensors has no error of its own for files that are cut short
        raise DataError(f"{path} is not a whole safetensors file: {error}") from error
    try:
        call, state, leading, value = _read(json.loads(header["map"]), _kinds(), tensors)
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{path} does not hold a map that this version of regard can read: {error!r}") from error
    return call, state, _backend(header.get("backend"), call), leading, value


def _backend(name: str | None, call: Call) -> Backend:
    try:
        return choose(call, name if name in BACKENDS else None)
    except BackendError:
        return choose(call, None)


def _written(tree: Any, names: dict[type, str], tensors: dict[str, Tensor]) -> Any:
    """A tree as JSON; tensors are named and put aside."""
    if tree is None or isinstance(tree, bool | int | float | str):
        return tree
    if isinstance(tree, Tensor):
        name = f"tensor.{len(tensors)}"
        tensors[name] = tree.detach().contiguous().clone()
        return {"tensor": name}
    if isinstance(tree, tuple):
        return {"tuple": [_written(part, names, tensors) for part in tree]}
    if (kind := names.get(type(tree))) is None or any(callable(getattr(tree, f.name)) for f in fields(tree)):
        raise ArgumentError(
            f"this map cannot be saved: {tree} is a {type(tree).__name__}, a function or a class of one's own, which "
            "no file can hold; render it as a bool tensor (mask=) or a float tensor (bias=) before the call"
        )
    return {"kind": kind, "fields": {f.name: _written(getattr(tree, f.name), names, tensors) for f in fields(tree)}}


def _read(tree: Any, kinds: dict[str, type], tensors: dict[str, Tensor]) -> Any:
    """The tree of a JSON value."""
    if not isinstance(tree, dict):
        return tree
    if "tensor" in tree:
        return tensors[tree["tensor"]]
    if "tuple" in tree:
        return tuple(_read(part, kinds, tensors) for part in tree["tuple"])
    kind = kinds[tree["kind"]]
    found = {name: _read(value, kinds, tensors) for name, value in tree["fields"].items()}
    if set(found) != {f.name for f in fields(kind)}:
        raise ValueError(f"{tree['kind']} has the fields {sorted(f.name for f in fields(kind))}, got {sorted(found)}")
    return rebuilt(kind, found)


def _safetensors() -> tuple[Any, Any]:
    try:
        from safetensors import safe_open
        from safetensors.torch import save_file
    except ImportError as error:
        raise MissingExtraError("safetensors", extra="text") from error
    return save_file, safe_open
