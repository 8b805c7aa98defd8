"""The provenance of weights: tensors made from a softmax, and the axis on which its weights still sum over keys.

A tensor is traced for as long as it lives, through weak references, so a trace keeps no memory of the model.
"""

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard.tensors.torch_private import counted_version
from regard.watching.origins.streams import Origins, Stream

AxisNumber = int | None
"""The index of an axis; None once it is no longer an axis of the tensor."""

SLICES = frozenset({"__getitem__", "narrow", "split", "split_with_sizes", "chunk", "tensor_split", "select", "unbind",
                    "slice", "unsafe_split", "unsafe_chunk"})  # fmt: skip
VIEWS = SLICES | {
    "transpose", "permute", "view", "reshape", "flatten", "unflatten", "unsqueeze", "squeeze", "expand", "movedim",
    "moveaxis", "swapaxes", "swapdims", "T", "mT", "H", "mH", "t", "adjoint", "view_as", "reshape_as", "expand_as",
    "_unsafe_view", "ravel", "_reshape_alias", "atleast_2d", "atleast_3d",
}  # fmt: skip
"""Functions that change the layout and no element."""
MOVES = frozenset({"transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "T", "mT", "H", "mH", "t",
                   "adjoint"})  # fmt: skip
"""Those that exchange axes."""
REDUCTIONS = frozenset({"sum", "mean", "amax", "amin", "max", "min", "norm", "prod", "var", "std", "logsumexp", "any",
                        "all", "nansum", "nanmean", "linalg_vector_norm", "count_nonzero", "argmax",
                        "argmin"})  # fmt: skip
DISORDERS = frozenset({"sort", "topk", "gather", "index_select", "take_along_dim", "flip", "roll", "argsort",
                       "kthvalue", "take", "msort"})  # fmt: skip
"""Functions after which an axis no longer counts the same things."""
SAME_NUMBERS = VIEWS | {
    "contiguous", "clone", "to", "float", "half", "bfloat16", "double", "type", "type_as", "detach", "detach_", "alias",
    "_to_copy", "requires_grad", "cpu", "cuda", "data", "lift_fresh", "Identity",
}  # fmt: skip
"""Functions that change elements at most by rounding to another dtype."""


def followed(
    func: Callable[..., Any], name: str, args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, result: Tensor,
    axes: Sequence[AxisNumber], place: int = 0,
) -> list[AxisNumber] | None:  # fmt: skip
    """Where the axes of an argument are in a result (the `place`-th, if there are several). None means the result is no
    longer of the argument: it is a reduction over the axis."""
    if name in VIEWS:
        # An exchange of axes needs no sizes. With sizes of at least two, every axis has a distinguishing stride.
        sizes = [max(n, 2) for n in tensor.shape] if name in MOVES else list(tensor.shape)
        return _viewed(func, args, kwargs, tensor, axes, place, sizes, slices=name in SLICES)
    if name in DISORDERS:
        return [None for _ in axes]
    if name in REDUCTIONS:
        return _reduced(args, kwargs, tensor, result, axes)
    if name == "stack":
        at = kwargs.get("dim", args[1] if len(args) > 1 else 0) % result.dim()
        return [axis if axis is None or axis < at else axis + 1 for axis in axes]
    if name in ("scatter", "scatter_add", "index_copy", "index_add", "scatter_reduce"):
        # The keys chosen before are put where they belong.
        return [kwargs.get("dim", args[1]) % result.dim(), *(None for _ in axes[1:])]
    if name in ("cat", "concat", "concatenate", "pad", "constant_pad_nd") and result.dim() == tensor.dim():
        return list(axes)
    more = result.dim() - tensor.dim()
    if more < 0 or (more and not _is_broadcast(args, kwargs, result)):
        return [None for _ in axes]
    return [
        None if axis is None or result.shape[axis + more] != tensor.shape[axis] else axis + more for axis in axes
    ]  # fmt: skip


def _is_broadcast(args: tuple[Any, ...], kwargs: dict[str, Any], result: Tensor) -> bool:
    shapes = [t.shape for t in (*args, *kwargs.values()) if isinstance(t, Tensor)]
    try:
        return torch.broadcast_shapes(*shapes) == result.shape
    except RuntimeError:
        return False


