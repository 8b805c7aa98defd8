"""The source of a map with some statistics, without weights."""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import NoReturn

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions
from regard.errors import ArgumentError, NotKeptError
from regard.maps.sources.source import NamedSource, Part, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.by_name import USUAL, Answers, How, by_name, check_names
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import ask_all
from regard.tensors.kinds import refuse_wrong_kinds

SLACK = 16
"""The bytes by which a kernel may round up the place of an answer in a storage of several."""


@refuse_wrong_kinds
class Summarize:
    """The statistics of each call for `regard.watch(model, keep=...)`, and their sizes.

    Args:
        names: statistics of `AttentionMap.summary`: received, entropy, participation_ratio, distance, top_weight,
            top_key, top_keys, top_p_count, pooled, pooled_mean, pooled_sum, pooled_max. The default is received,
            entropy, top_keys and pooled.
        k: for top_keys; calls of fewer keys have fewer.
        p: for top_p_count.
        rows: for pooled; calls of fewer queries have a row for each.
        columns: for pooled, in the same way.
        how: for pooled.

    A head of T queries and S keys takes 4 (S + T) bytes for received and entropy, 8 k T for top_keys and 4 rows columns
    for a picture: by default 57 MB for 144 heads at T = S = 8192.

    Raises:
        ArgumentError: a name is unknown, or a size is out of range.

    >>> Summarize("entropy", "top_keys", k=2)
    Summarize('entropy', 'top_keys', k=2)
    """

    def __init__(
        self,
        *names: str,
        k: int = 4,
        p: float = 0.9,
        rows: int = 128,
        columns: int = 128,
        how: How = "mean",
    ) -> None:
        self.names = names or USUAL
        check_names(self.names, "Summarize()")
        if k < 1 or not 0 < p <= 1 or rows < 1 or columns < 1 or how not in ("mean", "sum", "max"):
            raise ArgumentError(
                "Summarize() needs k, rows and columns of at least 1, p in (0, 1] and how of 'mean', 'sum' or 'max'; "
                f"got {k}, {rows}, {columns}, {p} and {how!r}"
            )
        self.k, self.p, self.rows, self.columns, self.how = k, p, rows, columns, how

    def statistics(self, queries: int, keys: int) -> dict[str, Statistic]:
        """The statistics by name, for the sizes of a map."""
        return by_name(
            self.names, queries, keys,
            k=min(self.k, keys), p=self.p, rows=self.rows, columns=self.columns, how=self.how,
        )  # fmt: skip

    def __repr__(self) -> str:
        sizes = [f"k={self.k}"] if "top_keys" in self.names else []
        sizes += [f"p={self.p}"] if "top_p_count" in self.names else []
        if any(name.startswith("pooled") for name in self.names):
            sizes += [f"rows={self.rows}", f"columns={self.columns}"]
        sizes += [f"how={self.how!r}"] if "pooled" in self.names else []
        return f"Summarize({', '.join([*map(repr, self.names), *sizes])})"


