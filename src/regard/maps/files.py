"""Maps on disk: a safetensors file of their factors, with their tree as JSON in the header.

A file is checked against its own tensors before anything of the claimed size is allocated: sizes are those of the
tensors, and a few weights are computed in the corners of the map.
"""

import math
from collections.abc import Callable
from os import PathLike
from os.path import isfile, realpath
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor

from regard.call.shapes import Dimensions
from regard.errors import ArgumentError, BackendError, DataError, require
from regard.files.atomic import file_errors, write_atomically
from regard.files.untrusted import open_tensors, safetensors_library
from regard.kernels import BACKENDS, choose_backend
from regard.kernels.base import Backend, BackendName, Call
from regard.maps.file_tree import as_json_and_tensors, check_fields, from_json_and_tensors, spelled
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import Factors
from regard.maps.sources.source import Source, Statistic
from regard.maps.sources.summary import Summarize, SummarySource
from regard.maps.sources.values import CallValues
from regard.maps.statistics import definitions as st
from regard.maps.statistics.by_name import STATISTICS, How, Summary, by_name
from regard.maps.statistics.of_map import MapStatistics
from regard.maps.statistics.tiles import ask_all

S = TypeVar("S", CallSource, SummarySource)
FORMAT, SUMMARY_FORMAT = "regard.AttentionMap 1", "regard.summary 1"
KINDS = {FORMAT: "attention map", SUMMARY_FORMAT: "summary of a map"}
MOST_DIMENSIONS = 32
"""The most dimensions of a map's layout; torch has 64 in all."""
LONGEST_EMPTY = 2**20
"""The most queries or keys of a map without flat_heads, whose tensors have no bytes that limit its lengths."""
SMALL = 2**16
"""Up to this many weights all statistics are computed as a check; of larger maps the corners are."""
FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class CallParts(NamedTuple):
    call: Call
    state: Tensor
    layout: tuple[int, ...]
    value: Tensor | None
    names: Dimensions
    name: str
    key_heads: Tensor | None


class SummaryParts(NamedTuple):
    layout: tuple[int, ...]
    names: Dimensions
    number: str
    settings: tuple[tuple[str, ...], int, float, int, int, How]
    named: tuple[tuple[str, Statistic], ...]
    answers: tuple[tuple[Statistic, tuple[Tensor, ...]], ...]


def save(path: str | PathLike[str], source: CallSource) -> None:
    call, heads = source.call, source.chosen_key_heads
    state, value = source.factors.state_of(call), source.value
    parts = CallParts(call, state, source.leading, value, source.dimensions, source.name, heads)
    tree, tensors = as_json_and_tensors(tuple(parts))
    _write(path, tensors, {"format": FORMAT, "backend": source.backend.name, "map": tree})


def load(path: str | PathLike[str], device: torch.device) -> Source:
    """Read a map of `save`, or the statistics of `save_summary`."""
    header, tensors = _contents(path)
    if header.get("format") == SUMMARY_FORMAT and "map" in header:
        return _loaded(path, header, tensors, device, _summary_source)
    _require_format(path, header, FORMAT)
    return _loaded(path, header, tensors, device, _call_source)


