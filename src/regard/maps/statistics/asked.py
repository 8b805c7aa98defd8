"""Several statistics of one map, and the interface of the readers of its rows: `READERS` in `tiles`."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from regard.maps.sources.source import Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.definitions import SumsOfKeys
from regard.maps.statistics.pooling import Grid

MOST_RANKED = 64
"""For more keys of each query, torch's selection and tiles are faster."""
Answer = tuple[Tensor, ...]


@dataclass(frozen=True, slots=True)
class Asked:
    """Several statistics, and the numbers that loops and kernels of one pass need of them."""

    statistics: tuple[Statistic, ...]
    ranked: int
    grid: Grid | None
    pictures: frozenset[str]
    """Subset of mean, sum and max."""
    offset: int | None
    """The offset of the distances, if they are wanted."""
    chosen: tuple[SumsOfKeys, ...]
    beyond: str | None
    """The reason why such a pass cannot answer; None if it can."""

    @classmethod
    def of(cls, statistics: Sequence[Statistic]) -> "Asked":
        ranked, grids, pictures, offsets, chosen = 0, set[Grid](), set[str](), set[int](), list[SumsOfKeys]()
        beyond = None
        for one in statistics:
            match one:
                case st.Received() | st.Entropy() | st.Largest():
                    pass
                case st.Distance(offset):
                    offsets.add(offset)
                case SumsOfKeys():
                    chosen.append(one)
                case st.ArgLargest(names_zeros=False):
                    ranked = max(ranked, 1)
                case st.TopWeights(k, names_zeros=False):
                    ranked = max(ranked, k)
                case st.Pooled(grid, how):
                    grids.add(grid)
                    pictures.add(how)
                case _:
                    beyond = f"it has no {one}"
        if ranked > MOST_RANKED or len(grids) > 1 or len(offsets) > 1:
            beyond = f"it ranks at most {MOST_RANKED} keys of a query, and has one picture and one distance"
        return cls(
            tuple(statistics), ranked, next(iter(grids), None), frozenset(pictures), next(iter(offsets), None),
            tuple(chosen), beyond,
        )  # fmt: skip

    @property
    def kinds(self) -> frozenset[type[Statistic]]:
        return frozenset(map(type, self.statistics))


class RowReader(ABC):
    """A way to answer several statistics of a source."""

    name: str
    devices: frozenset[str] | None = None
    """The kinds of devices on which it runs; None for any."""

    @abstractmethod
    def why_not(self, source: Source, asked: Asked) -> str | None:
        """Why it cannot read this source; None if it can."""

    @abstractmethod
    def read(self, source: Source, asked: Asked) -> list[Answer | None]:
        """The answers (flat_heads, ...) of each statistic; None for one that it leaves to the next reader."""
