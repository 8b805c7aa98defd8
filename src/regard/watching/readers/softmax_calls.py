"""Observe the making of weights that sum to 1: a softmax of any kind, or a division by the sum.

Not every softmax is attention (routers and classifiers use it too). Its result is traced: see `traced_calls` for the
functions it goes through, and `product_calls` for the product with values that makes it attention.
"""

import weakref
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard.tensors.guards import is_transformed
from regard.tensors.torch_private import counted_version
from regard.watching.origins.streams import ADDED, HIDES, MULTIPLIED, is_learned
from regard.watching.origins.traces import (
    Exponentials,
    SoftmaxLogs,
    SoftmaxOrigin,
    SoftmaxTrace,
    SoftmaxWeights,
    Spread,
    Sums,
    Trace,
    reduced_dims,
)
from regard.watching.readers.contractions import Contraction
from regard.watching.readers.functions import Args, Func, Kwargs, name_of
from regard.watching.readers.product_calls import attended
from regard.watching.readers.traced_calls import after, observe_followed, trace_results
from regard.watching.running.thread_state import ThreadState


@after
def observe_softmax(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    name = name_of(func)
    scores = args[0] if args else kwargs.get("input", kwargs.get("logits", kwargs.get("self")))
    dim = kwargs.get("dim", args[1] if len(args) > 1 else -1)
    if name == "gumbel_softmax":
        dim = kwargs.get("dim", args[4] if len(args) > 4 else -1)
    if name == "normalize":
        dim = kwargs.get("dim", args[2] if len(args) > 2 else 1)
        if kwargs.get("p", args[1] if len(args) > 1 else 2.0) != 1:
            return
    if not isinstance(dim, int) or not isinstance(scores, Tensor) or isinstance(scores, nn.Parameter):
        return
    if result.dim() == 1 and len(result) > 1 and not is_learned(scores):
        # A row of weights without a dimension of queries is not traced.
        what = f"a {name} over {len(result)} numbers of one dimension"
        if thread.is_in_attention():
            thread.unread(f"{what} was made, which is not followed: give it a dimension of queries, scores[None]")
        else:
            thread.other(f"{what}: one query's attention, a router or classifier?")
    elif result.dim() > 1:
        kind = SoftmaxLogs if name == "log_softmax" else SoftmaxWeights
        begin(thread, f"the model's own {name}", result, dim, scores, kind)


def begin(
    thread: ThreadState, how: str, result: Tensor, dim: int, scores: Tensor | None, kind: type[SoftmaxTrace]
) -> None:
    """Begin to trace weights that sum to 1 along an axis, or their logarithms."""
    axis = dim % result.dim()
    channel = None if scores is None or scores.shape != result.shape else thread.streams.is_channel(scores, axis)
    streams = None if scores is None else thread.streams.stream(scores)
    frame = thread.innermost()
    is_weights = kind is SoftmaxWeights
    tensor, version = (_beside(thread, result), counted_version(result)) if is_weights else (None, None)
    origin = SoftmaxOrigin(how, tuple(result.shape), axis, tensor, version, channel is True, channel is not None,
                    len(thread.stack), thread.innermost_module(), streams, thread.has_compared(),
                    _have_keys(scores, axis))  # fmt: skip
    last = result.dim() - 1
    other = last if axis != last else last - 1
    thread.traces.put(result, kind(origins=(origin,), key=axis, other=other, depth=len(thread.stack)))
    if frame is not None and is_weights:
        frame.pending.append(origin)


def _have_keys(scores: Tensor | None, axis: int) -> Tensor | None:
    if scores is None or scores.is_meta or not scores.numel() or is_transformed():
        return None
    return scores.detach().amax(axis).min() > HIDES


def _beside(thread: ThreadState, result: Tensor) -> Tensor:
    return result.view_as(result) if any(watch.keeps_graph for watch in thread.watches) else result.detach()


@after
def observe_exponential(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """An exponential. That of a logarithm of weights is weights; any other may be divided by its sum later."""
    trace = thread.traces.of(args[0]) if args else None
    if not isinstance(trace, SoftmaxLogs):
        # It may be divided by its sum later.
        if isinstance(result, Tensor) and result.dim() > 1 and result.is_floating_point():
            thread.traces.put(result, Exponentials(of=weakref.ref(result), depth=len(thread.stack)))
        return
    if trace.key is None:
        return
    # The logarithms were not the weights yet: the weights begin here.
    tensor, version = _beside(thread, result), counted_version(result)
    origin = replace(
        trace.origins[0], shape=tuple(result.shape), axis=trace.key, tensor=tensor, version=version, calls=[]
    )
    made = SoftmaxWeights(
        origins=(origin,), key=trace.key, other=trace.other, is_changed=trace.is_changed, depth=trace.depth
    )
    thread.traces.put(result, made)
    if (frame := thread.innermost()) is not None:
        frame.pending.append(origin)


@after
def observe_sum(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """A sum, whose summand is remembered: elements divided by their own sum are weights."""
    if not (args and isinstance(result, Tensor) and isinstance(args[0], Tensor) and args[0].dim() > 1):
        return
    thread.streams.follow(result, args[0])
    if thread.traces:
        trace_results(thread, func, args, kwargs, result)
    over_heads = thread.traces.of(result)
    dims = reduced_dims(args, kwargs, args[0].dim())
    trace = thread.traces.of(args[0])
    if isinstance(trace, Spread) and dims is not None:
        _sum_of_spread(thread, trace, dims, result, args[0])
        return
    if dims is None or len(dims) > 1 or not result.is_floating_point():
        return
    summand = weakref.ref(args[0])
    sums = Sums(
        axis=dims.pop(), summand=summand, made_as=trace.of if isinstance(trace, Exponentials) else summand,
        is_log=name_of(func) == "logsumexp", over_heads=over_heads, depth=len(thread.stack),
    )  # fmt: skip
    thread.traces.put(result, sums)


def _sum_of_spread(thread: ThreadState, spread: Spread, dims: set[int], result: Tensor, total: Tensor) -> None:
    """Weights times values were summed over the keys: that is a product too."""
    weights, values = spread.weights, spread.values
    if spread.key not in dims or len(dims) > 1:
        return
    dim = total.dim()
    tensors, labels = [], []
    for one, beside in ((weights, values), (values, weights)):
        # An axis of size 1 was only there to be broadcast.
        sizes = {dim - beside.dim() + n: size for n, size in enumerate(beside.shape)}
        axes = {dim - one.dim() + n: size for n, size in enumerate(one.shape)}
        kept = [axis for axis, size in axes.items() if size > 1 or sizes.get(axis, 1) == 1]
        tensors.append(one.squeeze([axis - dim for axis in axes if axis not in kept]))
        labels.append(tuple(kept))
    output = tuple(axis for axis in range(dim) if axis not in dims)
    product = result.squeeze(spread.key) if result.dim() == dim else result
    attended(thread, Contraction(tuple(tensors), tuple(labels), output), 0, spread.trace, spread.key, product)


def observe_quotient(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a quotient, an elementwise product or a difference: by its own sum, it makes weights."""
    if not thread.traces:
        result = func(*args, **kwargs)
        thread.streams.follow(result, *args)
        return result
    sums = thread.traces.of(args[1]) if len(args) > 1 else thread.traces.of(kwargs.get("other"))
    numerator = thread.traces.of(args[0]) if args else None
    result = func(*args, **kwargs)
    thread.streams.follow(result, *args)
    if isinstance(sums, Sums) and isinstance(result, Tensor):
        thread.try_to(_quotient, thread, func, args, kwargs, sums, numerator, result)
    else:
        thread.try_to(trace_results, thread, func, args, kwargs, result)
    return result


def observe_masked(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a sum or a product of elements, in which scores and a mask of zeros and ones may be."""
    observe, clause = (observe_followed, ADDED) if name_of(func) == "add" else (observe_quotient, MULTIPLIED)
    result = observe(thread, func, args, kwargs)
    thread.try_to(thread.streams.masked, result, clause, *args)
    return result


def _quotient(
    thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, sums: Sums,
    numerator: Trace | None, result: Tensor,
) -> None:  # fmt: skip
    same = args[0] is sums.summand() or (isinstance(numerator, Exponentials) and numerator.of is sums.made_as)
    if not same or (name_of(func) == "sub") != sums.is_log or result.dim() <= sums.axis:
        trace_results(thread, func, args, kwargs, result)
    elif isinstance(numerator, SoftmaxWeights):
        _again(thread, numerator, sums.axis, result)
    else:
        how = "the model's own logsumexp" if sums.is_log else "the model's own numbers over their sum"
        begin(thread, how, result, sums.axis, None, SoftmaxLogs if sums.is_log else SoftmaxWeights)


def _again(thread: ThreadState, trace: SoftmaxWeights, axis: int, result: Tensor) -> None:
    """Weights divided by their sum over an axis (in slot attention another than that of the softmax)."""
    other = trace.key if trace.key != axis else trace.other
    for origin in trace.origins:
        origin.is_of_slots |= trace.key != axis
    thread.traces.put(
        result,
        replace(trace, key=axis, other=other, is_changed=True, is_moved=False, lost_in="", depth=len(thread.stack)),
    )
