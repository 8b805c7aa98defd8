"""A saved tensor of the model, as it is or as a copy; a later overwrite by the model is noticed."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from regard.errors import OverwrittenError
from regard.tensors.fingerprint import Fingerprint, first_changed
from regard.tensors.guards import is_inference, is_observed, is_readable
from regard.tensors.torch_private import counted_version, version_counter, viewed

if TYPE_CHECKING:
    from regard.tensors.reused_memory import ArenaCopy

LARGE = 2**14
"""The size in bytes from which a copy's place in memory matters."""


@dataclass(slots=True, eq=False)
class SavedTensor:
    """A tensor of the model, its name for messages, and its mark; None if it cannot be written to.

    A copy in an arena becomes a tensor when it is first read, most often after the model has run. Each tensor has small
    blocks of heap between the large ones of the model: the heap then cannot reuse these, and takes new pages from the
    system.
    """

    made: "Tensor | ArenaCopy"
    what: str
    mark: int | Fingerprint | None = None
    """Its version; or a fingerprint, where a write may leave the version as it is."""

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
        return first_stale((self,)) is not None

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


def first_stale(held: Iterable[SavedTensor]) -> SavedTensor | None:
    """The first of the tensors that the model has written to since; all fingerprints are compared at once."""
    taken, pairs = list[SavedTensor](), list[tuple[Fingerprint, Tensor]]()
    for kept in held:
        made, mark = kept.made, kept.mark
        if mark is None or not isinstance(made, Tensor):
            continue
        if isinstance(mark, Fingerprint):
            taken.append(kept)
            pairs.append((mark, made))
        elif version_counter(made) != mark:
            return kept
    place = first_changed(pairs) if pairs else None
    return None if place is None else taken[place]


def marked(tensor: Tensor, owner: Tensor) -> int | Fingerprint | None:
    """The mark of a tensor in the memory of its owner: torch's fused optimizers, FSDP, and adapters that merge
    themselves, write to parameters without a new version."""
    base = viewed(owner)
    base = owner if base is None else base
    if isinstance(base, nn.Parameter) or (base.is_leaf and base.requires_grad):
        return Fingerprint(tensor)
    return counted_version(tensor)


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
