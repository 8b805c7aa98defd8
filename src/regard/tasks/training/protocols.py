"""The interfaces of the training loop's arguments: batches, a loss, a validation."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, Protocol, TypeVar

from torch import nn

from regard.tasks.training.losses import LossSum

B = TypeVar("B")


class BatchSize(NamedTuple):
    """How large a batch is: the number of its tokens, and of its places including padding."""

    tokens: int
    places: int


class Batches(Protocol[B]):
    """Training data in an order that depends on the epoch alone."""

    def epoch(self, epoch: int, start: int) -> Iterator[B]:
        """This rank's batches of one pass over the data, from index `start` on. All ranks have equally many."""

    def size(self, batch: B) -> BatchSize: ...


Loss = Callable[[nn.Module, Any], LossSum]
"""Computes the summed loss of a model on one batch."""

Validate = Callable[[], Mapping[str, float]]
"""Computes the metrics of the model on the validation data, by name."""