def save_summary(path: str | PathLike[str], summary: Summary | MapStatistics) -> None:
    """Write the result of `map.summary(...)` to a safetensors file, for `load_summary`.

    It also takes a map with statistics only (`regard.watch(model, keep="summary")`), and writes all of them.
    `regard.AttentionMap.load` reads such a map again.

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
    require(summary, (dict, MapStatistics), "summary", "the result of map.summary(), or a map with statistics only")
    header, tensors = {"format": SUMMARY_FORMAT}, dict[str, Tensor]()
    if isinstance(summary, MapStatistics):
        header["map"], tensors = as_json_and_tensors(tuple(_parts_of_summary(summary)))
    else:
        for name, answer in summary.items():
            parts = {"": answer} if isinstance(answer, Tensor) else {f".{n}": t for n, t in answer._asdict().items()}
            tensors |= {f"{name}{part}": tensor.detach().contiguous().clone() for part, tensor in parts.items()}
    _write(path, tensors, header)


def load_summary(path: str | PathLike[str], *, device: torch.device | str = "cpu") -> Summary:
    """Read the statistics of `save_summary`, by name.

    Raises:
        DataError: it is no such file.
        MissingExtraError: safetensors is not installed.
    """
    header, tensors = _contents(path)
    _require_format(path, header, SUMMARY_FORMAT)
    if "map" in header:
        return MapStatistics(_loaded(path, header, tensors, torch.device(device), _summary_source)).statistics
    summary: Summary = {}
    for name, tensor in ((name, tensor.to(device)) for name, tensor in tensors.items()):
        whole, _, part = name.partition(".")
        if not part:
            summary[whole] = tensor
        elif part == "values" and f"{whole}.indices" in tensors:
            summary[whole] = st.TopKeys(tensor, tensors[f"{whole}.indices"])
    return summary


def _parts_of_summary(summary: MapStatistics) -> SummaryParts:
    source = summary.source
    if not isinstance(source, SummarySource):
        raise ArgumentError(
            "save_summary() takes the result of map.summary(...), or a map of which statistics alone were kept; "
            f"{summary!r} holds queries and keys: map.save(path) writes these"
        )
    what = source.what
    settings = (what.names, what.k, what.p, what.rows, what.columns, what.how)
    number = str(source.number).removeprefix("torch.")
    kept, answers = tuple(source.named.items()), tuple(source.answers.items())
    return SummaryParts(source.layout, source.dimensions, number, settings, kept, answers)


def _loaded(
    path: str | PathLike[str],
    header: dict[str, str],
    tensors: dict[str, Tensor],
    device: torch.device,
    made: Callable[[dict[str, str], tuple[Any, ...]], S],
) -> S:
    try:
        source = made(header, from_json_and_tensors(header["map"], tensors))
        repr(source)
        _try(source)
    except Exception as error:  # inconsistent parts fail in torch, in numpy and in our own code
        raise DataError(f"{path} does not hold a map that this version of regard can read: {error!r}") from error
    moved: S = source if source.device == device else source.mapped(lambda tensor: tensor.to(device))
    return moved


def _summary_source(header: dict[str, str], tree: tuple[Any, ...]) -> SummarySource:
    parts = SummaryParts(*tree)
    _check_summary(parts)
    names, k, p, rows, columns, how = parts.settings
    what = Summarize(*names, k=k, p=p, rows=rows, columns=columns, how=how)
    number, answers = getattr(torch, parts.number), dict(parts.answers)
    return SummarySource(parts.layout, number, what, dict(parts.named), parts.names, answers)


def _call_source(header: dict[str, str], tree: tuple[Any, ...]) -> CallSource:
    parts = CallParts(*tree)
    _check_call(parts)
    factors, backend = Factors.given(parts.call, parts.state), _backend(header.get("backend"), parts.call)
    beside = CallValues() if parts.value is None else CallValues.given(parts.value)
    shape = torch.Size((*parts.layout, parts.call.sizes.queries, parts.call.sizes.keys))
    return CallSource(factors, shape, backend, beside, parts.name, parts.names, parts.key_heads)


def _require_format(path: str | PathLike[str], header: dict[str, str], expected: str) -> None:
    if header.get("format") != expected:
        raise DataError(f"{path} is not a saved {KINDS[expected]}: its format is {header.get('format')!r}")


def _contents(path: str | PathLike[str]) -> tuple[dict[str, str], dict[str, Tensor]]:
    require(path, (str, PathLike), "path", "the path of a file")
    if not isfile(path):
        raise DataError(f"expected a file that save() wrote; there is none at {path}")
    with open_tensors(path) as file:
        return file.metadata() or {}, {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118


def _write(path: str | PathLike[str], tensors: dict[str, Tensor], header: dict[str, str]) -> None:
    require(path, (str, PathLike), "path", "the path of a file")
    with file_errors(path):
        write_atomically(realpath(path), safetensors_library().torch.save(tensors, metadata=header))


def _backend(name: str | None, call: Call) -> Backend:
    try:
        return choose_backend(call, cast(BackendName, name) if name in BACKENDS else None)
    except BackendError:
        return choose_backend(call, None)


def _require(holds: bool, wrong: str) -> None:
    if not holds:
        raise ValueError(wrong)


def _check_call(parts: CallParts) -> None:
    check_fields(CallParts, parts._asdict())
    call, state, value = parts.call, parts.state, parts.value
    query, key, sizes = call.query, call.key, call.sizes
    shapes = f"query and key are {spelled(query)} and {spelled(key)}"
    _require(query.dim() == key.dim() == 4 and query.dtype == key.dtype and query.dtype in FLOATS, shapes)
    claimed = (sizes.flat_batch, sizes.heads, sizes.kv_heads, sizes.queries, sizes.keys)
    found = (query.shape[0], query.shape[1], key.shape[1], query.shape[2], key.shape[2])
    _require(claimed == found, f"its sizes are {claimed}, and its tensors {tuple(query.shape)} and {tuple(key.shape)}")
    longest = (*query.shape[1:], *key.shape[1:])
    _require(min(longest) >= 1 and key.shape[0] == query.shape[0] and not sizes.heads % sizes.kv_heads, shapes)
    flat_heads = query.shape[0] * query.shape[1]
    _check_layout(parts.layout, flat_heads)
    _check_layout(sizes.batch, query.shape[0])
    _require(bool(flat_heads) or max(longest) <= LONGEST_EMPTY, f"it has no batch, and shapes {longest}")
    _require(state.shape == query.shape[:3] and state.dtype == call.compute_dtype, f"its row state is {spelled(state)}")
    _require(
        value is None
        or (
            value.dim() == 3
            and value.shape[:2] == (flat_heads, sizes.keys)
            and value.dtype in FLOATS
            and value.shape[2] > 0
        ),
        f"its values are {spelled(value)}",
    )
    _require(0 <= call.dropout < 1, f"its dropout is {call.dropout}")
    _require(parts.names.rank == len(parts.layout), f"it has dimensions {parts.names} in a layout {parts.layout}")


def _check_summary(parts: SummaryParts) -> None:
    check_fields(SummaryParts, parts._asdict())
    *leading, queries, keys = parts.layout if len(parts.layout) >= 2 else (0, 0)
    answers, flat_heads = dict(parts.answers), math.prod(leading)
    _require(
        parts.number in ("float32", "float64") and min(queries, keys) >= 1 and bool(answers),
        f"it is a map of {parts.number} and shape {parts.layout} with {len(answers)} statistics",
    )
    _check_layout(tuple(leading), flat_heads)
    _require(parts.names.rank == len(leading), f"it has dimensions {parts.names} in a layout {parts.layout}")
    for name, statistic in parts.named:
        _require(name in STATISTICS and statistic in answers, f"it has {statistic} as {name!r}")
    for statistic, found in answers.items():
        expected = _answer_shapes(statistic, flat_heads, queries, keys)
        wrong = f"it has {', '.join(map(spelled, found))} as {statistic}, expected shapes {expected}"
        _require([tuple(t.shape) for t in found] == expected, wrong)
        match statistic:
            case st.ArgLargest():
                weights, indices = found[:0], found
            case st.TopPCount():  # counts of keys
                weights, indices = found[:0], tuple(t - 1 for t in found)
            case _:
                weights, indices = found[:1], found[1:] if isinstance(statistic, st.TopWeights) else ()
        _require(all(t.dtype in FLOATS for t in weights) and all(_are_places(t, keys) for t in indices), wrong)


def _try(source: Source) -> None:
    if isinstance(source, SummarySource):
        ask_all(source, list(source.answers))
    elif isinstance(source, CallSource) and source.flat_heads:
        with torch.no_grad():
            _try_corners(source)
            if source.flat_heads * source.queries * source.keys * source.width <= SMALL:
                _try_statistics(source)


def _try_statistics(source: CallSource) -> None:
    queries, keys = source.queries, source.keys
    names = [name for name in STATISTICS if name != "pooled"]
    ask_all(source, [*by_name(names, queries, keys, k=1, p=0.5, rows=2, columns=2, how="mean").values()])
    by_queries, by_keys = (torch.ones(n, 1, dtype=source.dtype, device=source.device) for n in (queries, keys))
    ask_all(source, [st.TransposedProduct(by_queries[None])])
    source.product(by_keys)
    source.choose(torch.arange(source.flat_heads, device=source.device), (source.flat_heads,)).product(by_keys)


def _try_corners(source: CallSource) -> None:
    rows, columns = _corners(source.queries, source.device), _corners(source.keys, source.device)
    for flat_heads in {range(source.flat_heads), range(1), range(source.flat_heads - 1, source.flat_heads)}:
        part = source.part(flat_heads)
        part(rows, columns)
        for row in rows.tolist():
            seen = source.columns(range(row, row + 1))
            fits = not seen or 0 <= seen.start <= seen.stop <= source.keys
            _require(fits, f"its mask shows the keys {seen} of {source.keys}")
            part(range(row, row + 1), range(source.keys)[seen.start : seen.start + 2] or range(1))
    count = min(len(rows), len(columns))
    source.pairs(rows[:count], columns[:count])


def _corners(length: int, device: torch.device) -> Tensor:
    places = {0, min(1, length - 1), (length - 1) // 2, length // 2, max(length - 2, 0), length - 1}
    return torch.tensor(sorted(places), device=device)


def _check_layout(layout: tuple[int, ...], flat_heads: int) -> None:
    fits = len(layout) <= MOST_DIMENSIONS and all(n >= 0 for n in layout) and math.prod(layout) == flat_heads
    _require(fits, f"it has {flat_heads} heads of sequences in the layout {spelled(layout)}")


def _answer_shapes(statistic: Statistic, flat_heads: int, queries: int, keys: int) -> list[tuple[int, ...]]:
    match statistic:
        case st.TopWeights(k) if 1 <= k <= keys:
            return [(flat_heads, queries, k)] * 2
        case st.Pooled(grid, how) if how in ("mean", "sum", "max"):
            for bins, length in ((grid.rows, queries), (grid.columns, keys)):
                fits = bins.length == length and 1 <= bins.count <= length
                _require(fits, f"it has a picture of {grid}, and is a map of {queries} x {keys}")
            return [(flat_heads, grid.rows.count, grid.columns.count)]
        case st.Received():
            return [(flat_heads, keys)]
        case st.ParticipationRatio():
            return [(flat_heads, queries)] * 2
        case st.Entropy() | st.Largest() | st.ArgLargest() | st.TopPCount() | st.Distance():
            return [(flat_heads, queries)]
    raise ValueError(f"it has {statistic}, which no map keeps")


def _are_places(indices: Tensor, keys: int) -> bool:
    if indices.dtype not in (torch.int32, torch.int64):
        return False
    return indices.numel() == 0 or (int(indices.min()) >= -1 and int(indices.max()) < keys)
