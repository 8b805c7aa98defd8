"""The processes of one training, and their communication besides gradients."""

import json
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
        failure: OSError | None = None
        answer: dict[str, Any] = {}
        try:
            answer["answer"] = work()
        except OSError as error:
            failure, answer["error"] = error, [error.errno, error.strerror or str(error), error.filename]
        found = [json.loads(one) for one in self._exchange(json.dumps(answer, default=str).encode())]
        if failure is not None:
            raise failure
        for rank, one in enumerate(found):
            if "error" in one:
                number, text, name = one["error"]
                text += f" (on rank {rank})"
                raise OSError(number, text, name) if number else OSError(text)
        return [one["answer"] for one in found]

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

    def _exchange(self, content: bytes) -> list[bytes]:
        """The bytes of every rank, sent as tensors because torch pickles anything else."""
        sizes = self._all(torch.tensor([len(content)], device=self.device))
        padded = torch.zeros(int(max(sizes)), dtype=torch.uint8, device=self.device)
        padded[: len(content)] = torch.frombuffer(bytearray(content), dtype=torch.uint8)
        parts = self._all(padded)
        return [bytes(part[: int(size)].tolist()) for part, size in zip(parts, sizes, strict=True)]

    def _all(self, here: torch.Tensor) -> list[torch.Tensor]:
        parts = [torch.empty_like(here) for _ in range(self.world_size)]
        torch.distributed.all_gather(parts, here)
        return [part.cpu() for part in parts]


ALONE = Ranks()
