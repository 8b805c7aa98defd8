"""The interfaces of a pass over a map: sources of weights, and statistics.

All maps are of the class `AttentionMap`; they differ in their sources. A source computes the weights of any rows and
columns, answers directly where no weights are needed, and declares its saved statistics: `has_blocks`, `keeps`, `grid`
and `refuse`.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.shapes import UNNAMED, Dimensions, Rows, index_tensor
from regard.errors import ArgumentError
from regard.kernels.tiled import Tile
from regard.maps.sources.factors import Factors
from regard.maps.statistics.pooling import Grid

PAIRS = 64
"""Single weights per block read along its diagonal, for sources without a faster way."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class Piece:
    """The weights (flat_heads, t, s) of a tile, and their logarithms if available."""

    weights: Tensor
    logs: Tensor | None = None
    unit: float = 1.0
    """The nats of a logarithm of 1: ln 2 for logarithms to base 2."""
    is_scratch: bool = False
    """Whether the logarithms are finite, and may be overwritten by their one reader."""


Part = Callable[[Rows, Rows], Piece]


class Scratch:
    def __init__(self) -> None:
        self._held: dict[Source, Any] = {}

    def of(self, owner: "Source", make: Callable[[], T]) -> T:
        if owner not in self._held:
            self._held[owner] = make()
        held: T = self._held[owner]
        return held


class Statistic(ABC):
    """A statistic computed from tiles. `read` gets each tile once, and gradients flow through it."""

    needs_tiles: ClassVar[bool] = False
    """Whether it needs a pass over tiles, which others may share, because products with the whole map do not
    suffice.
    """
    reads_shares: ClassVar[bool] = False
    """Whether it reads the weights of a row as shares of a whole: then it has no meaning for weights below 0."""
    overwrites: ClassVar[bool] = False
    """Whether it overwrites the logarithms of a piece where it may: it reads after the others."""
    said: ClassVar[str]
    """Its name with its numbers, in words for `format` with the statistic."""

    def __str__(self) -> str:
        return self.said.format(self)

    @abstractmethod
    def read(self, piece: Piece, tile: Tile) -> tuple[Tensor, ...]:
        """The statistic's part from one tile."""

    @abstractmethod
    def add(self, total: Any, read: tuple[Tensor, ...], tile: Tile, source: "Source") -> Any:
        """Add a tile to the total, at first None. Groups of flat_heads come one by one, rows ascending."""

    @abstractmethod
    def end(self, total: Any) -> tuple[Tensor, ...]:
        """Turn the total into the answers (flat_heads, ...)."""


class PartOf(NamedTuple):
    rows: Rows
    columns: Rows
    queries: int
    """T of the whole."""
    keys: int
    """S of the whole. Row i of it is at position i + S - T of its columns."""

    @property
    def is_whole(self) -> bool:
        return self.rows == range(self.queries) and self.columns == range(self.keys)

    def positions(self, device: torch.device) -> Tensor:
        """Those of the rows among the columns of the whole, (T,)."""
        return index_tensor(self.rows, device) + (self.keys - self.queries)


