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
"""The size in bytes from which a copy's place in memory matters."""


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor of the model, its name for messages, and its version; None if it cannot be written to.

    A copy in an arena becomes a tensor when it is first read, most often after the model has run. Each tensor has small
    blocks of heap between the large ones of the model: the heap then cannot reuse these, and takes new pages from the
    system.
    """

    made: "Tensor | ArenaCopy"
    what: str
    version: int | None = None

    @property
    def is_deferred(self) -> bool:
        """True for a copy that is not a tensor yet."""
        return not isinstance(self.made, Tensor)

    @property
    def tensor(self) -> Tensor:
        if not isinstance(self.made, Tensor):
            with torch.inference_mode(False), torch.no_grad():
                self.made = self.made.tensor()
        return self.made

    @property
    def is_stale(self) -> bool:
        """True if the model has written to the tensor since."""
        made = self.made
        return self.version is not None and isinstance(made, Tensor) and version_counter(made) != self.version

    def check(self) -> None:
        """Raise OverwrittenError if the model has written to the tensor since."""
        if self.is_stale:
            raise OverwrittenError(
                f"the model has overwritten {self.what} since they were seen: use regard.watch(..., copy=True), "
                "or read the map before the model runs on"
            )

    def __reduce__(self) -> tuple[object, ...]:
        """Copy (`copy`, `pickle`) into memory of its own; an overwritten tensor is refused."""
        self.check()
        return SavedTensor, (self.tensor, self.what)

    @property
    def bytes(self) -> int:
        """The bytes of memory it keeps alive."""
        return self.tensor.untyped_storage().nbytes()


def copied(tensor: Tensor) -> Tensor:
    """An ordinary copy, also of an inference tensor (without a version to compare). It keeps the tensor's memory order,
    the fastest to copy."""
    if not is_inference():
        return tensor.detach().clone()
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def may_be_deferred(tensor: Tensor) -> bool:
    """True if a copy of the tensor may lie in an arena: large CPU memory outside all modes."""
    return is_readable(tensor) and tensor.numel() * tensor.element_size() >= LARGE and not is_observed()


def may_be_overwritten(tensor: Tensor) -> bool:
    """True if a tensor may be a buffer, such as a static cache: it was written in place before, and may be again. An
    inference tensor always counts, because it has no version."""
    return tensor.is_inference() or version_counter(tensor) > 0


def holds_much_more(tensor: Tensor) -> bool:
    """True for a view of memory more than twice its own bytes."""
    return tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
