"""What an observer hands to a watch: one call, from which each watch reads what it keeps."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

from regard.inspection.capture.factors import Factors
from regard.inspection.capture.retention import Keeper


@dataclass(slots=True)
class Reading:
    """The factors of a call, and what there is to say about them."""

    factors: Factors
    notes: list[str] = field(default_factory=list)
    verify: Callable[[], float] | str = "nothing to compare with"
    """The error of the rebuilt output, or why it cannot be told."""
    is_stored: bool = False
    """Whether the weights themselves are held."""
    grows: bool = False
    """Whether the keys may be those of the call before with some more behind them."""


class ObservedCall(ABC):
    """One observed call, while the model's tensors are at hand."""

    how: str
    """What was observed, for the report."""

    @abstractmethod
    def read(self, keeper: Keeper, name: str) -> Reading:
        """Keep what the map needs, by a watch's own rules.

        Raises:
            RegardError: the call cannot be read; the message says why.
        """
