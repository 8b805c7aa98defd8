r"""The heads that changed between two folders of statistics, with intervals that hold for all of them together.

The differences of means are resampled by the Poisson bootstrap (Chamandy et al. 2012): in replicate r, document i
counts w times, w from Poisson(1), drawn by a hash of its id and of r. It counts alike for every head and in both
folders, so that a document of both is a pair, and the heads keep their correlation. The rows are read once, as they lie
on the disk; memory is replicates x heads x statistics.

The largest of all absolute t in a replicate has the quantile c at the level, and each interval is the difference
$\pm\, c$ times its standard error: at that level all of them hold together (Westfall and Young 1993; Romano and Wolf
2005, step one). For few documents both are widened as a t interval is, with n - 1 degrees of freedom (Hesterberg 2015,
section 4.3).
"""

import hashlib
from dataclasses import dataclass
from math import exp, factorial
from os import PathLike
from typing import Any

import numpy as np

from regard.corpus.measured_folder import MeasuredFolder
from regard.errors import ArgumentError
from regard.lazy import Displayed

REPLICATES = 1000
LEVEL = 0.95
FEWEST = 20
"""With fewer documents a head has no interval."""
ROUNDING = 1e-6
"""Differences this small beside the values are those of float32."""
_CHANCES = np.cumsum([exp(-1) / factorial(times) for times in range(10)])
_TIMES = np.searchsorted(_CHANCES, (np.arange(2**16) + 0.5) / 2**16).astype(np.float64)
"""How often a document counts, for each value of 16 random bits."""


@dataclass(frozen=True, eq=False, slots=True, repr=False)
class Changes(Displayed):
    """The differences of the means of H heads and S statistics: those of the second folder, less those of the first."""

    heads: list[tuple[int, int]]
    statistics: list[str]
    before: Any
    """(H, S): means of the first folder."""
    after: Any
    difference: Any
    low: Any
    """(H, S): the interval's ends; NaN where there are too few documents."""
    high: Any
    changed: Any
    """(H, S): whether the interval leaves out 0."""
    unlike: str = ""
    """A sentence if the folders are of unlike models."""

    def rows(self) -> list[tuple[int, int, str, float, float, float, float, float]]:
        """Layer, head, statistic, before, after, difference, low, high of the changed ones, the surest first."""
        with np.errstate(invalid="ignore", divide="ignore"):
            sure = np.where(self.changed, np.abs(self.difference) / (self.high - self.low), 0)
        order = np.argsort(-sure, axis=None, kind="stable")[: int(self.changed.sum())]
        columns = (self.before, self.after, self.difference, self.low, self.high)
        return [
            (*self.heads[h], self.statistics[s], *(float(one[h, s]) for one in columns))
            for h, s in zip(*np.unravel_index(order, self.changed.shape), strict=True)
        ]

    def __str__(self) -> str:
        known, changed = int(np.isfinite(self.low).sum()), self.rows()
        unknown = self.low.size - known
        few = f"; {unknown:,} have too few documents, under {FEWEST}" if unknown else ""
        asked = f"{known:,} differences, {LEVEL:.0%} intervals that hold together{few}"
        asked += f". {self.unlike}" if self.unlike else ""
        if not changed:
            return f"no head changed: {asked}"
        heads = len({row[:2] for row in changed})
        lines = [f"{heads:,} of {len(self.heads):,} head{'s' * (len(self.heads) > 1)} changed: {asked}"]
        lines.append(f"{'head':<8}{'statistic':<16}{'before':>11}{'after':>11}{'difference':>12}  interval")
        lines += [
            f"{f'{layer}.{head}':<8}{name:<16}{old:>11.4g}{new:>11.4g}{difference:>+12.4g}  {low:+.4g} to {high:+.4g}"
            for layer, head, name, old, new, difference, low, high in changed
        ]
        return "\n".join(lines)

    __repr__ = __str__


def compare_statistics(before: str | PathLike[str], after: str | PathLike[str]) -> Changes:
    """Compare the means of every head and statistic over the documents of two folders of statistics.

    Documents with one id are pairs. The folders may be those of two checkpoints, or of two corpora under one model.

    Args:
        before: a folder that `regard measure` made.
        after: another, of a model with the same layers and heads.

    Raises:
        ArgumentError: a folder holds no finished statistics, or the two have other heads or no statistic in common.
        DataError: a file is damaged.
    """
    return changes(MeasuredFolder.read(before), MeasuredFolder.read(after))


