"""The processes of one training, and their communication besides gradients."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process as one of the processes of a training.

    >>> Ranks().gather(lambda: {"rows": 3})
    [{'rows': 3}]
    """

    rank: int = 0
    """The number of this process, from 0."""
    world_size: int = 1
    device: torch.device | str = "cpu"
    """The device for exchanged tensors."""

    @classmethod
    def of(cls, fabric: Any) -> "Ranks":
        return cls(fabric.global_rank, fabric.world_size, fabric.device)

    def gather(self, work: Callable[[], Any]) -> list[Any]:
        """Call `work` on every rank, and return the answers of all, in the order of the ranks.

        Every rank must call this method. It returns when all ranks have answered, so it is a barrier too.

        Raises:
            OSError: `work` raised it on some rank. All ranks then raise one, so that none blocks.
        """
        if self.world_size == 1:
            return [work()]
        answer, failure = None, None
        try:
            answer = work()
        except OSError as error:
            failure = error
        found: list[Any] = [None] * self.world_size
        mine = None if failure is None else (failure.errno, failure.strerror or str(failure), failure.filename)
        torch.distributed.all_gather_object(found, (answer, mine))
        if failure is not None:
            raise failure
        for rank, (_, told) in enumerate(found):
            if told is not None:
                number, text, name = told
                text += f" (on rank {rank})"
                raise OSError(number, text, name) if number else OSError(text)
        return [answer for answer, _ in found]

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over all ranks; one process returns the tensor itself. Every rank must call this method.
        Fabric's own moves its argument to the device in any case, and Apple's GPUs have no float64."""
        if self.world_size == 1:
            return values
        total = values.to(self.device, copy=True)
        torch.distributed.all_reduce(total)
        return total

    def share_out(self, items: Iterable[T]) -> Iterator[T]:
        """Every `world_size`-th item.

        >>> [list(Ranks(rank, 2).share_out("abc")) for rank in range(2)]
        [['a', 'c'], ['b']]
        """
        return islice(items, self.rank, None, self.world_size)

    def wait_for_the_first(self) -> None:
        """Wait for rank 0, for up to 7 days. Other waits end after half an hour: a silent rank then counts as dead."""
        if self.world_size > 1:
            group = torch.distributed.new_group(backend="gloo", timeout=timedelta(days=7))
            torch.distributed.barrier(group)
            torch.distributed.destroy_process_group(group)


ALONE = Ranks()
