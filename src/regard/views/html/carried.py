"""The optional content of a page for one map: strongest keys, tiles, weights, factors. Each function spends the rest of
the budget on one map, and stops at the first part that does not fit."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from regard.lazy import Displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.statistics.by_name import pooled
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import ask_all
from regard.views.html.arrays import Arrays, Floats, PackedArray, halves, packed
from regard.views.html.factors import factors_of
from regard.views.html.numbers import HeadNumbers, Top, as_numpy
from regard.watching.report import count

SIDES = (128, 256, 512, 1024, 2048, 4096)
"""The sides of the pictures of a pyramid, in blocks; below them are the 64 of every head, above them single weights."""
TILE = 128
"""The side of a tile of such a picture, in blocks."""
NAMED = 6

ROWS = 512
"""The queries whose weights are read together."""


@dataclass
class Carried(Displayed):
    """The content of a page for one map, counted in heads, with the mean of the heads as one more."""

    example: str
    name: str
    heads: int
    of_each_query: dict[int, int] = field(default_factory=dict)
    """How many heads have the 1, or the 16, strongest keys of each query."""
    exact: int = 0
    """Heads with all weights."""
    tiles: dict[int, int] = field(default_factory=dict)
    """How many heads have a pyramid up to pictures of so many blocks on a side."""
    factors: int = 0
    """Heads whose weights are computed from queries and keys."""

    def __str__(self) -> str:
        every = {
            "every weight": min(self.heads, self.exact + self.factors),
            **{
                f"the {count(k, 'strongest key')} of each query": n for k, n in sorted(self.of_each_query.items())[::-1]
            },
            **{f"pictures up to {side} x {side} blocks": n for side, n in sorted(self.tiles.items(), reverse=True)},
        }
        held = [
            f"{what} of every head" if some == self.heads else f"{what} of {some} of {count(self.heads, 'head')}"
            for what, some in every.items()
            if some
        ]
        return "; ".join(held) or "pictures of 64 x 64 alone"


def report_lines(carried: Sequence[Carried]) -> list[str]:
    """The content of a page: a line for the maps, of every example, that have the same.

    >>> print(*report_lines([Carried("", "0", 4, exact=4), Carried("", "1", 4), Carried("x", "0", 4, exact=4)]))
    2 maps (0): every weight of every head 1: pictures of 64 x 64 alone
    """
    alike: dict[str, list[Carried]] = {}
    for one in carried:
        alike.setdefault(str(one), []).append(one)
    return [f"{_named([one.name for one in maps])}: {content}" for content, maps in alike.items()]


def _named(maps: list[str]) -> str:
    names = list(dict.fromkeys(maps))
    shown = ", ".join(names[:NAMED]) + (f" and {len(names) - NAMED} more" if len(names) > NAMED else "")
    return shown if len(maps) == len(names) else f"{count(len(maps), 'map')} ({shown})"


class Work(NamedTuple):
    entry: dict[str, Any]
    carried: Carried
    heads: AttentionMap
    mean: AttentionMap | None
    found: list[HeadNumbers]
    spans: npt.NDArray[np.integer[Any]] | None

    @property
    def is_whole(self) -> bool:
        return self.found[0].cells.grid.is_whole

    @property
    def order(self) -> list[int]:
        """Its heads. The most telling one is shown first, and so it is carried first; then comes the mean."""
        told = self.entry["statistics"].get("telling", [])[: len(self.heads)]
        best = max(range(len(told)), key=lambda head: told[head] or 0.0, default=-1)
        return sorted(range(self.carried.heads), key=lambda head: (head != best, head != len(self.heads)))

    def one(self, head: int) -> AttentionMap:
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

    def seen_pairs(self) -> int:
        if self.spans is None:
            return int(self.heads.shape[1] * self.heads.shape[2])
        return int((self.spans[:, 1] - self.spans[:, 0]).sum())


def carry_strongest(work: Work, arrays: Arrays, k: int) -> None:
    if work.is_whole:
        return
    for head in work.order:
        top = work.top(head)
        if top is None:
            continue
        chosen = _strongest_of(top, k)
        kind = "u16" if work.heads.shape[-1] <= 2**16 else "u32"
        steps = np.diff(chosen.keys[0], prepend=0, axis=-1)
        scale = work.entry["scale"]
        parts = (packed(steps, kind), packed(chosen.weights[0] / scale, "f16"), packed(chosen.rest[0] / scale, "f16"))
        before = work.entry["top"].get(str(head))
        place = arrays.offer(*parts, instead=None if before is None else range(before["place"], before["place"] + 3))
        if place is None:
            return
        work.entry["top"][str(head)] = {"k": chosen.keys.shape[-1], "place": place}
        counts = work.carried.of_each_query
        if before is not None:
            counts[before["k"]] -= 1
        counts[k] = counts.get(k, 0) + 1


def _strongest_of(top: Top, k: int) -> Top:
    if k >= top.keys.shape[-1]:
        return top
    order = np.argsort(-top.weights, axis=-1, kind="stable")
    taken = np.sort(order[..., :k], axis=-1)
    left = np.take_along_axis(top.weights, order[..., k:], -1).sum(-1)
    return Top(np.take_along_axis(top.keys, taken, -1), np.take_along_axis(top.weights, taken, -1), top.rest + left)


def carry_tiles(work: Work, arrays: Arrays) -> None:
    """Carry all weights of each head if they fit, else a pyramid of tiles as far as it fits."""
    if work.is_whole or not work.heads.source.has_blocks:
        return
    for head in work.order:
        if head < work.carried.factors or str(head) in (work.entry["exact"] | work.entry["tiles"]):
            continue
        if not _carry_weights(work, arrays, head) and not _carry_pyramid(work, arrays, head):
            return


def _carry_weights(work: Work, arrays: Arrays, head: int) -> bool:
    # Weights of a causal map deflate to about half; a head beyond that cannot fit.
    if work.seen_pairs() * 2 * 4 / 3 * 0.6 > arrays.left_bytes:
        return False
    place = arrays.offer(packed(_all_weights(work.one(head), work.entry["scale"]), "f16"))
    if place is None:
        return False
    work.entry["exact"][str(head)] = place
    work.carried.exact += 1
    return True


@torch.no_grad()
def _all_weights(weights: AttentionMap, scale: float) -> npt.NDArray[np.float16]:
    """All weights (1, T, S), read where a mask leaves any: under a window those are few of very many."""
    _, queries, keys = weights.shape
    found = np.zeros((queries, keys), np.float16)
    for first in range(0, queries, ROWS):
        rows = range(first, min(first + ROWS, queries))
        if columns := weights.source.columns(rows):
            block = weights.block(rows, columns, limit_bytes=2**40)[0]
            found[rows.start : rows.stop, columns.start : columns.stop] = block.double().cpu().numpy() / scale
    return found


@torch.no_grad()
def _carry_pyramid(work: Work, arrays: Arrays, head: int) -> bool:
    _, queries, keys = work.heads.shape
    grids, least = [], 0.0
    seen = work.seen_pairs() / (queries * keys)
    for side in SIDES:
        grid = Grid.at_most(side, side, queries, keys)
        least += grid.rows.count * grid.columns.count * seen * 2 * 2 * 4 / 3 * 0.3  # from experience
        if grid.is_whole or least > arrays.left_bytes:
            break
        grids.append(grid)
    wanted = [
        pooled(grid.rows.count, grid.columns.count, queries, keys, how) for grid in grids for how in ("max", "sum")
    ]
    # One pass gives all the pictures.
    found = [as_numpy(answer)[0] for (answer,) in ask_all(work.one(head).source, wanted)] if wanted else []
    levels: list[dict[str, Any]] = []
    for largest, mass in zip(found[::2], found[1::2], strict=True):
        level = _level(largest, mass, work.entry["scale"], arrays)
        if level is None:
            break
        levels.append(level)
    if not levels:
        return False
    work.entry["tiles"][str(head)] = levels
    finest = max(levels[-1]["grid"])
    work.carried.tiles[finest] = work.carried.tiles.get(finest, 0) + 1
    return True


def _level(largest: Floats, mass: Floats, scale: float, arrays: Arrays) -> dict[str, Any] | None:
    """One picture of a head in tiles: the largest weight and the sum of each block; None if it does not fit."""
    scaled, mass_scale = halves(mass)
    parts: list[PackedArray] = []
    places: list[int | None] = []
    for top in range(0, len(largest), TILE):
        for left in range(0, largest.shape[1], TILE):
            tile = np.s_[top : top + TILE, left : left + TILE]
            # A tile of zeros, such as a masked one, needs no array.
            places.append(len(parts) if largest[tile].any() else None)
            if places[-1] is not None:
                parts += [packed(largest[tile] / scale, "f16"), packed(scaled[tile], "f16")]
    first = arrays.offer(*parts)
    if first is None:
        return None
    at = [None if place is None else first + place for place in places]
    return {"grid": [*largest.shape], "tile": TILE, "places": at, "massScale": mass_scale}


def carry_factors(work: Work, arrays: Arrays) -> None:
    found = factors_of(work.carried.name, work.heads, work.spans)
    parts = {}
    for head in range(len(work.heads)):
        place = arrays.offer(*(packed(one[head], "f32") for one in (found.query, found.key, found.lse)))
        if place is None:
            break
        parts[head] = place
        work.carried.factors += 1
    work.entry["factors"] = {"scale": found.scale, "dim": found.query.shape[-1], "heads": parts}
