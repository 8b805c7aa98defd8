"""Maps in another dtype."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.maps.sources.derived import SameShapeSource
from regard.maps.sources.source import Part, Scratch, Source, Statistic
from regard.maps.statistics.pooling import Grid


@dataclass(frozen=True, eq=False)
class CastSource(SameShapeSource):
    """The weights of a source, computed in its own dtype and rounded to another at the end."""

    of: Source
    answer: torch.dtype

    @classmethod
    def of_dtype(cls, source: Source, dtype: torch.dtype) -> Source:
        """The source in a dtype; wrapped only if it differs."""
        inner = source.of if isinstance(source, CastSource) else source
        return inner if dtype == inner.answer_dtype else cls(inner, dtype)

    @property
    def answer_dtype(self) -> torch.dtype:
        return self.answer

    def __str__(self) -> str:
        return f"{self.of}, as {str(self.answer).removeprefix('torch.')}"

    def grid(self, wanted: Grid, how: str) -> Grid:
        return self.of.grid(wanted, how)

    def columns(self, rows: range) -> range:
        return self.of.columns(rows)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        return self.of.part(flat_heads, scratch)

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        return self.of.at_once(statistic)

    def gradient(self, grad_output: Tensor | None) -> Source:
        return CastSource(self.of.gradient(grad_output), self.answer)

    def attribution(self, grad_output: Tensor | None) -> Source:
        return CastSource(self.of.attribution(grad_output), self.answer)
