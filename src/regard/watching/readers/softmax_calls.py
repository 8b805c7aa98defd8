"""Observe the making of weights that sum to 1: a softmax of any kind, or a division by the sum.

Not every softmax is attention (routers and classifiers use it too). Its result is traced: see `traced_calls` for the
functions it goes through, and `product_calls` for the product with values that makes it attention.
"""

import weakref
from typing import Any

from torch import Tensor, nn

from regard.tensors.torch_private import counted_version
from regard.watching.origins.axes import reduced_dims
from regard.watching.origins.provenance import ADDED, MULTIPLIED, SoftmaxOrigin, Trace, is_learned
from regard.watching.readers.contractions import Contraction
from regard.watching.readers.functions import Args, Func, Kwargs, name_of
from regard.watching.readers.product_calls import attended
from regard.watching.readers.traced_calls import after, observe_followed, trace_results
from regard.watching.running.thread_state import ThreadState


@after
def observe_softmax(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """A softmax, whose result may turn out to be attention."""
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
        kind = "logs" if name == "log_softmax" else "weights"
        begin(thread, f"the model's own {name}", result, dim, scores, kind)


def begin(
    thread: ThreadState, how: str, result: Tensor, dim: int, scores: Tensor | None, kind: Any = "weights"
) -> None:
    """Begin to trace weights that sum to 1 along an axis."""
    axis = dim % result.dim()
    channel = None if scores is None or scores.shape != result.shape else thread.traces.is_channel(scores, axis)
    streams = None if scores is None else thread.traces.stream(scores)
    frame = thread.innermost()
    is_weights = kind == "weights"
    tensor, version = (_beside(thread, result), counted_version(result)) if is_weights else (None, None)
    origin = SoftmaxOrigin(how, tuple(result.shape), axis, tensor, version, channel is True, channel is not None,
                    len(thread.stack), thread.innermost_module(), streams, thread.has_compared())  # fmt: skip
    last = result.dim() - 1
    other = last if axis != last else last - 1
    thread.traces.put(result, Trace(kind, (origin,), axis, other, depth=len(thread.stack)))
    if frame is not None and is_weights:
        frame.pending.append(origin)


def _beside(thread: ThreadState, result: Tensor) -> Tensor:
    return result.view_as(result) if any(watch.keeps_graph for watch in thread.watches) else result.detach()


@after
def observe_exponential(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """An exponential. That of a logarithm of weights is weights; any other may be divided by its sum later."""
    trace = thread.traces.of(args[0]) if args else None
    if trace is None or trace.kind != "logs":
        # It may be divided by its sum later.
        if isinstance(result, Tensor) and result.dim() > 1 and result.is_floating_point():
            thread.traces.put(result, Trace("exponentials", of=weakref.ref(result), depth=len(thread.stack)))
        return
    if trace.key is None:
        return
    before = trace.origins[0]
    # The logarithms were not the weights yet: the weights begin here.
    origin = SoftmaxOrigin(before.how, tuple(result.shape), trace.key, _beside(thread, result), counted_version(result),
                    before.is_projected, before.is_projection, before.depth, before.module, before.streams,
                    before.is_compared)  # fmt: skip
    thread.traces.put(result, Trace("weights", (origin,), trace.key, trace.other, trace.is_changed, depth=trace.depth))
    if (frame := thread.innermost()) is not None:
        frame.pending.append(origin)


@after
def observe_sum(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Any) -> None:
    """A sum, whose summand is remembered: elements divided by their own sum are weights."""
    if not (args and isinstance(result, Tensor) and isinstance(args[0], Tensor) and args[0].dim() > 1):
        return
    thread.traces.follow(result, args[0])
    if thread.traces:
        trace_results(thread, func, args, kwargs, result)
    beside = thread.traces.of(result)
    dims = reduced_dims(args, kwargs, args[0].dim())
    trace = thread.traces.of(args[0])
    if trace is not None and trace.kind == "spread" and dims is not None:
        _sum_of_spread(thread, trace, dims, result, args[0])
        return
    if dims is None or len(dims) > 1 or not result.is_floating_point():
        return
    summed = trace.of if trace is not None and trace.kind == "exponentials" else weakref.ref(args[0])
    is_log = name_of(func) == "logsumexp"
    of = weakref.ref(args[0]), summed, is_log
    thread.traces.put(result, Trace("sums", key=dims.pop(), of=of, beside=beside, depth=len(thread.stack)))


def _sum_of_spread(thread: ThreadState, trace: Trace, dims: set[int], result: Tensor, total: Tensor) -> None:
    """Weights times values were summed over the keys: that is a product too."""
    weights, values = trace.of
    if trace.key not in dims or len(dims) > 1:
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
    product = result.squeeze(trace.key) if result.dim() == dim and trace.key is not None else result
    attended(thread, Contraction(tuple(tensors), tuple(labels), output), 0, trace, trace.key, product)


def observe_quotient(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a quotient, an elementwise product or a difference: by its own sum, it makes weights."""
    if not thread.traces:
        result = func(*args, **kwargs)
        thread.traces.follow(result, *args)
        return result
    sums = thread.traces.of(args[1]) if len(args) > 1 else thread.traces.of(kwargs.get("other"))
    numerator = thread.traces.of(args[0]) if args else None
    result = func(*args, **kwargs)
    thread.traces.follow(result, *args)
    if sums is not None and sums.kind == "sums" and isinstance(result, Tensor):
        thread.try_to(_quotient, thread, func, args, kwargs, sums, numerator, result)
    else:
        thread.try_to(trace_results, thread, func, args, kwargs, result)
    return result


def observe_masked(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run a sum or a product of elements, in which scores and a mask of zeros and ones may be."""
    observe, clause = (observe_followed, ADDED) if name_of(func) == "add" else (observe_quotient, MULTIPLIED)
    result = observe(thread, func, args, kwargs)
    thread.try_to(thread.traces.masked, result, clause, *args)
    return result


def _quotient(
    thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, sums: Trace,
    numerator: Trace | None, result: Tensor,
) -> None:  # fmt: skip
    itself, summed, is_log = sums.of
    is_difference = name_of(func) == "sub"
    same = args[0] is itself() or (
        numerator is not None and numerator.kind == "exponentials" and numerator.of is summed
    )
    if not same or is_difference != is_log or sums.key is None or result.dim() <= sums.key:
        trace_results(thread, func, args, kwargs, result)
    elif numerator is not None and numerator.kind == "weights":
        _again(thread, numerator, sums.key, result)
    else:
        how = "the model's own logsumexp" if is_log else "the model's own numbers over their sum"
        begin(thread, how, result, sums.key, None, "logs" if is_log else "weights")


def _again(thread: ThreadState, trace: Trace, axis: int, result: Tensor) -> None:
    """Weights divided by their sum over an axis (in slot attention another than that of the softmax)."""
    other = trace.key if trace.key != axis else trace.other
    for origin in trace.origins:
        origin.is_of_slots |= trace.key != axis
    thread.traces.put(
        result, Trace("weights", trace.origins, axis, other, True, trace.is_product, depth=len(thread.stack))
    )  # fmt: skip
