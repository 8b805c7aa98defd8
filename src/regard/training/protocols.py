"""What the training loop is handed: batches, a loss, a validation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import nn

from regard.training.losses import LossSum

B = TypeVar("B")


class BatchSize(NamedTuple):
    """How large a batch is: its tokens, and its places including padding."""

    tokens: int
    places: int


class Batches(Protocol[B]):
    """Training data in an order that depends on nothing but the epoch."""

    def epoch(self, epoch: int, start: int) -> Iterator[B]:
        """This rank's batches of a pass over the data from index `start` on; every rank has as many."""
        ...

    def size(self, batch: B) -> BatchSize:
        """How large a batch is."""
        ...


Loss = Callable[[nn.Module, Any], LossSum]


Validate = Callable[[], Mapping[str, float]]
