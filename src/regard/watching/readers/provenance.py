"""The provenance of tensors: those made from a softmax, and the axis on which its weights still sum over keys. A tensor
is traced for as long as it lives, through weak references, so a trace keeps no memory of the model."""

import weakref
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.tensors.torch_private import counted_version, viewed
from regard.watching.readers.axes import AxisNumber

Kind = Literal["weights", "logs", "exponentials", "sums", "spread", "output"]


@dataclass(slots=True, eq=False)
class SoftmaxOrigin:
    """A normalization the model wrote out: a softmax, or a division by the sum."""

    how: str
    shape: tuple[int, ...]
    axis: int
    """The axis along which the weights sum to 1."""
    tensor: Tensor | None
    """The weights, until their product with values; None if they are not needed, or were overwritten."""
    version: int | None
    is_projected: bool = False
    """True if it runs over the outputs of one projection (of experts, of classes, of features),"""
    is_projection: bool = False
    """and True if its scores are the outputs of one projection at all, not products of queries and keys."""
    depth: int = 0
    module: nn.Module | None = None
    is_compared: bool = False
    """True if a running module had multiplied activations with activations, as queries with keys, by then."""
    calls: list[object] = field(default_factory=list)
    """A token of each attention call made of it."""
    is_taken: bool = False
    """True after any product, attention or not."""
    is_refused: bool = False
    went_into: str = ""
    """The last function of the trace."""

    @property
    def keys(self) -> int:
        """How many weights sum to 1."""
        return self.shape[self.axis]

    @property
    def softmax(self) -> Tensor | None:
        """The softmax's weights; None if the model has overwritten them since."""
        tensor = self.tensor
        return None if tensor is None or counted_version(tensor) != self.version else tensor


@dataclass(slots=True, eq=False)
class Trace:
    """The origin of one tensor, as far as it is known."""

    kind: Kind
    origins: tuple[SoftmaxOrigin, ...] = ()
    key: AxisNumber = None
    """The axis of the keys; of an attention's output the axis of its queries."""
    other: AxisNumber = None
    """The axis of the queries, as far as it is known before the product."""
    is_changed: bool = False
    """True if anything but the layout and the dtype differs from the softmax."""
    is_moved: bool = False
    """True after an exchange of axes since the softmax."""
    is_product: bool = False
    """True for a product of several softmaxes."""
    lost_in: str = ""
    """The function in which the axis of the keys was lost."""
    of: Any = None
    """Of sums, a weak reference to the summand; of an output, the token of its call; of spread weights, factors."""
    beside: "Trace | None" = None
    """The trace of a sum of weights over their heads, which is weights as well."""
    depth: int = 0


class Traces:
    """The traced tensors of one thread."""

    def __init__(self) -> None:
        self.alive: dict[int, tuple[weakref.ref[Tensor], Trace]] = {}
        """The traces by the ids of their tensors, read at each function."""
        self._projections: dict[int, _Projection] = {}

    def __len__(self) -> int:
        return len(self.alive)

    def of(self, tensor: object) -> Trace | None:
        found = self.alive.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def put(self, tensor: Tensor, trace: Trace) -> None:
        """Trace a tensor for as long as it lives."""
        number, traces = id(tensor), self.alive

        def forget(reference: "weakref.ref[Tensor]") -> None:
            # By then, another tensor may have this number.
            if traces.get(number, (None,))[0] is reference:
                del traces[number]

        traces[number] = weakref.ref(tensor, forget), trace

    def drop(self, tensor: Tensor) -> None:
        """Trace a tensor no longer."""
        self.alive.pop(id(tensor), None)

    def is_alive(self, origin: SoftmaxOrigin) -> bool:
        """True while a tensor made from that origin exists."""
        return any(origin in trace.origins for trace in self.all())

    def all(self) -> Iterator[Trace]:
        return iter([trace for reference, trace in list(self.alive.values()) if reference() is not None])

    def leave(self, depth: int) -> None:
        """Forget the traces of an ended module, except those still needed."""
        for number, (_, trace) in list(self.alive.items()):
            is_done = all(origin.is_taken and origin.depth >= depth for origin in trace.origins)
            if is_done if trace.kind == "weights" else trace.depth >= depth:
                self.alive.pop(number, None)

    def clear(self) -> None:
        self.alive.clear()
        self._projections.clear()

    # -- projections -------------------------------------------------------------------------------------

    def projected(self, output: Tensor, *, channels_last: bool) -> None:
        """Record that a tensor is the output of a projection, with channels on its last axis or its second."""
        if len(self._projections) > MOST_PROJECTIONS:
            self._projections = {n: one for n, one in self._projections.items() if not one.is_gone()}
        base = base_of(output)
        if base.is_inference():
            shape = tuple(base.shape) if base.is_contiguous() else None
            one = _Projection(StorageWeakRef(base.untyped_storage()), channels_last, shape)
        else:
            one = _Projection(weakref.ref(base), channels_last)
        self._projections[_number(base)] = one

    def is_channel(self, tensor: Tensor, axis: int) -> bool | None:
        """True if an axis runs over the channels of a projection, False over positions; None if unknown. Known for a
        projection's output and for its views, by strides."""
        base = base_of(tensor)
        projection = self._projections.get(_number(base))
        if projection is None or projection.is_gone() or tensor.shape[axis] < 2:
            return None
        return projection.is_channel(base, tensor.stride(axis))


class _Projection(NamedTuple):
    """The output of a projection, and the axis of its channels."""

    reference: Any
    channels_last: bool
    shape: tuple[int, ...] | None = None
    """The shape of an inference tensor, which its views cannot name; None if it is not contiguous."""

    def is_channel(self, base: Tensor, stride: int) -> bool | None:
        """True if an axis with this stride, of the output or of its view, runs over the channels."""
        shape = self.shape if base.is_inference() else base.shape if base.is_contiguous() else None
        if shape is None:
            return None
        if self.channels_last:
            return stride < shape[-1]
        places = prod(shape[2:])
        return places <= stride < places * shape[1] if len(shape) > 2 else None

    def is_gone(self) -> bool:
        """True if its memory may belong to another tensor by now."""
        if isinstance(self.reference, StorageWeakRef):
            return self.reference.expired()
        return self.reference() is None


MOST_PROJECTIONS = 4096
"""The most recorded projections before dead ones are cleared."""


def base_of(tensor: Tensor) -> Tensor:
    """The tensor a view is a view of, or the tensor itself."""
    base = viewed(tensor)
    return tensor if base is None else base


def _number(base: Tensor) -> int:
    return base.untyped_storage().data_ptr() if base.is_inference() else id(base)


def is_learned(tensor: Tensor) -> bool:
    """True for a parameter, or a view of one."""
    return isinstance(tensor, nn.Parameter) or isinstance(viewed(tensor), nn.Parameter)
