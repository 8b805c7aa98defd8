"""Lazy maps: joined, added, and multiplied by factors."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, groupby
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.call.shapes import UNNAMED, Dimensions, Rows, take_rows
from regard.maps.sources.derived import DerivedSource, SizeSource
from regard.maps.sources.source import NamedSource, Part, PartOf, Piece, Scratch, Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.asked import Answer
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import ask
from regard.tensors.fresh import Fresh
from regard.tensors.tile_sizes import union


class SeveralSource(Source):
    parts: tuple[Source, ...]

    def _of_others(self, parts: Iterable[Source]) -> Source:
        several: Any = self
        made: Source = replace(several, parts=tuple(parts))
        return made

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> Source:
        return self._of_others(part.choose(flat_heads, leading) for part in self.parts)

    def with_dimensions(self, dimensions: Dimensions) -> Source:
        return self._of_others(part.with_dimensions(dimensions) for part in self.parts)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> Source:
        return self._of_others(part.mapped(change) for part in self.parts)

    @property
    def dtype(self) -> torch.dtype:
        return torch.float64 if any(part.dtype == torch.float64 for part in self.parts) else torch.float32

    @property
    def answer_dtype(self) -> torch.dtype:
        found = self.parts[0].answer_dtype
        for part in self.parts[1:]:
            found = torch.promote_types(found, part.answer_dtype)
        return found

    @property
    def device(self) -> torch.device:
        return self.parts[0].device

    @property
    def has_signs(self) -> bool:
        return any(part.has_signs for part in self.parts)

    @property
    def has_blocks(self) -> bool:
        return all(part.has_blocks for part in self.parts)

    @property
    def dimensions(self) -> Dimensions:
        names = [part.dimensions for part in self.parts]
        return next((one for one in names if "unknown" in one.leading), names[0])

    def tensors(self) -> list[Tensor]:
        return [tensor for part in self.parts for tensor in part.tensors()]

    def columns(self, rows: range) -> range:
        if self.has_signs:
            return range(self.keys)
        return union(part.columns(rows) for part in self.parts)

    def refuse(self, asked: str) -> NoReturn:
        for part in self.parts:
            if not part.has_blocks:
                part.refuse(asked)
        super().refuse(asked)


@dataclass(frozen=True, eq=False)
class JoinedSource(NamedSource, SeveralSource):
    parts: tuple[Source, ...]
    layout: tuple[int, ...]
    names: Dimensions

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(part.flat_heads for part in self.parts))

    @property
    def part_of(self) -> PartOf:
        return self.parts[0].part_of

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.layout, *self.parts[0].shape[-2:]))

    @property
    def width(self) -> int:
        return max(part.width for part in self.parts)

    def __str__(self) -> str:
        return f"{len(self.parts)} maps joined, the first of them {self.parts[0]}"

    @property
    def key_heads(self) -> Tensor | None:
        found = [part.key_heads for part in self.parts]
        known = [one for one in found if one is not None]
        return torch.cat(known) if len(known) == len(found) else None

    def grid(self, wanted: Grid, how: str) -> Grid:
        for part in self.parts:
            wanted = part.grid(wanted, how)
        return wanted

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        found = list(self._found(flat_heads))
        if len(found) == 1:
            (number, inner) = found[0]
            return self.parts[number].part(inner, scratch)
        parts = [self.parts[number].part(inner) for number, inner in found]
        return lambda rows, columns: Piece(torch.cat([part(rows, columns).weights for part in parts]))

    def at_once(self, statistic: Statistic) -> Answer | None:
        answers, first = [], 0
        for part, end in zip(self.parts, self.ends, strict=True):
            answers.append(part.at_once(_of_flat_heads(statistic, range(first, end))))
            first = end
        known = [answer for answer in answers if answer is not None]
        if len(known) < len(answers):
            return None
        return tuple(torch.cat(pieces) for pieces in zip(*known, strict=True))

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> Source:
        names = Dimensions.unknown(len(leading), UNNAMED)
        if flat_heads is None:
            return JoinedSource(self.parts, leading, names)
        owners = [(bisect_right(self.ends, flat_head), flat_head) for flat_head in flat_heads.tolist()]
        runs = []
        for number, run in groupby(owners, key=lambda pair: pair[0]):
            before = self.ends[number] - self.parts[number].flat_heads
            inner = torch.tensor(
                [flat_head - before for _, flat_head in run], dtype=torch.long, device=flat_heads.device
            )
            runs.append(self.parts[number].choose(inner, (len(inner),)))
        if len(runs) == 1:
            return runs[0].choose(None, leading)
        return JoinedSource(tuple(runs), leading, names) if runs else self.parts[0].choose(flat_heads, leading)

    def _found(self, flat_heads: range) -> Iterator[tuple[int, range]]:
        first = 0
        for number, end in enumerate(self.ends):
            inner = range(max(flat_heads.start, first) - first, min(flat_heads.stop, end) - first)
            if inner:
                yield number, inner
            first = end


def _of_flat_heads(statistic: Statistic, flat_heads: range) -> Statistic:
    if isinstance(statistic, st.Product | st.TransposedProduct) and len(statistic.x) > 1:
        return type(statistic)(statistic.x[flat_heads.start : flat_heads.stop])
    return statistic


@dataclass(frozen=True, eq=False)
class SumSource(SeveralSource):
    parts: tuple[Source, ...]

    @property
    def part_of(self) -> PartOf:
        return self.parts[0].part_of

    @property
    def shape(self) -> torch.Size:
        return self.parts[0].shape

    @property
    def width(self) -> int:
        return sum(part.width for part in self.parts)

    def __str__(self) -> str:
        return f"the sum of {len(self.parts)} maps, the first of them {self.parts[0]}"

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        parts = [part.part(flat_heads) for part in self.parts]
        return lambda rows, columns: Piece(torch.stack([part(rows, columns).weights for part in parts]).sum(0))

    def at_once(self, statistic: Statistic) -> Answer | None:
        if not is_linear(statistic):
            return None
        answers = [part.at_once(statistic) for part in self.parts]
        known = [answer[0] for answer in answers if answer is not None]
        return (torch.stack(known).sum(0),) if len(known) == len(answers) else None


@dataclass(frozen=True, eq=False)
class ScaledSource(DerivedSource):
    """The weights of a source times factors that broadcast: a scalar, one for each head, a mask of keys, ..."""

    of: Source
    factor: Tensor
    fresh: Fresh = field(init=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "fresh", Fresh(factors=self.factor))

    @cached_property
    def has_signs(self) -> bool:
        return self.of.has_signs or bool((self.factor.detach() < 0).any())

    def tensors(self) -> list[Tensor]:
        return [*self.of.tensors(), self.factor]

    def __str__(self) -> str:
        return f"{self.of}, times factors {tuple(self.factor.shape)}"

    def columns(self, rows: range) -> range:
        return range(self.keys) if self.has_signs else self.of.columns(rows)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        self.fresh.check()
        inner = self.of.part(flat_heads, scratch)
        factor = self.factor[flat_heads.start : flat_heads.stop] if len(self.factor) > 1 else self.factor

        def block(rows: Rows, columns: Rows) -> Piece:
            chosen = factor if factor.shape[1] == 1 else take_rows(factor.mT, rows).mT
            chosen = chosen if factor.shape[2] == 1 else take_rows(chosen, columns)
            return Piece(inner(rows, columns).weights * chosen)

        return block

    def at_once(self, statistic: Statistic) -> Answer | None:
        self.fresh.check()
        flat_heads_only = self.factor.shape[1:] == (1, 1)
        if isinstance(statistic, st.Product) and self.factor.shape[1] == 1:
            return self.of.at_once(st.Product(self.factor.mT * statistic.x))
        if not is_linear(statistic) or not flat_heads_only:
            return None
        found = self.of.at_once(statistic)
        return None if found is None else (found[0] * self.factor.view(-1, *[1] * (found[0].dim() - 1)),)

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "ScaledSource":
        self.fresh.check()
        factor = self.factor if flat_heads is None or len(self.factor) == 1 else self.factor[flat_heads]
        return ScaledSource(self.of.choose(flat_heads, leading), factor)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "ScaledSource":
        self.fresh.check()
        return ScaledSource(self.of.mapped(change), change(self.factor))


def is_linear(statistic: Statistic) -> bool:
    if isinstance(statistic, st.Pooled):
        return not statistic.of_largest
    return isinstance(statistic, st.Received | st.Product | st.TransposedProduct | st.Distance)


def row_sums(source: Source) -> Tensor:
    """sum_j P_ij, (batch..., H, T)."""
    ones = torch.ones(1, source.keys, 1, dtype=source.dtype, device=source.device)
    return source.laid_out(ask(source, st.Product(ones))[0][..., 0])


def shares_of_sizes(source: Source) -> Source:
    """|P_ij| / sum_j |P_ij|: rows of weights with signs as shares of a whole; 0 for a row of zeros."""
    sizes = SizeSource(source)
    ones = torch.ones(1, source.keys, 1, dtype=source.dtype, device=source.device)
    sums = ask(sizes, st.Product(ones))[0]
    return ScaledSource(sizes, (sums > 0) / torch.where(sums > 0, sums, 1.0))


def side_by_side(sources: Sequence[Source], layout: tuple[int, ...]) -> Source:
    names = Dimensions.unknown(len(layout), UNNAMED)
    return sources[0].choose(None, layout) if len(sources) == 1 else JoinedSource(tuple(sources), layout, names)