class Source(ABC):
    """The source of the weights of a map (batch..., H, T, S).

    `flat_heads` are the flat indices of the dimensions before queries and keys.
    """

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """The dtype of the weights: float32, or float64 for float64 input."""

    @property
    def answer_dtype(self) -> torch.dtype:
        """The dtype in which answers are given."""
        return self.dtype

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """The device of its tensors."""

    @property
    def leading(self) -> tuple[int, ...]:
        """(batch..., H)."""
        return tuple(self.shape[:-2])

    @property
    def flat_heads(self) -> int:
        """How many maps (T, S) it holds."""
        return math.prod(self.leading)

    @property
    def queries(self) -> int:
        """T."""
        return self.shape[-2]

    @property
    def keys(self) -> int:
        """S."""
        return self.shape[-1]

    @property
    def part_of(self) -> PartOf:
        """Its place in a whole map; by default it is one."""
        return PartOf(range(self.queries), range(self.keys), self.queries, self.keys)

    @property
    def key_heads(self) -> Tensor | None:
        """The key head of each of its flat heads, within its sequence, (flat_heads,); None if heads have no keys."""
        return None

    @property
    def width(self) -> int:
        """The elements allocated for each pair while a tile is made."""
        return 1

    @property
    def has_signs(self) -> bool:
        """Whether weights may be below 0."""
        return False

    @property
    @abstractmethod
    def dimensions(self) -> Dimensions:
        """The names of its dimensions."""

    def require_heads(self, asked: str) -> None:
        """Check that its dimension of heads is known, if it has one.

        Raises:
            ShapeError: it is not.
        """
        self.dimensions.require_heads(asked, self.shape)

    @abstractmethod
    def tensors(self) -> Sequence[Tensor]:
        """The tensors that it holds in memory."""

    @abstractmethod
    def __str__(self) -> str:
        """A short name."""

    @property
    def has_blocks(self) -> bool:
        """Whether any block of weights can be computed; otherwise there are only saved statistics."""
        return True

    @property
    def kept(self) -> Mapping[str, Statistic]:
        """The statistics that were kept in place of the weights, by name."""
        return {}

    def keeps(self, statistic: Statistic) -> bool:
        """Whether a statistic can be answered."""
        return self.has_blocks or self.at_once(statistic) is not None

    def grid(self, wanted: Grid, how: str) -> Grid:
        """The finest grid for pooling by `how`, never finer than the wanted one."""
        return wanted

    def refuse(self, asked: str) -> NoReturn:
        """Raise the error for an answer this source lacks.

        Raises:
            NotKeptError: it has statistics only.
            ArgumentError: the map is not from one call.
        """
        raise ArgumentError(
            f"{asked} needs the queries and keys of one call, and this map is {self}: ask the map of the call"
        )

    def gradient(self, grad_output: Tensor | None, asked: str) -> "Source":
        """The source of dL/dP, or of P times dL/dP for the attribution, for a gradient dL/dO; by default the saved one.

        Raises:
            ArgumentError: the map is not from one call, or its values or the gradient of its output were not kept.
            GradientError: there was no backward pass.
        """
        self.refuse(f"{asked}()")

    def support(self, rows: range) -> range:
        """The keys outside which the weights of these rows are 0, whatever their signs."""
        return self.columns(rows)

    def columns(self, rows: range) -> range:
        """The keys outside which the weights of these rows are 0."""
        return range(self.keys)

    @abstractmethod
    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        """A function from rows and columns to the weights of those flat_heads.

        With a scratch, a piece may overwrite the memory of the piece before, and carries no gradient.
        """

    def softmax_factors(self) -> Factors | None:
        """The factors of the call behind softmax weights; None for other sources."""
        return None

    def pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The single weights P[..., rows[n], columns[n]], (flat_heads, N)."""
        part = self.part(range(self.flat_heads))
        blocks = (part(i, j).weights for i, j in zip(rows.split(PAIRS), columns.split(PAIRS), strict=True))
        return torch.cat([block.diagonal(dim1=-2, dim2=-1) for block in blocks], -1)

    def points(self, flat_heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        """The single weights P[flat_heads[n], rows[n], columns[n]], (N,)."""
        places = [(flat_heads == flat_head).nonzero()[:, 0] for flat_head in flat_heads.unique()]
        found = [self.choose(flat_heads[of[:1]], (1,)).pairs(rows[of], columns[of])[0] for of in places]
        return torch.cat(found)[torch.cat(places).argsort()]

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """A statistic's answers (flat_heads, ...) without tiles; None if it needs tiles, or has no answer."""
        return None

    def product(self, x: Tensor) -> Tensor | None:
        """P x for x (S, N) or (batch..., G or H, S, N), laid out as the map; None for sources that need tiles."""
        return None

    @abstractmethod
    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "Source":
        """The source of some flat_heads, or all for None, laid out as `leading`, without names for these dimensions."""

    @abstractmethod
    def with_dimensions(self, dimensions: Dimensions) -> "Source":
        """The same source under other names of its dimensions."""

    @abstractmethod
    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Source":
        """The source with its tensors mapped: moved, or detached."""

    def laid_out(self, answer: Tensor) -> Tensor:
        """An answer (flat_heads, ...) with the leading dimensions, in the dtype of answers."""
        if answer.is_floating_point():
            answer = answer.to(self.answer_dtype)
        return answer.reshape(*self.shape[:-2], *answer.shape[1:])


class NamedSource(Source):
    names: Dimensions | None

    @property
    def dimensions(self) -> Dimensions:
        assert self.names is not None, "a source of a call has names by its documentation"
        return self.names

    def with_dimensions(self, dimensions: Dimensions) -> Source:
        this: Any = self
        made: Source = replace(this, names=dimensions)
        return made

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> Source:
        """For sources with a `layout` whose tensors count flat_heads first."""
        chosen: Any = self if flat_heads is None else self.mapped(lambda tensor: tensor[flat_heads])
        made: Source = replace(chosen, layout=leading, names=Dimensions.unknown(len(leading), UNNAMED))
        return made


def bytes_by_storage(tensors: Sequence[Tensor]) -> dict[int, int]:
    """The bytes of tensors by storage, to count a shared storage once."""
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}


class LinearSource(NamedSource):
    """The weights of a mixer that is linear in its values. Its rows need not sum to 1, and may have signs."""

    layout: tuple[int, ...]
    """(batch..., H)."""

    @property
    @abstractmethod
    def mask(self) -> Mask:
        """The keys that a query may have: a range."""

    def refuse(self, asked: str) -> NoReturn:
        raise ArgumentError(f"{asked} is for the map of one call with scores, and this map is {self}, which has none")
