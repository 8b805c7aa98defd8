"""The provenance of weights: tensors made from a softmax, and the axis on which its weights still sum over keys.

A tensor is traced for as long as it lives, through weak references, so a trace keeps no memory of the model.
"""

import weakref
from dataclasses import dataclass, field

from torch import Tensor, nn

from regard.tensors.torch_private import counted_version
from regard.watching.origins.axes import AxisNumber
from regard.watching.origins.streams import Origins, Stream


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
    streams: "Stream | Origins | None" = None
    """The streams of the queries and of the keys, if known."""
    is_compared: bool = False
    """True if a running module had multiplied activations with activations, as queries with keys, by then."""
    calls: list[object] = field(default_factory=list)
    """A token of each attention call made of it."""
    is_of_slots: bool = False
    """True if its weights were divided by their sums over another axis: its queries compete for each key, as slots."""
    is_taken: bool = False
    """True after any product, attention or not."""
    is_refused: bool = False
    is_over_another_axis: bool = False
    """True if values were multiplied over another axis than that of the softmax."""
    went_into: str = ""
    """The last function of the trace."""

    @property
    def keys(self) -> int:
        """How many weights sum to 1."""
        return self.shape[self.axis]

    def sequences(self) -> Origins | None:
        if not isinstance(self.streams, Origins):
            return None
        return self.streams._replace(queries=Stream("slots")) if self.is_of_slots else self.streams

    @property
    def softmax(self) -> Tensor | None:
        """The softmax's weights; None if the model has overwritten them since."""
        tensor = self.tensor
        return None if tensor is None or counted_version(tensor) != self.version else tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    origins: tuple[SoftmaxOrigin, ...] = ()
    depth: int = 0
    """How many modules ran when it was made."""

    def ends_with(self, depth: int) -> bool:
        return self.depth >= depth


@dataclass(slots=True, kw_only=True, eq=False)
class SoftmaxTrace(Trace):
    key: AxisNumber
    """The axis of the keys."""
    other: AxisNumber
    """The axis of the queries, as far as it is known before the product."""
    is_changed: bool = False
    """True if anything but the layout and the dtype differs from the softmax."""
    is_moved: bool = False
    """True after an exchange of axes since the softmax."""
    is_product: bool = False
    """True for a product of several softmaxes."""
    lost_in: str = ""
    """The function in which the axis of the keys was lost."""


class SoftmaxWeights(SoftmaxTrace):
    """Weights, perhaps changed since their softmax."""

    __slots__ = ()

    def ends_with(self, depth: int) -> bool:
        return all(origin.is_taken and origin.depth >= depth for origin in self.origins)


class SoftmaxLogs(SoftmaxTrace):
    __slots__ = ()


@dataclass(slots=True, kw_only=True, eq=False)
class Exponentials(Trace):
    of: weakref.ref[Tensor]
    """The tensor as it was made."""


@dataclass(slots=True, kw_only=True, eq=False)
class Sums(Trace):
    axis: int
    summand: weakref.ref[Tensor]
    made_as: weakref.ref[Tensor]
    """Of exponentials the summand as it was made, in another layout."""
    is_log: bool
    over_heads: Trace | None
    """The trace of a sum of weights over their heads, which is weights as well."""


@dataclass(slots=True, kw_only=True, eq=False)
class Spread(Trace):
    """Weights (..., S, 1) times values (..., S, D): a sum over S, the axis `key`, may follow and make a product."""

    trace: SoftmaxWeights
    key: int
    weights: Tensor
    values: Tensor


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionOutput(Trace):
    """The output of an attention; `queries` is their axis."""

    queries: int
    token: object
    """That of the call."""
    is_certain: bool
    """True if no later product can show that the queries are no positions."""


class Traces:
    def __init__(self) -> None:
        self.alive: dict[int, tuple[weakref.ref[Tensor], Trace]] = {}
        """The traces by the ids of their tensors, read at each function."""

    def __len__(self) -> int:
        return len(self.alive)

    def of(self, tensor: object) -> Trace | None:
        found = self.alive.get(id(tensor))
        return None if found is None or found[0]() is not tensor else found[1]

    def put(self, tensor: Tensor, trace: Trace) -> None:
        number, traces = id(tensor), self.alive

        def forget(reference: "weakref.ref[Tensor]") -> None:
            # By then, another tensor may have this number.
            if traces.get(number, (None,))[0] is reference:
                del traces[number]

        traces[number] = weakref.ref(tensor, forget), trace

    def is_alive(self, origin: SoftmaxOrigin) -> bool:
        return any(reference() is not None and origin in trace.origins for reference, trace in [*self.alive.values()])

    def leave(self, depth: int) -> None:
        for number, (_, trace) in list(self.alive.items()):
            if trace.ends_with(depth):
                self.alive.pop(number, None)
