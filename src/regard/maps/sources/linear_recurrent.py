"""The weights of a linear recurrence, as the source of a map."""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.basic import causal
from regard.call.shapes import UNNAMED, Dimensions
from regard.kernels.recurrence import CHUNK, Chunks, Recurrence
from regard.maps.sources.source import LinearSource, Part, Piece, Scratch, Statistic
from regard.maps.statistics import definitions as st
from regard.tensors.fresh import Fresh
from regard.tensors.guards import has_values
from regard.tensors.tile_sizes import fitting, ranges

GROUP_ELEMENTS = 1 << 26
"""The elements of the chunks of the heads that are computed together."""


class LinearRecurrent(LinearSource):
    """P_tj = c q_t^T A_t ... A_{j+1} k_j beta_j. Nothing makes its rows sum to 1, and its weights may be below 0."""

    @property
    def mask(self) -> Mask:
        return causal(self.keys - self.queries)

    @property
    @abstractmethod
    def recurrence(self) -> Recurrence:
        """Its factors, (N, ...); raises OverwrittenError if others have written to one."""

    @property
    def has_signs(self) -> bool:
        """Without removal, factors that are all at least 0 have weights at least 0; a decay is the log of one."""
        made = self.recurrence
        if made.has_removal or made.scale < 0 or not has_values(made.query) or not made.key.numel():
            return True
        factors = [one.detach() for one in (made.query, made.key, made.beta) if one is not None]
        return bool(torch.stack([(one < 0).any() for one in factors]).any())

    def __str__(self) -> str:
        return f"a linear recurrence {self.recurrence}"

    def support(self, rows: range) -> range:
        return range(rows.stop + self.recurrence.offset)

    def columns(self, rows: range) -> range:
        # (A weight of 0 behind the query is above those below 0.)
        return range(self.keys) if self.has_signs else self.support(rows)

    def of_some(self, flat_heads: range) -> Recurrence:
        if len(flat_heads) == self.flat_heads:
            return self.recurrence
        return self.recurrence.mapped(lambda x: x[flat_heads.start : flat_heads.stop])

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        block = self.of_some(flat_heads).chunked().blocks()
        return lambda rows, columns: Piece(block(rows, columns))

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x):
                return (self._in_groups(lambda chunks, x: chunks.product(x)[0], x),)
            case st.TransposedProduct(x):
                return (self._in_groups(Chunks.transposed_product, x).mT,)
            case st.Received():
                ones = torch.ones(1, self.queries, 1, dtype=self.dtype, device=self.device)
                return (self._in_groups(Chunks.transposed_product, ones)[..., 0],)
            case st.Pooled(grid) if not statistic.of_largest and 4 * grid.columns.count <= self.keys:
                indicators = torch.nn.functional.one_hot(grid.columns.owners(self.device), grid.columns.count)
                by_columns = self._in_groups(lambda chunks, x: chunks.product(x)[0], indicators.to(self.dtype)[None])
                return (statistic.finished(grid.rows.reduce(by_columns, -2, 0, largest=False)[0]),)
        return None

    @property
    @abstractmethod
    def key_width(self) -> int:
        """D."""

    def _in_groups(self, compute: Callable[[Chunks, Tensor], Tensor], x: Tensor) -> Tensor:
        """Compute with some heads at a time, for x (N or 1, ..., E): the chunks are many times the factors."""
        step = fitting(GROUP_ELEMENTS, self.keys * (CHUNK + 4 * self.key_width))
        found = []
        for some in ranges(self.flat_heads, step):
            own = x if len(x) == 1 else x[some.start : some.stop]
            found.append(compute(self.of_some(some).chunked(), own))
        return found[0] if len(found) == 1 else torch.cat(found)

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "GivenRecurrence":
        names = Dimensions.unknown(len(leading), UNNAMED)
        chosen = self.recurrence if flat_heads is None else self.recurrence.mapped(lambda x: x[flat_heads])
        return GivenRecurrence(chosen, leading, names)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "GivenRecurrence":
        return GivenRecurrence(self.recurrence.mapped(change), self.layout, self.dimensions)


@dataclass(frozen=True, slots=True, eq=False)
class GivenRecurrence(LinearRecurrent):
    given: Recurrence
    layout: tuple[int, ...]
    names: Dimensions
    fresh: Fresh = field(init=False)

    def __post_init__(self) -> None:
        given = self.given
        read, removed = given.removal or (None, None)
        fresh = Fresh(queries=given.query, keys=given.key, decays=given.log_decay, write_strengths=given.beta)
        object.__setattr__(self, "fresh", fresh.joined(Fresh(vectors_a=read, vectors_b=removed)))

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.layout, self.given.query.shape[1], self.given.key.shape[1]))

    @property
    def dtype(self) -> torch.dtype:
        return self.given.dtype

    @property
    def device(self) -> torch.device:
        return self.given.query.device

    @property
    def key_width(self) -> int:
        return self.given.key.shape[-1]

    def tensors(self) -> list[Tensor]:
        return self.given.tensors()

    @property
    def recurrence(self) -> Recurrence:
        self.fresh.check()
        return self.given
