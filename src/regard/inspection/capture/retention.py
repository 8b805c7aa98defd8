"""The rules by which a watch keeps tensors, and the masks that it has read."""

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.inspection.capture.mask_reading import GivenMask, read_mask
from regard.inspection.capture.snapshot import Kept, copied, holds_much_more, may_be_overwritten
from regard.mechanisms.shapes import Sizes

Where = Literal["factors", "cpu", "summary"]


class Keeper:
    """The rules by which one watch keeps tensors, and the masks that it has read."""

    def __init__(self, where: Where, *, copy: bool) -> None:
        self.where = where
        self.copy = copy
        self._masks: dict[object, GivenMask] = {}
        self._copies: dict[object, Kept] = {}

    def keep(self, tensor: Tensor, what: str) -> Kept:
        """An activation: a view that holds far more than its own bytes is copied, a buffer as well."""
        tensor = tensor.detach()
        if self.where == "summary":
            # It is read before the model runs on, and then let go.
            return Kept(tensor, what)
        if self.where == "cpu" and tensor.device.type != "cpu":
            return Kept(tensor.cpu(), what)
        if self.copy or may_be_overwritten(tensor) or holds_much_more(tensor):
            return Kept(copied(tensor), what)
        return Kept(tensor, what, tensor._version)

    def keep_weight(self, tensor: Tensor, what: str) -> Kept:
        """A parameter: copied only if asked, and then once for all calls."""
        if tensor.is_inference() or self.where == "summary" or not (self.copy or self.where == "cpu"):
            return Kept(tensor.detach(), what, None if tensor.is_inference() else tensor._version)
        identity = (id(tensor), tensor._version)
        if identity not in self._copies:
            # The parameter itself is held beside the copy by the watched model, so that its id stays its own.
            self._copies[identity] = Kept(copied(tensor).cpu() if self.where == "cpu" else copied(tensor), what)
        return self._copies[identity]

    def mask(self, tensor: Tensor, sizes: Sizes, *, drops: bool = False, dtype: torch.dtype | None = None) -> GivenMask:
        """A mask as torch's functions take it, read once for all the calls that get the same one.

        `drops` is for bool masks whose True means: leave this key out; `dtype` is what autocast makes of
        added numbers.
        """
        key = _identity(tensor)
        if key is None:
            return self._read(tensor, sizes, drops, dtype)
        key = (key, sizes.map_shape, sizes.has_heads, drops, dtype)
        if key not in self._masks:
            given = self._read(tensor, sizes, drops, dtype)
            if given.dense is not None and self.where == "summary":
                return given
            self._masks[key] = given
        return self._masks[key]

    def _read(self, tensor: Tensor, sizes: Sizes, drops: bool, dtype: torch.dtype | None) -> GivenMask:
        with torch.inference_mode(False), torch.no_grad():
            tensor = tensor.detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            given = read_mask(tensor.cpu() if self.where == "cpu" else tensor, sizes, drops=drops)
        if given.dense is None or self.where == "summary":
            return given
        # A copy of a dense mask that is equal to one already held is dropped again (models rebuild them by layer).
        for other in self._masks.values():
            if other.dense is not None and _equal(other.dense, given.dense) and not other.kept[0].is_stale:
                return other
        given = given.holding(self.keep(given.dense, "the masks"))
        self._masks.setdefault(("dense", len(self._masks)), given)
        return given

    @property
    def dense_masks(self) -> list[GivenMask]:
        """The masks that are held in full, each once."""
        return list({id(g.dense): g for g in self._masks.values() if g.dense is not None}.values())


def _identity(tensor: Tensor) -> object | None:
    """What is equal for two views of the same numbers, also after one of them is gone; None if there is no telling."""
    from torch.multiprocessing.reductions import StorageWeakRef

    if tensor.is_inference():
        return None
    # The weak reference keeps the storage's address from being given to another one, not its memory.
    storage = StorageWeakRef(tensor.untyped_storage())
    return _Place(storage, (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, tensor._version))


@dataclass(frozen=True, slots=True)
class _Place:
    storage: object
    where: tuple[object, ...]


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
