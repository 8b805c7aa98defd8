"""The statistics of a map for a page: a small picture and statistics of each head, the strongest keys of each query,
the mean of the heads. One pass over the map's tiles, and one over the mean's."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.call.normalizations import Softmax
from regard.errors import ArgumentError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.maps.sources.derived import AverageSource
from regard.maps.sources.given import given_weights
from regard.maps.sources.source import Source
from regard.maps.statistics.by_name import pooled
from regard.maps.statistics.definitions import Entropy, Received, TopKeys, TopWeights, distance_in
from regard.maps.statistics.pooling import Grid
from regard.tensors.memory import widest_dtype
from regard.views.html.arrays import Floats
from regard.views.values import require_finite
from regard.watching.analysis.head_table import patterns

THUMBNAIL = 64
"""The most cells on a side of a head's small picture."""
KEPT = 512
"""The same for maps with statistics only, whose pictures are taken as recorded."""
STRONGEST = 16
"""How many keys of a query are carried."""


@dataclass(frozen=True, slots=True)
class HeadCells:
    """A picture of heads (H, rows, columns): the largest and the mean weight of each block; None if not recorded."""

    grid: Grid
    largest: Floats | None
    mean: Floats | None


@dataclass(frozen=True, slots=True)
class Top:
    """The strongest keys of each query (H, T, k) in the order of the keys, their weights, and the sum of the others."""

    keys: npt.NDArray[np.integer[Any]]
    weights: Floats
    rest: Floats
    """(H, T)."""


@dataclass(frozen=True, slots=True)
class HeadNumbers:
    cells: HeadCells
    top: Top | None
    largest: list[float]
    without_sink: list[float]
    statistics: dict[str, list[float | None]]


def as_heads(name: str, weights: Any) -> AttentionMap:
    """A map, tensor or array (heads, T, S) or (T, S) as a map (H, T, S)."""
    shape = tuple(getattr(weights, "shape", ()))
    if len(shape) not in (2, 3) or 0 in shape:
        raise ShapeError(f"map {name!r} must have shape (heads, queries, keys), none of them 0; got {shape}")
    if not isinstance(weights, AttentionMap):
        weights = AttentionMap(given_weights(_tensor(name, weights)))
    if weights.source.has_blocks and weights.source.has_signs:
        raise ArgumentError(f"map {name!r}: the page shows weights from 0 up; it is {weights.source} with some below 0")
    heads = weights.detach().with_heads()
    if heads.ndim == 4 and len(heads) == 1:
        return cast(AttentionMap, heads[0])
    if heads.ndim != 3:
        raise ShapeError(
            f"map {name!r} is one of several sequences, {tuple(weights.shape)} {weights.dimensions}: choose one of "
            "them, map[0]"
        )
    return heads


def _tensor(name: str, weights: Any) -> Tensor:
    if isinstance(weights, Tensor):
        tensor = weights.detach().cpu()
    else:
        array = np.asarray(weights)
        if array.dtype.kind not in "fiub":
            raise ShapeError(f"map {name!r} must be made of real numbers; got dtype {array.dtype}")
        # torch rejects floats wider than float64 and negative strides, and warns of read-only arrays.
        wide = array.dtype.kind != "f" or array.dtype.itemsize > 8
        tensor = torch.from_numpy(np.array(array, np.float64 if wide else array.dtype, order="C"))
    if tensor.is_complex():
        raise ShapeError(f"map {name!r} must be made of real numbers; got dtype {tensor.dtype}")
    return tensor if tensor.is_floating_point() else tensor.double()


@torch.no_grad()
def numbers(name: str, heads: AttentionMap, text: Sequence[str] | None) -> HeadNumbers:
    """Statistics of every head of a map (H, T, S).

    `text` has the labels of the keys, if the queries are the last of them; None for queries of another text. Patterns
    are for one text, and those of repeated tokens for labels that repeat.
    """
    queries, keys = heads.shape[-2:]
    wanted = Grid.at_most(THUMBNAIL, THUMBNAIL, queries, keys)
    if not heads.source.has_blocks:
        return _of_what_was_kept(heads)
    asked = [*(() if wanted.is_whole else ("pooled_max",)), "pooled_mean", "entropy", "distance", "received"]
    asked += [] if wanted.is_whole else ["top_keys"]
    k = min(STRONGEST, keys)
    found: dict[str, Any] = heads.summary(*asked, rows=THUMBNAIL, columns=THUMBNAIL, k=k)
    mean = found["pooled_mean"]
    cells = HeadCells(wanted, as_numpy(found.get("pooled_max", mean)), as_numpy(mean))
    for values in (cells.largest, cells.mean):
        if values is not None:
            require_finite(values, wanted, whose=f"map {name!r}: weights")
    largest = [float(one.max()) for one in cast(Floats, cells.largest)]
    top = _top(heads, found["top_keys"]) if "top_keys" in found else None
    return HeadNumbers(cells, top, largest, _without_sink(cells, top, largest), _statistics(heads, found, text))


