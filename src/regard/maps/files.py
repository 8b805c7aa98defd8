"""Maps on disk: a safetensors file holds their factors, and its header says in JSON what the factors are."""

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields, is_dataclass
from os import PathLike
from os.path import realpath
from types import ModuleType
from typing import Any, TypeVar

import torch
from torch import Tensor

from regard.backends import BACKENDS, choose_backend
from regard.backends.base import Backend, Call
from regard.errors import ArgumentError, BackendError, DataError
from regard.maps import fused_statistics, pooling, statistics
from regard.maps.call_source import CallSource, GivenFactors
from regard.maps.call_values import CallValues
from regard.maps.file_checks import (
    CallParts,
    SummaryParts,
    Told,
    check_call,
    check_fields,
    check_summary,
    check_told,
    try_source,
)
from regard.maps.source import Source
from regard.maps.statistics import TopKeys
from regard.maps.statistics_by_name import Summary
from regard.maps.statistics_of_map import MapStatistics
from regard.maps.summary_source import Summarize, SummarySource
from regard.mechanisms import normalizations
from regard.mechanisms.biases import alibi, relative, shaw, t5, transformer_xl
from regard.mechanisms.biases import base as biases
from regard.mechanisms.masks import base as masks
from regard.mechanisms.masks import basic, patterns, selection, transpose
from regard.mechanisms.scores import additive, custom, kernels
from regard.mechanisms.scores import base as scores
from regard.mechanisms.shapes import Sizes
from regard.mechanisms.tensor_tree import rebuilt
from regard.storage.atomic import write_atomically
from regard.storage.untrusted import open_tensors, parse_json, safetensors_library

S = TypeVar("S", CallSource, SummarySource)
FORMAT, SUMMARY_FORMAT = "regard.AttentionMap 1", "regard.summary 1"
KINDS = {"AttentionMap": "attention map", "summary": "summary of a map"}
NAMED: tuple[ModuleType, ...] = (
    *(alibi, relative, shaw, t5, transformer_xl, biases),
    *(masks, basic, patterns, selection, transpose),
    *(additive, custom, kernels, scores, normalizations),
    *(statistics, pooling),
)
"""The modules whose classes a file may name. It gives only the name of a class, which is unique, so that a class can
move to another module."""


def _kinds() -> dict[str, type]:
    """The classes that a file may name: the frozen objects that make up a call, without those that hold a function."""
    found = {
        name: kind
        for module in NAMED
        for name, kind in vars(module).items()
        if isinstance(kind, type) and is_dataclass(kind) and kind.__module__ == module.__name__
    }
    return {**found, "Sizes": Sizes, "Call": Call, "Doubled": fused_statistics.Doubled}


def save(path: str | PathLike[str], source: CallSource) -> None:
    """Write the factors of a call's map.

    Raises:
        ArgumentError: no file can hold a part of the map.
        MissingExtraError: safetensors is not installed.
    """
    tree, tensors = _packed((source.call, source.state, source.layout, source.value))
    header = {"format": FORMAT, "backend": source.backend.name, "map": tree}
    told = Told(source.keeps_heads, source.mixed, source.name)
    if told != Told():
        header["told"] = json.dumps(told._asdict())
    _write(path, tensors, header)


def load(path: str | PathLike[str], device: torch.device) -> Source:
    """Read what `save` wrote of a map, or `save_summary` of a map of which only statistics were kept.

    Raises:
        DataError: it is not such a file, or what it says does not fit its own tensors.
        MissingExtraError: safetensors is not installed.
    """
    header, tensors = _contents(path)
    if header.get("format") == SUMMARY_FORMAT and "map" in header:
        return _moved(_summary_source(path, header, tensors), device)
    _require_format(path, header, FORMAT)
    return _moved(_call_source(path, header, tensors), device)


def save_summary(path: str | PathLike[str], summary: Summary | MapStatistics) -> None:
    """Write the result of `map.summary(...)` to a safetensors file, from which `load_summary` reads it.

    It also takes a map of which only statistics were kept (`regard.watch(model, keep="summary")`), and writes all of
    them. `regard.AttentionMap.load` reads such a map again, and it can be asked and drawn as before.

    Raises:
        ArgumentError: the map holds its factors; `map.save(path)` writes these.
        MissingExtraError: safetensors is not installed.

    >>> import regard, tempfile, pathlib
    >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     save_summary(pathlib.Path(folder, "summary.safetensors"), weights.summary("entropy", "top_keys", k=1))
    ...     load_summary(pathlib.Path(folder, "summary.safetensors"))["top_keys"].indices.tolist()
    [[0], [1], [2]]
    """
    header, tensors = {"format": SUMMARY_FORMAT}, dict[str, Tensor]()
    if isinstance(summary, MapStatistics):
        header["map"], tensors = _packed(_parts_of_summary(summary))
    else:
        for name, answer in summary.items():
            fields_of = {name: answer} if isinstance(answer, Tensor) else _fields_of(name, answer)
            tensors |= {part: tensor.detach().contiguous().clone() for part, tensor in fields_of.items()}
    _write(path, tensors, header)