@dataclass(frozen=True, slots=True, eq=False)
class SummarySource(NamedSource):
    """The saved statistics of a map, without weights. It answers these; top_keys(k) up to the saved k; max(-1) by
    top_keys; and pictures on the saved grids: a sum from a mean, a mean from a sum, and any if a block is one
    weight."""

    layout: tuple[int, ...]
    """(batch..., H, T, S)."""
    number: torch.dtype
    what: Summarize
    named: Mapping[str, Statistic]
    names: Dimensions
    answers: Answers
    """The answers (flat_heads, ...) of each statistic. Indices of keys are held in 32 bits."""

    @classmethod
    def of(cls, source: Source, what: Summarize) -> "SummarySource":
        named = what.statistics(source.queries, source.keys)
        if source.has_signs:
            named = {name: one for name, one in named.items() if not one.reads_shares} or named
        asked = list(dict.fromkeys(named.values()))
        answers = dict(zip(asked, _small(ask_all(source, asked)), strict=True))
        return cls(tuple(source.shape), source.dtype, what, named, source.dimensions, answers)

    @property
    def shape(self) -> torch.Size:
        return torch.Size(self.layout)

    @property
    def dtype(self) -> torch.dtype:
        return self.number

    @property
    def device(self) -> torch.device:
        return self.tensors()[0].device

    def tensors(self) -> list[Tensor]:
        return [tensor for answers in self.answers.values() for tensor in answers]

    def __str__(self) -> str:
        return f"statistics alone, by {self.what!r}"

    @property
    def has_blocks(self) -> bool:
        return False

    @property
    def kept(self) -> Mapping[str, Statistic]:
        return self.named

    def grid(self, wanted: Grid, how: str) -> Grid:
        found = [s.grid for s in self._pictures() if s.grid.is_within(wanted) and self.keeps(st.Pooled(s.grid, how))]
        return max(found, key=lambda grid: grid.rows.count * grid.columns.count, default=wanted)

    def refuse(self, asked: str) -> NoReturn:
        raise NotKeptError(
            f"{asked} cannot be told: of this call only statistics were kept, by {self.what!r}: ask for one of these, "
            "name what you need in watch(..., keep=regard.Summarize(...)), or watch with keep='factors', which can be "
            "asked for anything"
        )

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        if (found := self.answers.get(statistic)) is not None:
            # Indices have 64 bits outside, as everywhere in torch.
            return tuple(t if t.is_floating_point() else t.long() for t in found)
        match statistic:
            case st.Pooled(grid, how):
                return self._pooled(grid, how)
            case st.TopWeights() | st.Largest():
                return self._top(statistic)
        return None

    def _top(self, statistic: st.TopWeights | st.Largest) -> tuple[Tensor, ...] | None:
        top = next((answers for kept, answers in self.answers.items() if isinstance(kept, st.TopWeights)), None)
        match statistic:
            case st.TopWeights(k) if top is not None and k <= top[0].shape[-1]:
                return top[0][..., :k], top[1][..., :k].long()
            case st.Largest() if top is not None:
                return (top[0][..., 0],)
        return None

    def _pooled(self, grid: Grid, how: str) -> tuple[Tensor] | None:
        kept = {picture.how: self.answers[picture][0] for picture in self._pictures() if picture.grid == grid}
        if grid.is_whole and kept:
            return (next(iter(kept.values())),)
        match how:
            case "sum" if "mean" in kept:
                return (kept["mean"] * grid.areas(self.device),)
            case "mean" if "sum" in kept:
                return (kept["sum"] / grid.areas(self.device),)
        return None

    def _pictures(self) -> list[st.Pooled]:
        return [statistic for statistic in self.answers if isinstance(statistic, st.Pooled)]

    def columns(self, rows: range) -> NoReturn:
        self.refuse("a block of weights")

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        self.refuse("a block of weights")

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "SummarySource":
        layout, names = (*leading, *self.layout[-2:]), Dimensions.unknown(len(leading), UNNAMED)
        if flat_heads is None:
            return replace(self, layout=layout, names=names)
        answers = {s: tuple(t[flat_heads] for t in found) for s, found in self.answers.items()}
        return replace(self, layout=layout, names=names, answers=answers)

    def of_rows(self, rows: range) -> "SummarySource":
        """The statistics by query, for some queries; sums over all and pictures are left out."""
        named = {name: s for name, s in self.named.items() if isinstance(s, st.PerQuery)}
        if not named:
            self.refuse("some rows of the map")
        answers: Answers = {s: tuple(t[:, rows.start : rows.stop] for t in self.answers[s]) for s in named.values()}
        layout = (*self.leading, len(rows), self.keys)
        return replace(self, layout=layout, named=named, answers=answers)

    def of_keys(self, count: int) -> "SummarySource":
        """Those of the first `count` keys, the only ones with weight; without those that depend on their number."""
        named = {name: s for name, s in self.named.items() if not isinstance(s, st.Pooled | st.Distance)}
        if not named:
            self.refuse("some keys of the map")
        answers: Answers = {
            s: tuple(t[:, :count] for t in self.answers[s]) if isinstance(s, st.PerKey) else self.answers[s]
            for s in named.values()
        }
        return replace(self, layout=(*self.layout[:-1], count), named=named, answers=answers)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "SummarySource":
        return replace(self, answers={s: tuple(map(change, found)) for s, found in self.answers.items()})