def mean_of_heads(heads: AttentionMap) -> AttentionMap | None:
    """The mean over the heads (1, T, S), taken before anything is pooled; None for one head, or if it is not known."""
    if len(heads) == 1:
        return None
    if not heads.source.has_blocks:
        queries, keys = heads.shape[-2:]
        grid = heads.grid(KEPT, KEPT, "mean")
        if not heads.source.keeps(pooled(grid.rows.count, grid.columns.count, queries, keys, "mean")):
            return None
    return heads.average().with_heads()


def _without_sink(cells: HeadCells, top: Top | None, largest: list[float]) -> list[float]:
    if cells.grid.is_whole and cells.grid.columns.count > 1:
        values = cells.largest if cells.largest is not None else cells.mean
        return [float(one[:, 1:].max()) for one in cast(Floats, values)]
    if top is None or top.keys.shape[-1] < 2:
        return largest
    return [float(one.max()) for one in np.where(top.keys > 0, top.weights, 0.0)]


def as_numpy(values: Tensor) -> Floats:
    array: Floats = values.cpu().double().numpy()
    return array


def _of_what_was_kept(heads: AttentionMap) -> HeadNumbers:
    source, (queries, keys) = heads.source, heads.shape[-2:]
    found: dict[str, Floats] = {}
    grids = {}
    kinds: tuple[Literal["max"], Literal["mean"]] = ("max", "mean")
    for how in kinds:
        grids[how] = heads.grid(KEPT, KEPT, how)
        rows, columns = grids[how].rows.count, grids[how].columns.count
        if source.keeps(pooled(rows, columns, queries, keys, how)):
            found[how] = as_numpy(heads.pooled(rows, columns, how))
    if not found:
        heads.pooled(THUMBNAIL, THUMBNAIL, "max")  # the error lists the recorded pictures
    grid = grids["max" if "max" in found else "mean"]
    if len(found) == 2 and grids["max"] != grids["mean"]:
        del found["mean"]
    cells = HeadCells(grid, found.get("max"), found.get("mean"))
    k = next((k for k in range(min(STRONGEST, keys), 0, -1) if source.keeps(TopWeights.of(k, keys))), 0)
    top = _top(heads, heads.top_keys(k)) if k else None
    known = (found.get("max"), None if top is None else top.weights, found.get("mean"))
    largest = next(values for values in known if values is not None)
    statistics: dict[str, list[float | None]] = {}
    for name, statistic in (("entropy", Entropy()), ("distance", distance_in(source.part_of, source.device))):
        if source.keeps(statistic):
            statistics[name] = _short(getattr(heads, name)().mean(-1))
    if source.keeps(Received()) and source.keeps(Entropy()):
        statistics["telling"] = _short(telling_score(heads.received(), heads.entropy().mean(-1), queries, None))
    most = [float(one.max()) for one in largest]
    return HeadNumbers(cells, top, most, _without_sink(cells, top, most), statistics)


def _top(heads: AttentionMap, found: TopKeys) -> Top:
    """The strongest keys in the order of the keys; missing keys are at the end, with weight 0."""
    weights, keys = found.values.cpu().double(), found.indices.cpu()
    keys = keys.where(weights > 0, heads.shape[-1] - 1)
    keys, order = keys.sort(dim=-1, stable=True)
    weights = weights.gather(-1, order)
    if not heads.source.has_blocks:
        sums = torch.ones(weights.shape[:-1], dtype=torch.float64).where(weights.sum(-1) > 0, 0.0)
    else:
        known = _known_sums(heads.source)
        if known is None:
            ones = torch.ones(heads.shape[-1], 1, dtype=heads.dtype, device=heads.device)
            known = (heads @ ones)[..., 0]
        sums = known.reshape(weights.shape[:-1]).cpu().double()
    rest = (sums - weights.sum(-1)).clamp_min(0.0)
    # A float32 rounding residue of a sum is no weight.
    rest = rest.where(rest > 1e-6 * sums, 0.0)
    return Top(keys.numpy(), weights.numpy(), rest.numpy())