def _viewed(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, axes: Sequence[AxisNumber],
    place: int, sizes: list[int], *, slices: bool,
) -> list[AxisNumber]:  # fmt: skip
    """Apply the function to a tensor without memory of those sizes, whose strides distinguish the axes."""
    if slices and _is_chosen_by_tensor(args):
        return [None for _ in axes]
    strides, step = [0] * tensor.dim(), 1
    for axis in reversed(range(tensor.dim())):
        strides[axis] = step
        step *= max(sizes[axis], 1)
    probe = torch.empty_strided(sizes, strides, device="meta", dtype=torch.bool)
    try:
        moved = func(
            *(probe if arg is tensor else arg for arg in args),
            **{key: probe if arg is tensor else arg for key, arg in kwargs.items()},
        )
    except (RuntimeError, NotImplementedError, TypeError):
        # The function refuses the probe's sizes, or has no kernel without memory: where the axes are is not known.
        return [None for _ in axes]
    moved = moved[place] if isinstance(moved, tuple | list) else moved
    return [None if axis is None else _found(probe, axis, moved, slices=slices) for axis in axes]


def _is_chosen_by_tensor(args: tuple[Any, ...]) -> bool:
    index = args[1] if len(args) > 1 else None
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(part, Tensor | list) for part in parts)


def _found(probe: Tensor, axis: int, moved: Tensor, *, slices: bool) -> AxisNumber:
    size, stride = probe.shape[axis], probe.stride(axis)
    if size == 1:
        # An axis of size one has no stride of its own. It is searched at its old index, from either end.
        for guess in (axis, axis - probe.dim() + moved.dim()):
            if 0 <= guess < moved.dim() and moved.shape[guess] == 1:
                return guess
        return None
    for guess in range(moved.dim()):
        # (A part of size one may be a new axis, unless it is where the whole was.)
        least = 1 if guess == axis and moved.dim() == probe.dim() else 2
        fits = moved.shape[guess] == size or (slices and least <= moved.shape[guess] < size)
        if fits and moved.stride(guess) == stride:
            return guess
    return None


def _reduced(
    args: tuple[Any, ...], kwargs: dict[str, Any], tensor: Tensor, result: Tensor, axes: Sequence[AxisNumber]
) -> list[AxisNumber] | None:
    dims = reduced_dims(args, kwargs, tensor.dim())
    if dims is None or axes[0] in dims:
        return None
    if result.dim() == tensor.dim():
        return [None if axis in dims else axis for axis in axes]
    return [None if axis is None or axis in dims else axis - sum(dim < axis for dim in dims) for axis in axes]


def reduced_dims(args: tuple[Any, ...], kwargs: dict[str, Any], dims: int) -> set[int] | None:
    given = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else None))
    if given is None or isinstance(given, Tensor | float):
        return None
    chosen = [given] if isinstance(given, int) else list(given)
    return {dim % dims for dim in chosen} if chosen and dims else None


@dataclass(slots=True, eq=False)
class SoftmaxOrigin:
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
    has_keys: Tensor | None = None
    """Whether each of its rows has a score that no mask made low; None if that is not known."""
    calls: list[object] = field(default_factory=list)
    """A token of each attention call made of it."""
    is_of_slots: bool = False
    """True if its weights were divided by their sums over another axis: its queries compete for each key, as slots."""
    is_taken: bool = False
    """True after any product, attention or not."""
    is_refused: bool = False
    is_over_another_axis: bool = False
    went_into: str = ""
    """The last function of the trace."""

    @property
    def keys(self) -> int:
        return self.shape[self.axis]

    def sequences(self) -> Origins | None:
        if not isinstance(self.streams, Origins):
            return None
        return self.streams._replace(queries=Stream("slots")) if self.is_of_slots else self.streams

    @property
    def softmax(self) -> Tensor | None:
        tensor = self.tensor
        return None if tensor is None or counted_version(tensor) != self.version else tensor


@dataclass(slots=True, kw_only=True, eq=False)
class Trace:
    origins: tuple[SoftmaxOrigin, ...] = ()
    depth: int = 0

    def ends_with(self, depth: int) -> bool:
        return self.depth >= depth


@dataclass(slots=True, kw_only=True, eq=False)
class SoftmaxTrace(Trace):
    key: AxisNumber
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
