"""What a page carries: a budget of bytes, spent in a fixed order on what is most useful first.

1. Labels, a picture of at most 64 x 64 cells of each head, and a few numbers of it. These always come.
2. The factors of the maps that the caller names, from which every weight can be computed.
3. For each query the strongest key of every head; then its 16 strongest keys, and the sum of the others.
4. The exact weights of heads, or finer pictures of them where the weights do not fit: first of the maps that the caller
   names, or of those that are shown first; then of the others.

What is not carried is named; nothing is made up in its place.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.maps.pooling import Bins, Grid
from regard.views.html.arrays import Arrays, packed
from regard.views.html.factors import factors_of
from regard.views.html.numbers import HeadNumbers, Top, as_heads, mean_of_heads, numbers, spans
from regard.views.html.token_lists import TokenLists, kind_and_layer, required
from regard.views.labels import axis_labels

FINER = (256, 1024)
"""The sides of finer pictures, where the weights themselves do not fit."""
HALF_LARGEST = 60_000.0
"""Half precision ends a little above."""
LABELS_BYTES = 16
"""What a label takes in a page, about."""
MIB = 2.0**20


class Map(NamedTuple):
    """One layer of attention with its labels."""

    weights: Any
    """(heads, T, S) or (T, S): an `AttentionMap`, a tensor or an array, from 0 up."""
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None


class Example(NamedTuple):
    """One sentence or pair of sentences, and all of its maps that the page shows."""

    title: str
    maps: Mapping[str, Map]
    """Maps by name. The numbers in a name are the layer, and the words are the kind: "decoder.0.cross"."""
    show: str = ""
    """The name of the map that is shown first; "" for the last map."""


@dataclass
class Carried:
    """What a page carries of one map, in heads; the mean of the heads counts as one more.

    `print` it.
    """

    example: str
    name: str
    heads: int
    of_each_query: dict[int, int] = field(default_factory=dict)
    """How many heads have the 1, or the 16, strongest keys of each query."""
    exact: int = 0
    """Heads with all weights."""
    finer: int = 0
    """Heads with a picture finer than 64 x 64."""
    factors: int = 0
    """Heads whose weights are computed from queries and keys."""

    def __str__(self) -> str:
        counts = {
            "every weight": min(self.heads, self.exact + self.factors),
            **{f"the {k} strongest keys of each query": n for k, n in sorted(self.of_each_query.items(), reverse=True)},
            "a finer picture": self.finer,
        }
        held = [f"{what} of {count} of {self.heads}" for what, count in counts.items() if count]
        return f"{self.name}: {'; '.join(held) or 'pictures of 64 x 64 alone'}"


class _Work(NamedTuple):
    """A map on its way into the page."""

    entry: dict[str, Any]
    carried: Carried
    heads: AttentionMap
    mean: AttentionMap | None
    found: list[HeadNumbers]
    """Of the heads, and of their mean if there is more than one."""
    spans: npt.NDArray[np.integer[Any]] | None

    def one(self, head: int) -> AttentionMap:
        """The map (1, T, S) of a head; that of the mean comes after the last head."""
        if head == len(self.heads):
            assert self.mean is not None
            return self.mean
        return self.heads.only(heads=slice(head, head + 1))

    def top(self, head: int) -> Top | None:
        """The strongest keys of a head, (1, T, k)."""
        of, at = (self.found[0], head) if head < len(self.heads) else (self.found[1], 0)
        if of.top is None:
            return None
        one = slice(at, at + 1)
        return Top(of.top.keys[one], of.top.weights[one], of.top.rest[one])


def contents(
    examples: Sequence[Example], budget_bytes: float, exact: Sequence[str] | None, factors: Sequence[str]
) -> tuple[dict[str, Any], Arrays, list[Carried]]:
    """The examples as the page's script reads them, their arrays, and what was carried.

    Raises:
        TooLargeError: the labels and small pictures alone are above the budget.
        RegardError: see `page`.
    """
    arrays = Arrays(budget_bytes)
    shown: list[dict[str, Any]] = []
    works: list[list[_Work]] = []
    for example in examples:
        entry, some = _first(example, arrays)
        shown.append(entry)
        works.append(some)
    flat = [work for some in works for work in some]
    known = {work.carried.name for work in flat}
    if unknown := [name for name in (*(exact or ()), *factors) if name not in known]:
        raise ArgumentError(f"exact and factors name maps, {', '.join(sorted(known))}; got {', '.join(unknown)}")
    for work in flat:
        if work.carried.name in factors:
            _carry_factors(work, arrays)
    if exact is None:
        first = [some[entry["show"]] for some, entry in zip(works, shown, strict=True)]
    else:
        first = [work for work in flat if work.carried.name in exact]
    order = first + [work for work in flat if not any(work is one for one in first)]
    for k in (1, 16):
        for work in order:
            _carry_strongest(work, arrays, k)
    for work in order:
        _carry_exact(work, arrays)
    return {"examples": shown}, arrays, [work.carried for work in flat]


# -- 1: labels, pictures, numbers ------------------------------------------------------------------------


def _first(example: Example, arrays: Arrays) -> tuple[dict[str, Any], list[_Work]]:
    names = list(example.maps)
    if example.show and example.show not in names:
        raise ArgumentError(f"show must name one of the maps {', '.join(names)}; got {example.show!r}")
    labels = TokenLists(arrays)
    works = [_begun(example, name, one, labels, arrays) for name, one in example.maps.items()]
    entry = {
        "title": example.title,
        "labels": labels.entries,
        "maps": [work.entry for work in works],
        "show": names.index(example.show) if example.show else len(names) - 1,
    }
    return entry, works


def _begun(example: Example, name: str, one: Map, labels: TokenLists, arrays: Arrays) -> _Work:
    heads = as_heads(name, one.weights)
    count, queries, keys = heads.shape
    rows, columns = axis_labels(one.rows, queries, "rows"), axis_labels(one.columns, keys, "columns")
    found = [numbers(name, heads, None if one.columns is None else columns)]
    mean = mean_of_heads(heads)
    if mean is not None:
        found.append(numbers(name, mean, None))
    largest = max(top for each in found for top in each.largest)
    scale = 1.0 if largest <= HALF_LARGEST else 2.0 ** np.ceil(np.log2(largest / HALF_LARGEST))
    masked = spans(heads)
    entry = {
        **kind_and_layer(name),
        "name": name,
        "shape": [count, queries, keys],
        "mean": mean is not None,
        "rows": labels.place(rows, given=one.rows is not None),
        "columns": labels.place(columns, given=one.columns is not None),
        "scale": scale,
        "spans": None if masked is None else required(arrays, "the rows of a mask", packed(masked, "u32")),
        "pictures": [_picture(each, scale, arrays) for each in found],
        "largest": [float(f"{top:.5g}") for each in found for top in each.largest],
        "withoutSink": [float(f"{top:.5g}") for each in found for top in each.without_sink],
        "statistics": {
            key: [value for each in found for value in each.statistics.get(key, [None] * len(each.largest))]
            for key in found[0].statistics
        },
        "top": {},
        "exact": {},
        "finer": {},
        "factors": None,
    }
    carried = Carried(example.title, name, count + len(found) - 1)
    carried.exact = carried.heads if found[0].cells.grid.is_whole else 0
    return _Work(entry, carried, heads, mean, found, masked)


def _picture(of: HeadNumbers, scale: float, arrays: Arrays) -> dict[str, Any]:
    cells = of.cells
    parts = {"largest": cells.largest, "mean": None if cells.grid.is_whole else cells.mean}
    if parts["largest"] is None and cells.grid.is_whole:
        parts["largest"] = cells.mean
    places = {
        name: None if values is None else required(arrays, "pictures of each head", packed(values / scale, "f16"))
        for name, values in parts.items()
    }
    return {"grid": [cells.grid.rows.count, cells.grid.columns.count], **places}


# -- 2 to 4: what else fits ------------------------------------------------------------------------------


def _carry_factors(work: _Work, arrays: Arrays) -> None:
    name, heads = work.carried.name, work.heads
    found = factors_of(name, heads, work.spans)
    parts = {}
    for head in range(len(heads)):
        place = arrays.offer(*(packed(one[head], "f32") for one in (found.query, found.key, found.lse)))
        if place is None:
            break
        parts[head] = place
        work.carried.factors += 1
    work.entry["factors"] = {"scale": found.scale, "dim": found.query.shape[-1], "heads": parts}


def _carry_strongest(work: _Work, arrays: Arrays, k: int) -> None:
    """The k strongest keys of each query of as many heads as fit."""
    if work.found[0].cells.grid.is_whole:
        return
    count = work.carried.heads
    # The mean of the heads is shown first.
    for head in sorted(range(count), key=lambda head: head != len(work.heads)):
        top = None if _has_factors(work, head) else work.top(head)
        if top is None:
            continue
        chosen = _strongest_of(top, k)
        kind = "u16" if work.heads.shape[-1] <= 2**16 else "u32"
        steps = np.diff(chosen.keys[0], prepend=0, axis=-1)
        scale = work.entry["scale"]
        parts = (packed(steps, kind), packed(chosen.weights[0] / scale, "f16"), packed(chosen.rest[0] / scale, "f16"))
        place = arrays.offer(*parts)
        if place is None:
            return
        work.entry["top"][str(head)] = {"k": chosen.keys.shape[-1], "place": place}
        work.carried.of_each_query[k] = work.carried.of_each_query.get(k, 0) + 1


def _has_factors(work: _Work, head: int) -> bool:
    return head < work.carried.factors


def _strongest_of(top: Top, k: int) -> Top:
    """The k strongest of those that are known, in the order of the keys."""
    if k >= top.keys.shape[-1]:
        return top
    order = np.argsort(-top.weights, axis=-1, kind="stable")
    taken = np.sort(order[..., :k], axis=-1)
    left = np.take_along_axis(top.weights, order[..., k:], -1).sum(-1)
    return Top(np.take_along_axis(top.keys, taken, -1), np.take_along_axis(top.weights, taken, -1), top.rest + left)


def _carry_exact(work: _Work, arrays: Arrays) -> None:
    """All weights of a head if they fit, else the finest picture that does."""
    heads = work.heads
    if work.found[0].cells.grid.is_whole or not heads.source.has_blocks:
        return
    _, queries, keys = heads.shape
    scale = work.entry["scale"]
    for head in sorted(range(work.carried.heads), key=lambda head: head != len(heads)):
        if _has_factors(work, head):
            continue
        # Weights of a causal map deflate to about half; no attempt is made where even that is too large.
        if _seen_pairs(work) * 2 * 4 / 3 * 0.6 <= arrays.left_bytes:
            weights = work.one(head).dense(limit_bytes=2**40)[0].cpu().double().numpy() / scale
            place = arrays.offer(packed(weights, "f16"))
            if place is not None:
                work.entry["exact"][str(head)] = place
                work.carried.exact += 1
                continue
        finer = []
        for side in FINER:
            grid = Grid.at_most(side, side, queries, keys)
            if grid.is_whole or _blocks(grid) * 2 * 2 * 4 / 3 * 0.3 > arrays.left_bytes:
                break
            found = work.one(head).summary("pooled_max", "pooled_mean", rows=side, columns=side)
            pictures = [found[name].cpu().double().numpy() / scale for name in ("pooled_max", "pooled_mean")]  # type: ignore[union-attr]
            place = arrays.offer(*(packed(one, "f16") for one in pictures))
            if place is None:
                break
            finer.append({"grid": [grid.rows.count, grid.columns.count], "largest": place, "mean": place + 1})
        if not finer:
            return
        work.entry["finer"][str(head)] = finer
        work.carried.finer += 1


def _seen_pairs(work: _Work) -> int:
    """How many pairs the mask allows."""
    if work.spans is None:
        return int(work.heads.shape[1] * work.heads.shape[2])
    return int((work.spans[:, 1] - work.spans[:, 0]).sum())


def _blocks(grid: Grid) -> int:
    bins: tuple[Bins, Bins] = (grid.rows, grid.columns)
    return bins[0].count * bins[1].count
