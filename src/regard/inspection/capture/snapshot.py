"""A tensor of a model's, kept: as it is, or as a copy, and always noticing if it changes."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import OverwrittenError


@dataclass(frozen=True, slots=True, eq=False)
class Kept:
    """A tensor of the model's, what it is, and the version that was seen; None if nobody else can write to it."""

    tensor: Tensor
    what: str
    version: int | None = None

    @property
    def is_stale(self) -> bool:
        """Whether the model has written to it since."""
        return self.version is not None and self.tensor._version != self.version

    def check(self) -> None:
        """Raise if the model has written to the tensor since.

        Raises:
            OverwrittenError: it has.
        """
        if self.is_stale:
            raise OverwrittenError(
                f"the model has overwritten {self.what} since they were seen: use regard.watch(..., copy=True), "
                "or read the map before the model runs on"
            )

    @property
    def bytes(self) -> int:
        """What it keeps alive."""
        return self.tensor.untyped_storage().nbytes()


def copied(tensor: Tensor) -> Tensor:
    """An ordinary copy, also of an inference tensor, which has no version that could be watched.

    It lies in memory in the order in which the tensor does, which is sooner copied than another one.
    """
    if not torch.is_inference_mode_enabled():
        return tensor.detach().clone()
    with torch.inference_mode(False), torch.no_grad():
        return tensor.clone()


def may_be_overwritten(tensor: Tensor) -> bool:
    """Whether a tensor is a buffer, such as a static cache: what was written to in place will be written to again.

    Inference tensors count, since nobody can tell.
    """
    return tensor.is_inference() or tensor._version > 0


def holds_much_more(tensor: Tensor) -> bool:
    """Whether a view keeps alive more than twice what it shows."""
    return tensor.untyped_storage().nbytes() > 2 * tensor.numel() * tensor.element_size()
