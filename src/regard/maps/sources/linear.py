"""Sources of weights that no softmax makes: linear mixers of positions."""

from abc import abstractmethod
from typing import NoReturn

from regard.call.masks.base import Mask
from regard.errors import ArgumentError
from regard.maps.sources.source import NamedSource


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