def load_summary(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> Summary:
    """Read what `save_summary` wrote, by name.

    Raises:
        DataError: it is not such a file.
        MissingExtraError: safetensors is not installed.
    """
    header, tensors = _contents(path)
    _require_format(path, header, SUMMARY_FORMAT)
    if "map" in header:
        return MapStatistics(_moved(_summary_source(path, header, tensors), torch.device(device))).statistics
    summary: Summary = {}
    for name, tensor in ((name, tensor.to(device)) for name, tensor in tensors.items()):
        whole, _, part = name.partition(".")
        if not part:
            summary[whole] = tensor
        elif part == "values" and f"{whole}.indices" in tensors:
            summary[whole] = TopKeys(tensor, tensors[f"{whole}.indices"])
    return summary


def _fields_of(name: str, top: TopKeys) -> dict[str, Tensor]:
    return {f"{name}.{field}": tensor for field, tensor in top._asdict().items()}


def _parts_of_summary(summary: MapStatistics) -> tuple[Any, ...]:
    source = summary.source
    if not isinstance(source, SummarySource):
        raise ArgumentError(
            "save_summary() takes what map.summary(...) said, or a map of which statistics alone were kept; "
            f"{summary!r} holds what its weights follow from: map.save(path) writes that"
        )
    what = source.what
    settings = (what.names, what.k, what.p, what.rows, what.columns, what.how)
    number = str(source.number).removeprefix("torch.")
    return source.layout, number, settings, tuple(source.named.items()), tuple(source.answers.items())


def _summary_source(path: str | PathLike[str], header: dict[str, str], tensors: dict[str, Tensor]) -> SummarySource:
    with _fitting(path):
        parts = SummaryParts(*_unpacked(header, tensors))
        check_summary(parts)
        names, k, p, rows, columns, how = parts.settings
        what = Summarize(*names, k=k, p=p, rows=rows, columns=columns, how=how)
        number = getattr(torch, parts.number)
        source = SummarySource(parts.layout, number, what, dict(parts.named), dict(parts.answers))
        try_source(source)
    return source


def _call_source(path: str | PathLike[str], header: dict[str, str], tensors: dict[str, Tensor]) -> CallSource:
    with _fitting(path):
        parts = CallParts(*_unpacked(header, tensors))
        check_call(parts)
        factors = GivenFactors(parts.call, parts.state)
        backend = _backend(header.get("backend"), parts.call)
        beside = CallValues() if parts.value is None else CallValues.given(parts.value)
        told = Told(**parse_json(header.get("told", "{}")))
        check_told(told, parts.layout)
        source = CallSource(factors, parts.layout, backend, beside, told.name, told.mixed, told.heads)
        try_source(source)
    return source


def _moved(source: S, device: torch.device) -> S:
    return source if source.device == device else source.mapped(lambda tensor: tensor.to(device))


@contextmanager
def _fitting(path: str | PathLike[str]) -> Iterator[None]:
    """Say of anything that is raised while a map is made of a file that the file does not hold one.

    Raises:
        DataError: something was raised.
    """
    try:
        yield
    except Exception as error:  # parts that do not fit together fail in torch, in numpy and in our own code
        raise DataError(f"{path} does not hold a map that this version of regard can read: {error!r}") from error


def _packed(parts: tuple[Any, ...]) -> tuple[str, dict[str, Tensor]]:
    """A tree as JSON, and its tensors by the names that it gives them."""
    tensors: dict[str, Tensor] = {}
    names = {kind: name for name, kind in _kinds().items()}
    tree = json.dumps(_written(parts, names, tensors))
    try:
        parse_json(tree)
    except DataError as error:
        raise ArgumentError(f"this map cannot be saved: its parts are {error}; make it of fewer parts") from None
    return tree, tensors


def _unpacked(header: dict[str, str], tensors: dict[str, Tensor]) -> tuple[Any, ...]:
    """Make the tree again of JSON and tensors."""
    parts: tuple[Any, ...] = _read(parse_json(header["map"]), _kinds(), tensors)
    if not isinstance(parts, tuple):
        raise TypeError(f"a map is written as a tuple, got {type(parts).__name__}")
    return parts


def _require_format(path: str | PathLike[str], header: dict[str, str], expected: str) -> None:
    if header.get("format") != expected:
        kind = expected.partition(" ")[0].removeprefix("regard.")
        raise DataError(f"{path} is not a saved {KINDS[kind]}: its format is {header.get('format')!r}")


def _contents(path: str | PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    """The header and the tensors of a file."""
    with open_tensors(path) as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _write(path: str | PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    """Write a file in one step; if `path` is a link, the file that it leads to."""
    write_atomically(realpath(path), safetensors_library().torch.save(tensors, metadata=header))


def _backend(name: str | None, call: Call) -> Backend:
    # A file must not have a kernel compiled, which takes minutes: what only its name chooses never reads a map.
    known = name in BACKENDS and BACKENDS[name].only_by_name is None
    try:
        return choose_backend(call, name if known else None)
    except BackendError:
        return choose_backend(call, None)


def _written(tree: Any, names: dict[type, str], tensors: dict[str, Tensor]) -> Any:
    """A tree as JSON; tensors are named and put aside."""
    if isinstance(tree, float) and not math.isfinite(tree):
        return {"number": str(tree)}  # JSON has no such number
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
    if "number" in tree:
        return float(tree["number"])
    if "tuple" in tree:
        return tuple([_read(part, kinds, tensors) for part in tree["tuple"]])
    kind = kinds[tree["kind"]]
    found = {name: _read(value, kinds, tensors) for name, value in tree["fields"].items()}
    check_fields(kind, found)
    made = rebuilt(kind, found)
    # The places follow from the ids, and are found anew: others would show keys of other documents.
    return made.placed() if isinstance(made, patterns.Documents) and made.places is not None else made
