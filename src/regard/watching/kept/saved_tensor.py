"""A saved tensor of the model, as it is or as a copy; a later overwrite by the model is noticed."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from regard.errors import OverwrittenError
from regard.tensors.guards import is_inference, is_observed, is_readable
from regard.tensors.torch_private import version_counter

if TYPE_CHECKING:
    from regard.tensors.reused_memory import ArenaCopy

LARGE = 2**14
"""The bytes from which it matters where in memory a copy lies."""


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor of the model, its name for messages, and the version seen; None if it cannot be written to.

    A copy in an arena becomes a tensor when it is first asked for, most often after the model has run. Each tensor has
    small pieces of memory, which the heap puts between the large ones of the model: then it can no longer give these
    to the model again, and takes new pages from the system.
    """

    made: "Tensor | ArenaCopy"
    what: str
    version: int | None = None

    @property
    def is_deferred(self) -> bool:
        """Whether it is a copy that is no tensor yet."""
        return not isinstance(self.made, Tensor)

    @property
    def tensor(self) -> Tensor:
        """The tensor."""
        if not isinstance(self.made, Tensor):
            with torch.inference_mode(False), torch.no_grad():
                self.made = self.made.tensor()
        return self.made

    @property
    def is_stale(self) -> bool:
        """Whether the model has written to the tensor since then."""
        made = self.made
        return self.version is not None and isinstance(made, Tensor) and version_counter(made) != self.version

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
        """Copy (`copy`, `pickle`) into memory of its own; a tensor that was overwritten is refused."""
        self.check()
        return SavedTensor, (self.tensor, self.what)

    @property
    def bytes(self) -> int:
        """The bytes of memory it keeps alive."""
        return self.tensor.untyped_storage().nbytes()


def copied(tensor: Tensor) -> Tensor:
    """An ordinary copy, also of an inference tensor (which has no version that could be compared).

    The copy has the same memory order as the tensor, because that is the fastest to copy.
    """
    if not is_inference():
        return tensor.detach().clone()
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def may_be_deferred(tensor: Tensor) -> bool:
    """Whether a copy of the tensor may lie in an arena: it is memory of the CPU, and large, and no mode looks at it."""
    return is_readable(tensor) and tensor.numel() * tensor.element_size() >= LARGE and not is_observed()


def may_be_overwritten(tensor: Tensor) -> bool:
    """Whether a tensor may be a buffer, such as a static cache: it was written in place before, and may be again.

    An inference tensor always counts, because it has no version that would tell.
    """
    return tensor.is_inference() or version_counter(tensor) > 0


def holds_much_more(tensor: Tensor) -> bool:
    """Whether a view keeps more than twice its own bytes alive."""
    return tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
