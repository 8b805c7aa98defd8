"""What a file says of a map is checked against the file's own tensors, before anything of that size is made.

First every field has the type that its class declares. Then the sizes are those of the tensors. At last a few weights
are computed, in the corners of the map, where a mask or a bias with a shape of its own would fail.
"""

import math
import types
from collections.abc import Callable, Iterable
from dataclasses import fields
from functools import cache
from typing import Any, Literal, NamedTuple, Union, get_args, get_origin, get_type_hints

import torch
from torch import Tensor

from regard.backends.base import Call
from regard.maps import statistics as st
from regard.maps.call_source import CallSource
from regard.maps.source import Source, Statistic
from regard.maps.statistics_by_name import STATISTICS, How, by_name
from regard.maps.summary_source import SummarySource
from regard.maps.tiles import ask_all

MOST_DIMENSIONS = 32
"""The most dimensions of a map's layout; torch has 64 in all."""
LONGEST_EMPTY = 2**20
"""The most queries or keys of a map without cells, whose file has no bytes that could tell."""
SMALL = 2**16
"""A map of so many weights is tried with every statistic; of a larger one the corners are."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CallParts(NamedTuple):
    """The parts of a map that `save` writes."""

    call: Call
    state: Tensor
    layout: tuple[int, ...]
    value: Tensor | None


class Told(NamedTuple):
    """What the source of a call was told beside its call; a file without it has what most maps have."""

    heads: bool | None = None
    """Whether the last dimension of a chosen part is that of the heads; None if nothing was chosen."""
    mixed: str = ""
    name: str = ""


class SummaryParts(NamedTuple):
    """The parts of a map of which only statistics were kept."""

    layout: tuple[int, ...]
    number: str
    settings: tuple[tuple[str, ...], int, float, int, int, How]
    named: tuple[tuple[str, Statistic], ...]
    answers: tuple[tuple[Statistic, tuple[Tensor, ...]], ...]


def check_fields(kind: type, values: dict[str, Any]) -> None:
    """Check that a class has these fields, and that their values are of the types that it declares.

    Raises:
        ValueError: a field is absent, unknown or of another type.

    >>> from regard.mechanisms.masks.basic import Causal
    >>> check_fields(Causal, {"offset": 0.5})
    Traceback (most recent call last):
    ValueError: Causal has 0.5 as its offset
    """
    hints = _hints(kind)
    if set(values) != set(hints):
        raise ValueError(f"{kind.__name__} has the fields {sorted(hints)}, got {sorted(values)}")
    for name, value in values.items():
        if not _is(value, hints[name]):
            raise ValueError(f"{kind.__name__} has {_said(value)} as its {name}")


def check_call(parts: CallParts) -> None:
    """Check the sizes of a call against its tensors.

    Raises:
        ValueError: they do not fit.
    """
    check_fields(CallParts, parts._asdict())
    call, state, layout, value = parts
    query, key, sizes = call.query, call.key, call.sizes
    if query.dim() != 4 or key.dim() != 4 or query.dtype not in FLOATS or key.dtype != query.dtype:
        raise ValueError(f"query and key are {_said(query)} and {_said(key)}")
    claimed = (sizes.flat_batch, sizes.heads, sizes.kv_heads, sizes.queries, sizes.keys)
    if claimed != (query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2]):
        raise ValueError(f"its sizes are {claimed}, and its tensors {tuple(query.shape)} and {tuple(key.shape)}")
    if min(*query.shape[1:], *key.shape[1:]) < 1 or key.shape[0] != query.shape[0] or sizes.heads % sizes.kv_heads:
        raise ValueError(f"query and key have the shapes {tuple(query.shape)} and {tuple(key.shape)}")
    cells = query.shape[0] * query.shape[1]
    _check_layout(layout, cells)
    _check_layout(sizes.batch, query.shape[0])
    if not cells and max(sizes.queries, sizes.keys, *query.shape[1:], *key.shape[1:]) > LONGEST_EMPTY:
        raise ValueError(f"it has no batch, and shapes {tuple(query.shape)} and {tuple(key.shape)}")
    if state.shape != query.shape[:3] or state.dtype != call.compute_dtype:
        raise ValueError(f"its row state is {_said(state)}")
    if value is not None and (
        value.dim() != 3 or value.shape[:2] != (cells, sizes.keys) or value.dtype not in FLOATS or not value.shape[2]
    ):
        raise ValueError(f"its values are {_said(value)}")
    if not 0 <= call.dropout < 1:
        raise ValueError(f"its dropout is {call.dropout}")


def check_told(told: Told, layout: tuple[int, ...]) -> None:
    """Check what the source was told.

    Raises:
        ValueError: it is of another type, or there are no heads.
    """
    check_fields(Told, told._asdict())
    if told.heads and not layout:
        raise ValueError("it has heads, and no dimension for them")


def check_summary(parts: SummaryParts) -> None:
    """Check the sizes of kept statistics against their tensors.

    Raises:
        ValueError: they do not fit.
    """
    check_fields(SummaryParts, parts._asdict())
    *leading, queries, keys = parts.layout if len(parts.layout) >= 2 else (0, 0)
    answers = dict(parts.answers)
    if parts.number not in ("float32", "float64") or min(queries, keys) < 1 or not answers:
        raise ValueError(f"it is a map of {parts.number} and shape {parts.layout} with {len(answers)} statistics")
    cells = math.prod(leading)
    _check_layout(tuple(leading), cells)
    for name, statistic in parts.named:
        if name not in STATISTICS or statistic not in answers:
            raise ValueError(f"it has {statistic} as {name!r}")
    for statistic, found in answers.items():
        expected = _answer_shapes(statistic, cells, queries, keys)
        if [tuple(t.shape) for t in found] != expected:
            raise ValueError(f"it has {', '.join(map(_said, found))} as {statistic}, expected shapes {expected}")
        match statistic:
            case st.ArgLargest():
                weights, indices = found[:0], found
            case st.QuantileMass():  # a number of keys
                weights, indices = found[:0], tuple(t - 1 for t in found)
            case _:
                weights, indices = found[:1], found[1:] if isinstance(statistic, st.TopWeights) else ()
        if any(t.dtype not in FLOATS for t in weights) or not all(_are_places(t, keys) for t in indices):
            raise ValueError(f"it has {', '.join(map(_said, found))} as {statistic}")


def try_source(source: Source) -> None:
    """Compute a little of a map, to see that it can be computed: whatever is raised shows that it cannot.

    Raises:
        Exception: of any class.
    """
    repr(source)
    if isinstance(source, SummarySource):
        ask_all(source, list(source.answers))
        return
    assert isinstance(source, CallSource)
    if source.cells == 0:
        return
    queries, keys = source.queries, source.keys
    with torch.no_grad():
        _try_corners(source)
        if source.cells * queries * keys * source.width <= SMALL:
            names = [name for name in STATISTICS if name != "pooled"]
            ask_all(source, [*by_name(names, queries, keys, k=1, p=0.5, rows=2, columns=2, how="mean").values()])
            by_queries, by_keys = (torch.ones(n, 1, dtype=source.dtype, device=source.device) for n in (queries, keys))
            ask_all(source, [st.Squares(), st.TransposedProduct(by_queries[None])])
            source.product(by_keys)
            source.choose(torch.arange(source.cells, device=source.device), (source.cells,)).product(by_keys)


def _try_corners(source: CallSource) -> None:
    down, across = _corners(source.queries), _corners(source.keys)
    for cells in {range(source.cells), range(1), range(source.cells - 1, source.cells)}:
        part = source.part(cells)
        for rows in down:
            seen = source.columns(rows)
            if not 0 <= seen.start <= seen.stop <= source.keys and len(seen):
                raise ValueError(f"its mask shows the keys {seen} of {source.keys}")
            for columns in across:
                part(rows, columns)
                part(*(torch.tensor(places, device=source.device) for places in (rows, columns)))
    queries, keys = (
        torch.tensor([place for corner in corners for place in corner], device=source.device)
        for corners in (down, across)
    )
    count = min(len(queries), len(keys))
    source.pairs(queries[:count], keys[:count])
    source.row_anew(range(source.queries - 1, source.queries))


def _corners(length: int) -> list[range]:
    """The first two places, two in the middle, and the last two."""
    width = min(2, length)
    return [range(start, start + width) for start in dict.fromkeys((0, (length - width) // 2, length - width))]


def _check_layout(layout: tuple[int, ...], cells: int) -> None:
    if len(layout) > MOST_DIMENSIONS or any(n < 0 for n in layout) or math.prod(layout) != cells:
        raise ValueError(f"it has {cells} heads of sequences in the layout {_said(layout)}")


def _answer_shapes(statistic: Statistic, cells: int, queries: int, keys: int) -> list[tuple[int, ...]]:
    """The shapes of the answers of a statistic that can be kept."""
    match statistic:
        case st.TopWeights(k) if 1 <= k <= keys:
            return [(cells, queries, k)] * 2
        case st.Pooled(grid, how) if how in ("mean", "sum", "max"):
            for bins, length in ((grid.rows, queries), (grid.columns, keys)):
                if bins.length != length or not 1 <= bins.count <= length:
                    raise ValueError(f"it has a picture of {grid}, and is a map of {queries} x {keys}")
            return [(cells, grid.rows.count, grid.columns.count)]
        case st.Received():
            return [(cells, keys)]
        case st.Participation():
            return [(cells, queries)] * 2
        case st.Entropy() | st.Largest() | st.ArgLargest() | st.QuantileMass() | st.Distance():
            return [(cells, queries)]
    raise ValueError(f"it has {statistic}, which no map keeps")


def _are_places(indices: Tensor, keys: int) -> bool:
    """Whether a tensor holds indices of keys; -1 stands for none."""
    if indices.dtype not in (torch.int32, torch.int64):
        return False
    return indices.numel() == 0 or (int(indices.min()) >= -1 and int(indices.max()) < keys)


@cache
def _hints(kind: Any) -> dict[str, Any]:
    hints = get_type_hints(kind)
    return hints if issubclass(kind, tuple) else {field.name: hints[field.name] for field in fields(kind)}


def _is(value: Any, hint: Any) -> bool:
    """Whether a value is of a declared type."""
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
        return False  # nothing of this kind is in a file
    return isinstance(value, hint)


def _all_are(values: tuple[Any, ...], hints: tuple[Any, ...]) -> bool:
    if hints[1:] == (...,):
        return all(_is(value, hints[0]) for value in values)
    return len(values) == len(hints) and all(map(_is, values, hints))


def _said(value: Any) -> str:
    """A value in few words."""
    if isinstance(value, Tensor):
        return f"{str(value.dtype).removeprefix('torch.')} {tuple(value.shape)}"
    return repr(value)[:80] if isinstance(value, int | float | str | Iterable) else type(value).__name__
