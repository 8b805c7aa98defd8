"""The rules by which a watch keeps tensors, and the masks it has read."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

import torch
from torch import Tensor

from regard.call.shapes import Sizes
from regard.tensors.guards import is_inference
from regard.tensors.torch_private import counted_version, version_counter
from regard.watching.kept.mask_reading import GivenMask, read_mask
from regard.watching.kept.output_gradients import GradientLog
from regard.watching.kept.saved_tensor import SavedTensor, copied, holds_much_more, may_be_deferred, may_be_overwritten

if TYPE_CHECKING:
    from regard.tensors.reused_memory import Arena

Where = Literal["factors", "cpu", "summary"]


class RetentionPolicy:
    """The rules by which one watch keeps tensors, and the masks it has read."""

    def __init__(
        self, where: Where, *, copy: bool, graph: bool = False, values: bool = False, gradients: bool = False
    ) -> None:
        self.where = where
        self.copy = copy
        self.graph = graph
        """Whether saved tensors carry gradients to the model,"""
        self.values = values
        """whether the values of each call are kept,"""
        self.gradients = GradientLog(self._keep_gradient) if gradients else None
        """and the gradients of its output."""
        self._masks: dict[object, GivenMask] = {}
        self._copies: dict[object, SavedTensor] = {}
        self._arena: Arena | None = None

    @property
    def keeps_more(self) -> bool:
        """Whether more is kept of a call than queries, keys and row state."""
        return self.graph or self.values or self.gradients is not None

    def keep(self, tensor: Tensor, what: str) -> SavedTensor:
        """Keep an activation. A buffer is copied, and so is a view that keeps far more memory alive than its own."""
        if self.graph:
            return self._keep_graph(tensor, what)
        if self.where == "summary":
            # It is read before the model goes on, and then released.
            return SavedTensor(tensor.detach(), what)
        if self.where == "cpu" and tensor.device.type != "cpu":
            return SavedTensor(tensor.detach().cpu(), what)
        if self.copy or may_be_overwritten(tensor) or holds_much_more(tensor):
            return self.copied(tensor.detach() if tensor.requires_grad else tensor, what)
        return SavedTensor(tensor.detach(), what, version_counter(tensor))

    def keep_queries(self, tensor: Tensor, keys: Tensor, what: str) -> SavedTensor:
        """Keep queries, which the model needs no longer after the call: a large copy that lies apart, if one can be.

        The model then uses their memory again in the next layer, where it would else take new pages, which are slower
        to make than the copy. Keys may be in a cache of the model, and a copy would hold them a second time; so it
        would the queries that lie in the memory of the keys.
        """
        may_copy = self.where == "factors" and not tensor.requires_grad and may_be_deferred(tensor)
        if not may_copy or is_inference() or _share_memory(tensor, keys):
            return self.keep(tensor, what)
        return self.deferred_copy(tensor, what)

    def copied(self, tensor: Tensor, what: str) -> SavedTensor:
        """Keep a copy of an activation; a large one on the CPU no longer lies between the model's own tensors."""
        if not may_be_deferred(tensor) or is_inference():
            return SavedTensor(copied(tensor), what)
        return self.deferred_copy(tensor, what)

    def deferred_copy(self, tensor: Tensor, what: str) -> SavedTensor:
        """Keep a copy of a tensor on the CPU that is no tensor before it is asked for."""
        if self._arena is None:
            # It is loaded when it is needed: `import regard` and small models stay light.
            from regard.tensors.reused_memory import Arena

            self._arena = Arena()
        return SavedTensor(self._arena.copied(tensor), what)

    def _keep_graph(self, tensor: Tensor, what: str) -> SavedTensor:
        """Keep a tensor with its graph. The graph keeps the tensor's base alive, so a copy saves no memory.

        Tensors that require a gradient, and tensors that do not, are kept alike.
        """
        if self.where == "cpu" and tensor.device.type != "cpu":
            return SavedTensor(tensor.cpu(), what)
        if self.copy or may_be_overwritten(tensor):
            return SavedTensor(tensor.clone(), what)
        return SavedTensor(tensor, what, version_counter(tensor))

    def _keep_gradient(self, tensor: Tensor, what: str) -> SavedTensor:
        """Keep the gradient of a backward pass, without a graph, also where that pass made one."""
        tensor = tensor.detach()
        if self.where == "cpu" and tensor.device.type != "cpu":
            return SavedTensor(tensor.cpu(), what)
        if may_be_overwritten(tensor) or holds_much_more(tensor):
            return SavedTensor(copied(tensor), what)
        return SavedTensor(tensor, what, version_counter(tensor))

    def keep_weight(self, tensor: Tensor, what: str) -> SavedTensor:
        """Keep a parameter. It is copied only if asked for, and then once for all calls."""
        if tensor.is_inference() or self.where == "summary" or not (self.copy or self.where == "cpu"):
            held = tensor if self.graph else tensor.detach()
            return SavedTensor(held, what, counted_version(tensor))
        identity = (id(tensor), version_counter(tensor))
        if identity not in self._copies:
            # The watched model holds the parameter, so no other object can get its id.
            copy = tensor.clone() if self.graph else copied(tensor)
            self._copies[identity] = SavedTensor(copy.cpu() if self.where == "cpu" else copy, what)
        return self._copies[identity]

    def mask(self, tensor: Tensor, sizes: Sizes, *, drops: bool = False, dtype: torch.dtype | None = None) -> GivenMask:
        """Read a mask a function of torch got; it is read once for all calls that get the same mask.

        `drops` says that True in a bool mask leaves a key out; `dtype` is the dtype to which autocast turns
        additive masks.
        """
        if self.graph and tensor.requires_grad:
            return self._read_learned(tensor, sizes, dtype)
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

    def _read_learned(self, tensor: Tensor, sizes: Sizes, dtype: torch.dtype | None) -> GivenMask:
        """Keep a bias that takes a gradient as it is, with its graph."""
        given = read_mask(tensor if dtype is None else tensor.to(dtype), sizes, is_learned=True)
        return given if given.dense is None else given.holding(self.keep(given.dense, "the masks"))

    def _read(self, tensor: Tensor, sizes: Sizes, drops: bool, dtype: torch.dtype | None) -> GivenMask:
        with torch.inference_mode(False), torch.no_grad():
            tensor = tensor.detach()
            if dtype is not None and tensor.is_floating_point():
                tensor = tensor.to(dtype)
            given = read_mask(tensor.cpu() if self.where == "cpu" else tensor, sizes, drops=drops)
        if given.dense is None or self.where == "summary":
            return given
        # Models build equal masks anew in each layer: a dense mask that equals one already held is not held again.
        for other in self._masks.values():
            if other.dense is not None and _equal(other.dense, given.dense) and not other.kept[0].is_stale:
                return other
        given = given.holding(self.keep(given.dense, "the masks"))
        self._masks.setdefault(("dense", len(self._masks)), given)
        return given

    @property
    def dense_masks(self) -> list[GivenMask]:
        """The masks held in full, each once."""
        return list({id(g.dense): g for g in self._masks.values() if g.dense is not None}.values())


def _identity(tensor: Tensor) -> object | None:
    """A key that is equal for two views of the same memory, even if one of them is gone; None if there is none."""
    from torch.multiprocessing.reductions import StorageWeakRef

    if tensor.is_inference():
        return None
    # The weak reference does not keep the memory alive, but no other storage can get its address.
    storage = StorageWeakRef(tensor.untyped_storage())
    return _Place(
        storage, (tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype, version_counter(tensor))
    )


@dataclass(frozen=True, slots=True)
class _Place:
    storage: object
    where: tuple[object, ...]


def _share_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _equal(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and one.shape == other.shape and bool(torch.equal(one, other))
