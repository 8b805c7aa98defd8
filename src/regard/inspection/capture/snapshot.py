"""A tensor of the model that is kept, as it is or as a copy; if the model overwrites it later, that is noticed."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import OverwrittenError
from regard.mechanisms.readable import is_readable
from regard.torch_private import count_dispatch_modes, version_counter

LARGE = 2**18
"""The bytes of a tensor that is copied to reused memory."""
WRITTEN_AS = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.float16: torch.float16,
    torch.bfloat16: torch.int16,
}
"""The dtypes that are copied to reused memory, each with one of as many bytes that NumPy knows."""


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor of the model, its name for messages, and the version that was seen; None if nobody can write to it."""

    tensor: Tensor
    what: str
    version: int | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the model has written to the tensor since then."""
        return self.version is not None and version_counter(self.tensor) != self.version

    def check(self) -> None:
        """Check that the model has not written to the tensor since then.

        Raises:
            OverwrittenError: the model has written to it.
        """
        if self.is_stale:
            raise OverwrittenError(
                f"the model has overwritten {self.what} since they were seen: use regard.watch(..., copy=True), "
                "or read the map before the model runs on"
            )

    def __reduce__(self) -> tuple[object, ...]:
        """A copy (`copy`, `pickle`) is nobody else's; what was overwritten before is not copied."""
        self.check()
        return Kept, (self.tensor, self.what)

    @property
    def bytes(self) -> int:
        """The bytes of memory that it keeps alive."""
        return self.tensor.untyped_storage().nbytes()


def copied(tensor: Tensor) -> Tensor:
    """An ordinary copy, also of an inference tensor (which has no version that could be compared).

    The copy has the same memory order as the tensor, because that is the fastest to copy. A large one on the CPU goes
    to memory of an earlier copy that nobody holds any more: to make new pages takes longer than to copy.
    """
    with torch.inference_mode(False), torch.no_grad():
        if tensor.numel() * tensor.element_size() < LARGE or tensor.dtype not in WRITTEN_AS or not _is_plain(tensor):
            return tensor.detach().clone()
        from regard.maps.reused_memory import reused_memory

        order = sorted(range(tensor.dim()), key=tensor.stride, reverse=True)
        laid_out = tensor.detach().permute(order)
        memory = reused_memory(laid_out.shape, WRITTEN_AS[tensor.dtype]).view(tensor.dtype)
        return memory.copy_(laid_out).permute([order.index(dim) for dim in range(tensor.dim())])


def _is_plain(tensor: Tensor) -> bool:
    """Whether the numbers of a tensor stand in the memory of the CPU, and no mode of torch asks where they go."""
    return is_readable(tensor) and not count_dispatch_modes()


def may_be_overwritten(tensor: Tensor) -> bool:
    """Whether a tensor may be a buffer, such as a static cache: it was written in place before, and may be again.

    An inference tensor always counts, because it has no version that would tell.
    """
    return tensor.is_inference() or version_counter(tensor) > 0


def holds_much_more(tensor: Tensor) -> bool:
    """Whether a view keeps more than twice its own bytes alive."""
    return tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