def _known_sums(source: Source) -> Tensor | None:
    """Sums of weights known without a pass: 1 for every query with a key under softmax without a sink. Else None."""
    if isinstance(source, AverageSource) and source.shares is None:
        sums = _known_sums(source.of)
        return None if sums is None else sums.mean(-2)
    if not isinstance(source, CallSource):
        return None
    normalization = source.call.normalization
    if not isinstance(normalization, Softmax) or normalization.base is not normalization:
        return None
    has_keys = (source.state > -torch.inf).flatten(0, 1)
    return source.laid_out(has_keys.to(widest_dtype(has_keys.device)))


def common_text(rows: list[str], columns: list[str]) -> list[str] | None:
    """The labels of the keys if the queries are the last of them, else None."""
    return columns if len(rows) <= len(columns) and rows == columns[len(columns) - len(rows) :] else None


def _statistics(
    heads: AttentionMap, found: dict[str, Any], text: Sequence[str] | None
) -> dict[str, list[float | None]]:
    """Means over the queries with keys: nats, positions, shares."""
    queries, keys = heads.shape[-2:]
    live = found["pooled_mean"].new_ones(len(heads), queries, dtype=torch.bool)
    if "top_keys" in found:
        live = found["top_keys"].values[..., 0] > 0
    answers = {name: _mean_of(found[name], live) for name in ("entropy", "distance")}
    if text is None:
        answers["first"] = _mean_of(heads[..., 0], live)
    else:
        kinds = {label: kind for kind, label in enumerate(dict.fromkeys(text))}
        answers |= patterns(heads, torch.tensor([kinds[one] for one in text]) if len(kinds) < keys else None, live)
    answers["telling"] = telling_score(found["received"], answers["entropy"], live.sum(-1), answers.get("self"))
    return {name: _short(answer) for name, answer in answers.items()}


def telling_score(received: Tensor, entropy: Tensor, queries: Tensor | int, own: Tensor | None) -> Tensor:
    r"""How much a query tells about the keys that a head looks at, in nats: (H,).

    $(1 - s) \left(H(\bar P) - \overline{H(P_i)}\right)$ with the mean $\bar P_j$ over the queries, the entropy H and
    the weight s on the query's own position: 0 for even attention, for a sink, and for a head that looks at itself.

    `received` is the sum over the queries, (H, S), and `entropy` their mean, (H,); `queries` counts those with a key;
    `own` is s, or None for queries of another text.

    >>> even, sharp = torch.full((3, 3), 1 / 3), torch.eye(3).roll(1, -1)
    >>> both = torch.stack([even, sharp])
    >>> telling_score(both.sum(1), torch.special.entr(both).sum(-1).mean(-1), 3, None)
    tensor([0.0000, 1.0986])
    """
    of_mean = torch.special.entr(received / torch.as_tensor(queries).unsqueeze(-1)).sum(-1)
    return (of_mean - entropy).clamp_min(0.0) * (1 if own is None else 1 - own)


def _short(numbers: Tensor) -> list[float | None]:
    return [None if number != number else float(f"{number:.4g}") for number in numbers.tolist()]


def _mean_of(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of values (H, T) over the counted queries; NaN without any."""
    return values.where(counted, 0.0).sum(-1) / counted.expand_as(values).sum(-1)


def spans(heads: AttentionMap) -> npt.NDArray[np.integer[Any]] | None:
    """The key range of each query under the mask, (T, 2); None if all are allowed, or the mask is unknown."""
    queries, keys = heads.shape[-2:]
    if not heads.source.has_blocks:
        return None
    ranges = [heads.source.columns(range(row, row + 1)) for row in range(queries)]
    found = np.array([(one.start, max(one.start, one.stop)) for one in ranges], np.int64)
    return None if (found == (0, keys)).all() else found