def changes(before: MeasuredFolder, after: MeasuredFolder) -> Changes:
    if before.heads != after.heads:
        one, other = (f"{len(a.heads)} heads, the last {'.'.join(map(str, a.heads[-1]))}" for a in (before, after))
        raise ArgumentError(
            f"{before.path} has {one}, and {after.path} has {other}: heads are compared one by one, in models of one "
            "shape that were measured with the same --layers and --heads"
        )
    names = [name for name in before.statistics if name in after.statistics]
    if not names:
        raise ArgumentError(
            f"{before.path} has {', '.join(before.statistics)}, and {after.path} has {', '.join(after.statistics)}: "
            "measure one statistic in both"
        )
    (first, few), (second, fewer) = (_replicates(one, names) for one in (before, after))
    shape, documents = (len(before.heads), len(names)), np.minimum(few, fewer)
    found = second - first
    difference, spread = found[0], found[1:] - found[1:].mean(0)
    size = np.maximum(np.abs(first[0]), np.abs(second[0]))
    error = np.sqrt((spread**2).sum(0) / (REPLICATES - 1) * documents / np.maximum(documents - 1, 1))
    error[error <= ROUNDING * size] = 0
    enough = (documents >= FEWEST) & np.isfinite(error)
    some = enough & (error > 0)
    largest = np.max(np.abs(spread[:, some]) / error[some], 1, initial=0.0)
    width = _as_t(float(np.quantile(largest, LEVEL, method="higher")), documents - 1) * error
    is_changed = enough & (np.abs(difference) > np.maximum(width, ROUNDING * size))
    low, high = (np.where(enough, difference + sign * width, np.nan) for sign in (-1, 1))
    columns = (first[0], second[0], difference, low, high, is_changed)
    old, new, difference, low, high, is_changed = (one.reshape(shape) for one in columns)
    return Changes(before.heads, names, old, new, difference, low, high, is_changed, unlike(before, after))


def unlike(before: MeasuredFolder, after: MeasuredFolder) -> str:
    """A sentence if two folders are of unlike models; "" for two of one configuration and tokenizer."""
    one, other = (folder.settings.get("model", {}) for folder in (before, after))
    parts = [part for part in ("configuration", "tokenizer") if one.get(part) != other.get(part)]
    if not parts:
        return ""
    return f"The models are unlike in their {' and '.join(parts)}: heads of one number need not have one role"


def _replicates(folder: MeasuredFolder, names: list[str]) -> tuple[Any, Any]:
    """The means (1 + replicates, heads x statistics), first with every document once; and the counts of documents."""
    kinds = {place: number for number, place in enumerate(folder.heads)}
    width = len(kinds) * len(names)
    sums, counts = (np.zeros((REPLICATES + 1, width)) for _ in range(2))
    for batch in folder.rows(names):
        if not batch.num_rows:
            continue
        ids = batch.column("id").dictionary_encode()
        rows = ids.indices.to_numpy()
        places = zip(batch.column("layer").to_pylist(), batch.column("head").to_pylist(), strict=True)
        heads = np.fromiter((kinds[place] for place in places), np.int64, batch.num_rows)
        by_place = np.full((len(ids.dictionary), len(kinds), len(names)), np.nan)
        for number, name in enumerate(names):
            by_place[rows, heads, number] = batch.column(name).fill_null(np.nan).to_numpy()
        values = by_place.reshape(-1, width)
        times, there = weights_of(ids.dictionary.to_pylist()), np.isfinite(values)
        sums += times @ np.where(there, values, 0)
        whole = there.all(0)
        counts[:, whole] += times.sum(1, keepdims=True)
        counts[:, ~whole] += times @ there[:, ~whole].astype(np.float64)
    with np.errstate(invalid="ignore", divide="ignore"):
        return sums / counts, counts[0]


def weights_of(ids: list[str]) -> Any:
    """How often each document counts, (1 + replicates, documents): once, then Poisson(1) by its id and replicate; each
    64 bits of SplitMix64 (Steele et al. 2014), which begins at the id's hash, are four replicates."""
    seeds = b"".join(hashlib.blake2b(one.encode(), digest_size=8).digest() for one in ids)
    steps = np.arange(1, REPLICATES // 4 + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    bits = np.frombuffer(seeds, "<u8")[:, None] + steps
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        bits = (bits ^ (bits >> np.uint64(shift))) * np.uint64(factor)
    bits = (bits ^ (bits >> np.uint64(31))).astype("<u8")
    return np.concatenate([np.ones((1, len(ids))), _TIMES[bits.view("<u2")].T])


def _as_t(quantile: float, freedom: Any) -> Any:
    """The t of as many degrees of freedom that is exceeded as seldom as a normal quantile.

    Source: Abramowitz and Stegun 1964, 26.7.5; the exact 0.975 quantile for 19 is 2.0930.

    >>> round(float(_as_t(1.959964, np.array(19))), 3)
    2.093
    """
    z, n = quantile, np.maximum(freedom, 1)
    return (
        z + (z**3 + z) / (4 * n) + (5 * z**5 + 16 * z**3 + 3 * z) / (96 * n**2)
        + (3 * z**7 + 19 * z**5 + 17 * z**3 - 15 * z) / (384 * n**3)
    )  # fmt: skip
