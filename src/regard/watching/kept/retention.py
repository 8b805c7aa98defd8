"""The rules of a watch for saving tensors, and its cache of masks."""

from typing import Any, Literal

import torch
from torch import Tensor

from regard.call.shapes import Sizes
from regard.tensors.fingerprint import Fingerprint, first_changed
from regard.tensors.fresh import Fresh, copied, is_of_parameter, may_be_overwritten
from regard.tensors.torch_private import version_counter
from regard.watching.kept.mask_reading import GivenMask, read_mask
from regard.watching.kept.output_gradients import GradientLog

Where = Literal["factors", "cpu", "summary"]


class RetentionPolicy:
    def __init__(
        self, where: Where, *, copy: bool, graph: bool = False, values: bool = False, gradients: bool = False
    ) -> None:
        self.where = where
        self.copy = copy
        self.graph = graph
        """Saved tensors carry gradients to the model,"""
        self.values = values
        """the values of each call are saved,"""
        self.gradients = GradientLog(self._keep_gradient) if gradients else None
        """and the gradients of its output."""
        self.ended: dict[str, list[Any]] = {}
        """The calls of each recurrence that may go on from their last state."""
        self._masks: dict[object, GivenMask] = {}
        self._marks: dict[object, Fingerprint] = {}
        """The masks in memory of parameters, as they were when they were read."""
        self._copies: dict[int, tuple[Fingerprint, Tensor]] = {}
        """The copy of each parameter, and the parameter as it was then."""

    def keep(self, tensor: Tensor, what: str, fresh: Fresh) -> Tensor:
        if self.graph:
            return self._keep_graph(tensor, what, fresh)
        if self.where == "summary":
            # It is read before the model goes on, and then released.
            return fresh.own(what, tensor.detach())
        if self.where == "cpu" and tensor.device.type != "cpu":
            return fresh.own(what, tensor.detach().cpu())
        return fresh.own(what, copied(tensor)) if self.copy else fresh.keep(what, tensor)

    def _keep_graph(self, tensor: Tensor, what: str, fresh: Fresh) -> Tensor:
        """Save a tensor with its graph. The graph keeps the tensor's base alive, so a copy saves no memory."""
        if self.where == "cpu" and tensor.device.type != "cpu":
            return fresh.own(what, tensor.cpu())
        if self.copy or may_be_overwritten(tensor):
            return fresh.own(what, tensor.clone())
        return fresh.add(what, tensor)

    def _keep_gradient(self, tensor: Tensor, what: str, fresh: Fresh) -> Tensor:
        """Save the gradient of a backward pass, detached even under `create_graph`."""
        if self.where == "cpu" and tensor.device.type != "cpu":
            return fresh.own(what, tensor.detach().cpu())
        return fresh.keep(what, tensor)

    def keep_weight(self, tensor: Tensor, what: str, fresh: Fresh) -> Tensor:
        """Save a parameter. It is copied only for `copy` or "cpu", and then once for all calls."""
        if tensor.is_inference() or self.where == "summary" or not (self.copy or self.where == "cpu"):
            return fresh.add(what, tensor if self.graph else tensor.detach(), tensor)
        # The watched model holds the parameter, so no other object can get its id.
        mark, copy = self._copies.get(id(tensor), (None, None))
        if mark is None or copy is None or first_changed([(mark, tensor)]) is not None:
            made = tensor.clone() if self.graph else copied(tensor)
            copy = made.cpu() if self.where == "cpu" else made
            self._copies[id(tensor)] = Fingerprint(tensor), copy
        return fresh.own(what, copy)

    def mask(self, tensor: Tensor, sizes: Sizes, *, drops: bool = False, dtype: torch.dtype | None = None) -> GivenMask:
        """Read a mask of a torch function, once for all calls with the same mask. `drops`: True in a bool mask drops a
        key; `dtype` is autocast's dtype for additive masks."""
        if self.graph and tensor.requires_grad:
            given = read_mask(tensor if dtype is None else tensor.to(dtype), sizes, is_learned=True)
            return given if given.dense is None else self._held(given, given.dense, is_owned=False)
        key = _identity(tensor)
        if key is None:
            return self._read(tensor, sizes, drops, dtype)
        key = (key, sizes.map_shape, sizes.has_heads, drops, dtype)
        mark = self._marks.get(key)
        if key not in self._masks or (mark is not None and first_changed([(mark, tensor)]) is not None):
            given = self._read(tensor, sizes, drops, dtype)
            if given.dense is not None and self.where == "summary":
                return given
            self._masks[key] = given
            if is_of_parameter(tensor):
                self._marks[key] = Fingerprint(tensor)
        return self._masks[key]

    def _read(self, tensor: Tensor, sizes: Sizes, drops: bool, dtype: torch.dtype | None) -> GivenMask:
        with torch.inference_mode(False), torch.no_grad():
            owner, tensor = tensor, tensor.detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            given = read_mask(tensor.cpu() if self.where == "cpu" else tensor, sizes, drops=drops)
        if given.dense is None or self.where == "summary":
            return given
        # Models build equal masks anew in each layer: a dense mask is saved only once.
        for other in self._masks.values():
            if other.dense is not None and _equal(other.dense, given.dense) and other.fresh.changed() is None:
                return other
        given = self._held(given, given.dense, is_owned=is_of_parameter(owner))
        self._masks.setdefault(("dense", len(self._masks)), given)
        return given

    def _held(self, given: GivenMask, dense: Tensor, *, is_owned: bool) -> GivenMask:
        fresh = Fresh()
        kept = fresh.own("masks", copied(dense)) if is_owned else self.keep(dense, "masks", fresh)
        return given.holding(kept, fresh)

    @property
    def dense_masks(self) -> list[GivenMask]:
        return list({id(g.dense): g for g in self._masks.values() if g.dense is not None}.values())


def _identity(tensor: Tensor) -> object | None:
    """A key equal for two views of the same memory, even if one of them is gone; None if there is none."""
    from torch.multiprocessing.reductions import StorageWeakRef

    if tensor.is_inference():
        return None
    # The weak reference does not keep the memory alive, but no other storage can get its address.
    storage = StorageWeakRef(tensor.untyped_storage())
    return storage, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_counter(tensor)


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
