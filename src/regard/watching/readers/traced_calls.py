"""Follow traced tensors through the functions and the plain modules a model applies to them."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from torch import Tensor

from regard.tensors.torch_private import viewed
from regard.watching.kept.mask_reading import HIDDEN
from regard.watching.origins.traces import (
    MOVES,
    REDUCTIONS,
    SAME_NUMBERS,
    AttentionOutput,
    AxisNumber,
    Exponentials,
    SoftmaxTrace,
    SoftmaxWeights,
    Spread,
    Sums,
    Trace,
    followed,
)
from regard.watching.readers.functions import Args, Func, Kwargs, is_in_place, name_of
from regard.watching.running.observed_call import KeysChosen
from regard.watching.running.thread_state import ThreadState

FOLLOWED = frozenset({
    "add", "contiguous", "clone", "to", "float", "half", "bfloat16", "type_as", "reshape", "flatten", "repeat",
    "repeat_interleave", "layer_norm", "rms_norm", "dropout", "masked_fill", "roll", "flip", "index_select", "gather",
    "__getitem__", "where", "take_along_dim", "clamp", "clip", "clamp_min", "clamp_max", "tanh", "sigmoid", "relu",
    "gelu", "silu", "neg", "abs", "square", "sqrt", "pow", "max", "amax", "mean", "batch_norm", "group_norm",
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "interpolate", "pixel_shuffle", "pixel_unshuffle", "unfold",
    "conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "instance_norm", "leaky_relu", "prelu", "elu", "selu",
    "celu", "softplus", "mish", "hardswish", "hardsigmoid", "hardtanh", "relu6", "log_sigmoid", "glu", "lerp",
    "addcmul", "minimum", "maximum", "log", "sin", "cos", "round", "nan_to_num", "double", "tril", "triu", "empty_like",
    "zeros_like", "ones_like", "rand_like", "randn_like", "rand", "randn",
})  # fmt: skip
"""Functions that make new memory of the same positions, between an input and its queries and keys; or noise."""
JOINED = frozenset({"cat", "concat", "concatenate", "stack"})
WRITES = frozenset({
    "__setitem__", "copy", "index_copy", "index_put", "masked_scatter", "slice_scatter", "index_fill",
})  # fmt: skip
"""Functions that write one tensor into a part of another."""


FunctionObserver = Callable[[ThreadState, Func, Args, Kwargs], Any]
"""Runs a function for the model, hands the call to the thread, and returns the result."""


class NamedFunction(NamedTuple):
    parameters: frozenset[str]
    observe: FunctionObserver


Note = Callable[[ThreadState, Func, Args, Kwargs, Any], None]
"""Looks at a function that has run, and at its result."""


def after(note: Note) -> FunctionObserver:
    def observe(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
        result = func(*args, **kwargs)
        thread.try_to(note, thread, func, args, kwargs, result)
        return result

    return observe


def after_traces(note: Note) -> FunctionObserver:
    def observe(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
        result = observe_traced(thread, func, args, kwargs) if thread.traces else func(*args, **kwargs)
        thread.try_to(note, thread, func, args, kwargs, result)
        return result

    return observe


@after_traces
def observe_followed(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    of = result[0] if isinstance(result, tuple) else result
    # (A view by an index is found by its base, and two inputs of which parts are taken may be one sequence.)
    if isinstance(of, Tensor) and (func is not Tensor.__getitem__ or viewed(of) is None):
        thread.streams.follow(of, *(args or kwargs.values()))


@after
def observe_embedding(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    thread.streams.given(result)
    given = dict(zip(("input", "weight"), args, strict=False)) | kwargs
    thread.embedded(given.get("input"), given.get("weight"))


@after_traces
def observe_choice(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """A topk, which may be a choice of keys by the scores of queries and keys, as an indexer's. A mask hides the keys
    that no query could choose by their scores."""
    scores, module = args[0] if args else None, thread.innermost_module()
    if isinstance(scores, Tensor) and scores.dim() > 2 and thread.has_compared() and module is not None:
        hidden = (scores.detach() <= HIDDEN).flatten(1, -2).all(1)
        thread.chose(module, KeysChosen("", result[1].shape[-1], hidden), scores.shape[-2])


@after_traces
def observe_joined(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """Tensors in a row: a cache puts the new keys last."""
    if args and isinstance(args[0], tuple | list):
        dim: Any = kwargs.get("dim", kwargs.get("axis", args[1] if len(args) > 1 else 0))
        thread.streams.join(result, args[0], dim)


@after_traces
def observe_written(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    thread.streams.follow(args[0] if result is None else result, *reversed(args))


def trace_results(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    if not (result is None or isinstance(result, Tensor | tuple | list)):
        return
    found = [(tensor, trace) for tensor in tensors_in(args, kwargs) if (trace := thread.traces.of(tensor)) is not None]
    if not found:
        return
    name = name_of(func)
    if name in WRITES and args and isinstance(args[0], Tensor):
        # Without an underscore a function makes a new tensor, and leaves the first argument as it is.
        _written_into(thread, result if isinstance(result, Tensor) else args[0], found)
        return
    if is_in_place(func):
        _overwritten(args[0], found)
    results = [result] if isinstance(result, Tensor) else list(result or ())
    for place, one in enumerate(results):
        if isinstance(one, Tensor):
            _follow_one(thread, func, name, args, kwargs, found, one, place)


observe_traced = after(trace_results)


def tensors_in(args: Args, kwargs: Kwargs) -> Iterator[Tensor]:
    for arg in (*args, *kwargs.values()):
        if isinstance(arg, Tensor):
            yield arg
        elif isinstance(arg, list | tuple):
            yield from (part for part in arg if isinstance(part, Tensor))


def _follow_one(
    thread: ThreadState, func: Func, name: str, args: Args, kwargs: Kwargs,
    found: list[tuple[Tensor, Trace]], result: Tensor, place: int,
) -> None:  # fmt: skip
    traces = thread.traces
    tensor, trace = next(((t, one) for t, one in found if isinstance(one, SoftmaxWeights)), found[0])
    if isinstance(trace, Sums):
        # A sum stays the sum with an epsilon, with a bound, inverted, and in any layout.
        if result.numel() == tensor.numel() and len(found) == 1 and result is not tensor:
            traces.put(result, replace(trace, over_heads=None))
    elif isinstance(trace, Exponentials):
        if name not in REDUCTIONS and result.numel() == tensor.numel():
            traces.put(result, trace)
    elif isinstance(trace, AttentionOutput):
        axes = followed(func, name, args, kwargs, tensor, result, (trace.queries,), place)
        if axes is not None and axes[0] is not None:
            traces.put(result, replace(trace, queries=axes[0]))
    elif isinstance(trace, SoftmaxTrace):
        axes = followed(func, name, args, kwargs, tensor, result, (trace.key, trace.other), place)
        if axes is not None:
            others = [one for _, one in found if one is not trace and type(one) is type(trace)]
            keeps_numbers = name in SAME_NUMBERS or (result is tensor and not is_in_place(func))
            made: Trace = _made_of(trace, others, axes, name, keeps_numbers=keeps_numbers)
            if name == "mul" and isinstance(trace, SoftmaxWeights):
                made = _spread(tensor, trace, args, kwargs, result) or made
            traces.put(result, made)


def _made_of(
    trace: SoftmaxTrace, others: Sequence[SoftmaxTrace], axes: Sequence[AxisNumber], name: str, *, keeps_numbers: bool
) -> SoftmaxTrace:
    key, other = axes
    origins = tuple(dict.fromkeys((*trace.origins, *(origin for one in others for origin in one.origins))))
    changed = trace.is_changed or bool(others) or not keeps_numbers
    lost = trace.lost_in or ("" if key is not None else name)
    is_product = trace.is_product or any(one.is_product for one in others)
    return replace(
        trace, origins=origins, key=key, other=other, is_changed=changed, lost_in=lost, is_product=is_product,
        is_moved=trace.is_moved or name in MOVES,
    )  # fmt: skip


def _spread(tensor: Tensor, trace: SoftmaxWeights, args: Args, kwargs: Kwargs, result: Tensor) -> Spread | None:
    """Weights (..., S, 1) times values (..., S, D): a sum over S may follow and make a product."""
    values = next((t for t in tensors_in(args, kwargs) if t is not tensor), None)
    if (key := trace.key) is None or values is None or result.dim() < tensor.dim():
        return None
    from_right = key - tensor.dim()
    if tensor.dim() < -from_right or values.dim() < -from_right or values.shape[from_right] != tensor.shape[from_right]:
        return None
    grown = [n for n in range(from_right + 1, 0) if tensor.shape[n] == 1 and result.shape[n] > 1]
    if not grown or tensor.shape[from_right] < 2:
        return None
    key = result.dim() + from_right
    return Spread(origins=trace.origins, depth=trace.depth, trace=trace, key=key, weights=tensor, values=values)


def _overwritten(target: Any, found: list[tuple[Tensor, Trace]]) -> None:
    for tensor, trace in found:
        if tensor is target:
            for origin in trace.origins:
                if origin.tensor is not None and origin.tensor.is_inference():
                    origin.tensor = None


def _written_into(thread: ThreadState, target: Tensor, found: list[tuple[Tensor, Trace]]) -> None:
    tensor, trace = found[-1]
    if not isinstance(trace, SoftmaxWeights) or tensor is target:
        return
    key = None if trace.key is None else trace.key + target.dim() - tensor.dim()
    known = key if key is not None and 0 <= key < target.dim() else None
    lost = trace.lost_in or ("" if known is not None else "__setitem__")
    thread.traces.put(target, replace(trace, key=known, other=None, is_changed=True, lost_in=lost))