def joined_steps(steps: Sequence[SummarySource], starts: Sequence[int]) -> SummarySource:
    """Statistics by query are concatenated, those by key are summed, and pictures are left out. `starts` has the index
    of each step's first key among all keys."""
    first, keys = steps[0], max(start + step.keys for start, step in zip(starts, steps, strict=True))
    named: dict[str, Statistic] = {}
    answers: dict[Statistic, tuple[Tensor, ...]] = {}
    for name in (name for name in first.kept if all(name in step.kept for step in steps)):
        parts = [step.kept[name] for step in steps]
        if (statistic := _common(parts, steps, starts)) is None:
            continue
        pieces = [step.answers[part] for step, part in zip(steps, parts, strict=True)]
        named[name], answers[statistic] = statistic, _together(statistic, pieces, starts, keys)
    if not named:
        raise NotKeptError(f"the steps were kept by {first.what!r}, none of which can be joined")
    what = Summarize(*named, k=first.what.k, p=first.what.p, how=first.what.how)
    queries = sum(step.queries for step in steps)
    return SummarySource((*first.leading, queries, keys), first.dtype, what, named, first.dimensions, answers)


def _common(parts: list[Statistic], steps: Sequence[SummarySource], starts: Sequence[int]) -> Statistic | None:
    first, before = parts[0], [0]
    for step in steps[:-1]:
        before.append(before[-1] + step.queries)
    match first:
        case st.Pooled():
            return None
        case st.TopWeights():
            return st.TopWeights(max(part.k for part in parts if isinstance(part, st.TopWeights)))
        case st.Distance():
            # A query and its keys move together, and their distance is unchanged.
            offsets = {
                s.offset + start - b
                for s, start, b in zip(parts, starts, before, strict=True)
                if isinstance(s, st.Distance)
            }
            return st.Distance(offsets.pop()) if len(offsets) == 1 else None
    return first


def _together(
    statistic: Statistic, pieces: list[tuple[Tensor, ...]], starts: Sequence[int], keys: int
) -> tuple[Tensor, ...]:
    pad = torch.nn.functional.pad
    match statistic:
        case st.PerKey():
            sums = [pad(p, (s, keys - s - p.shape[-1])) for (p,), s in zip(pieces, starts, strict=True)]
            return (torch.stack(sums).sum(0),)
        case st.ArgLargest():
            pieces = [(_moved(indices, s),) for (indices,), s in zip(pieces, starts, strict=True)]
        case st.TopWeights():
            missing = [statistic.k - values.shape[-1] for values, _ in pieces]
            pieces = [
                (pad(values, (0, n)), pad(_moved(indices, s), (0, n), value=-1))
                for (values, indices), n, s in zip(pieces, missing, starts, strict=True)
            ]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))


def _moved(indices: Tensor, start: int) -> Tensor:
    return torch.where(indices < 0, indices, indices + start)


def _small(answers: list[tuple[Tensor, ...]]) -> list[tuple[Tensor, ...]]:
    """Copy answers whose storages hold more than answers; indices of keys fit into 32 bits."""
    small = [tuple(t if t.is_floating_point() else t.int() for t in several) for several in answers]
    used = Counter[int]()
    for t in chain.from_iterable(small):
        used[t.untyped_storage().data_ptr()] += t.numel() * t.element_size() + SLACK
    return [
        tuple(t.clone() if t.untyped_storage().nbytes() > used[t.untyped_storage().data_ptr()] else t for t in several)
        for several in small
    ]
