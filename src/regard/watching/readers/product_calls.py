"""Observe products: weights multiplied with values, along the axis on which they sum to 1, are attention.

The left operand is saved, the real multiplier of the values: a mask, a gate, a mix of heads or dropout may come between
the softmax and it.
"""

from dataclasses import replace
from math import prod
from types import SimpleNamespace
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from regard.watching.origins.streams import ADDED, Origins, is_learned
from regard.watching.origins.traces import AttentionOutput, SoftmaxOrigin, SoftmaxWeights, Sums
from regard.watching.readers.contractions import Contraction, read_contraction
from regard.watching.readers.functions import Args, Func, Kwargs, name_of
from regard.watching.readers.heads import AS_DOCUMENTED, OVER_DEPTH, Heads, folded_heads, found_heads
from regard.watching.readers.mixing import follow_convolution, note_convolution, note_product
from regard.watching.readers.traced_calls import trace_results
from regard.watching.readers.written_out import ValueProduct, WrittenOut, judged
from regard.watching.running.thread_state import RunningModule, ThreadState

CHOICES = frozenset({"topk", "gather", "sort", "index_select", "take_along_dim", "kthvalue", "__getitem__"})

PlacedWeights = list[tuple[int, SoftmaxWeights]]
"""The traces of operands of weights, each with the operand's place."""


def observe_product(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    result = func(*args, **kwargs)
    if thread.traces:
        thread.try_to(_multiplied, thread, func, args, kwargs, result)
    if isinstance(result, Tensor):
        _made(thread, func, args, result)
    frame = None if any(isinstance(arg, nn.Parameter) for arg in args) else thread.innermost()
    if frame is not None and not frame.mixes:
        thread.try_to(note_product, thread, frame, read_contraction(name_of(func), args, kwargs))
    return result


def _made(thread: ThreadState, func: Func, args: Args, result: Tensor) -> None:
    tensors = [arg for arg in args if isinstance(arg, Tensor)]
    given = tensors[:1] if func is F.linear else [one for one in tensors if not is_learned(one)]
    if len(given) < len(tensors) and not thread.streams.is_over_depth(tensors[0], tensors[-1]):
        thread.streams.projected(result, channels_last=True, of=given[0] if given else None)
    elif len(tensors) > 1 and thread.streams.stream(result) is None:
        thread.streams.compare(result, *tensors[-2:])
        if name_of(func) in ("baddbmm", "addmm"):
            thread.try_to(thread.streams.masked, result, ADDED, tensors[0])


def observe_plain(thread: ThreadState, module: nn.Module, args: Args, output: Any) -> None:
    """Follow a plain module that ran without our mode: note projections, and trace its output."""
    of = args[0] if args else None
    if isinstance(module, nn.Linear):
        thread.streams.projected(output, channels_last=True, of=of)
    elif isinstance(module, nn.Conv1d | nn.Conv2d):
        thread.try_to(follow_convolution, thread, output, of)
        thread.try_to(note_convolution, thread, module, of, module.kernel_size, module.stride)
    elif args:
        thread.streams.follow(output, of)
        if isinstance(module, nn.Embedding):
            thread.embedded(of, module.weight)
    if not thread.traces.alive or not args or thread.traces.of(args[0]) is None:
        return
    if isinstance(module, nn.Linear):
        thread.try_to(_multiplied, thread, F.linear, (args[0], module.weight, module.bias), {}, output)
    else:
        name = "Identity" if isinstance(module, nn.Identity) else f"{type(module).__name__}()"
        function: Any = SimpleNamespace(__name__=name)  # (stands for that of the module)
        thread.try_to(trace_results, thread, function, args, {}, output)


def _multiplied(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs, result: Tensor) -> None:
    contraction = read_contraction(name_of(func), args, kwargs)
    if contraction is None:
        trace_results(thread, func, args, kwargs, result)
        return
    found = [(n, thread.traces.of(t)) for n, t in enumerate(contraction.operands)]
    traced = [(n, trace.over_heads or trace if isinstance(trace, Sums) else trace) for n, trace in found]
    weights = [(n, trace) for n, trace in traced if isinstance(trace, SoftmaxWeights)]
    for n, trace in traced:
        if isinstance(trace, AttentionOutput):
            _output_multiplied(thread, contraction, n, trace, weights)
    if len(weights) > 1:
        _several(thread, contraction, weights, result)
    elif weights:
        _one(thread, contraction, *weights[0], result)


def _several(thread: ThreadState, contraction: Contraction, weights: PlacedWeights, result: Tensor) -> None:
    """Weights times weights: the result maps the first's queries to the last's keys."""
    origins = tuple(dict.fromkeys(origin for _, trace in weights for origin in trace.origins))
    summed = any(label not in contraction.output for n, _ in weights for label in contraction.labels[n])
    for origin in origins:
        origin.is_taken = True
    n, trace = weights[-1]
    label = None if trace.key is None else contraction.labels[n][trace.key]
    key = contraction.output.index(label) if label in contraction.output else None
    made = SoftmaxWeights(
        origins=origins, key=key, other=None, is_changed=True, is_product=summed or trace.is_product,
        lost_in="" if key is not None else "a product of weights", depth=len(thread.stack),
    )  # fmt: skip
    thread.traces.put(result, made)


def _one(thread: ThreadState, contraction: Contraction, n: int, trace: SoftmaxWeights, result: Tensor) -> None:
    labels = contraction.labels[n]
    if trace.key is None:
        if trace.is_product:
            _name(thread, trace, PRODUCT.format(len(trace.origins)))
        else:
            _lost(thread, contraction, n, trace)
        return
    label = labels[trace.key]
    others = [m for m, own in enumerate(contraction.labels) if m != n and label in own]
    if label not in contraction.output:
        if others:
            attended(thread, contraction, n, trace, label, result)
        return
    across = None if trace.other is None else labels[trace.other]
    values = [m for m, own in enumerate(contraction.labels) if m != n and across is not None and across in own]
    if across is not None and across not in contraction.output and values:
        operand = contraction.operands[values[0]]
        is_new = any(own not in labels and own in contraction.output for own in contraction.labels[values[0]])
        if is_new and not is_learned(operand) and _is_pair(trace):
            attended(thread, contraction, n, trace, across, result, across=True)
            return
    # A sum over any other axis mixes heads: the result is still made of weights.
    if trace.origins[0].is_compared and _takes_values(contraction, n):
        trace.origins[0].is_over_another_axis = True
    key = contraction.output.index(label)
    other = contraction.output.index(across) if across in contraction.output else None
    thread.traces.put(result, replace(trace, key=key, other=other, is_changed=True, depth=len(thread.stack)))


def _takes_values(contraction: Contraction, n: int) -> bool:
    labels = contraction.labels[n]
    return labels[-1] not in contraction.output and any(
        labels[-1] in own
        and not is_learned(contraction.operands[m])
        and set(contraction.output) & (set(own) - set(labels))
        for m, own in enumerate(contraction.labels)
        if m != n
    )


def _is_pair(trace: SoftmaxWeights) -> bool:
    """True if the other axis is that of the queries: known only next to that of the keys."""
    origin = trace.origins[0]
    return origin.axis >= len(origin.shape) - 2 and len(trace.origins) == 1


PRODUCT = (
    "the product of {} softmaxes, which goes through landmarks (a low-rank attention): no weights of positions on "
    "positions are formed"
)


def attended(
    thread: ThreadState, contraction: Contraction, n: int, trace: SoftmaxWeights, label: object, result: Tensor, *,
    across: bool = False,
) -> None:  # fmt: skip
    """Weights times values: pass the call to the watches, unless it is no attention."""
    if trace.is_product:
        _name(thread, trace, PRODUCT.format(len(trace.origins)))
        return
    product = ValueProduct.of(contraction, n, label)
    if product is None or _is_repeated(trace, product, contraction, thread):
        return
    verdict = judged(thread, product, trace)
    if verdict.reason:
        _name(thread, trace, verdict.reason)
        return
    origin, product = trace.origins[0], product.unfold(trace)
    softmax, notes = _softmax_of(trace, product), list(verdict.notes)
    if len(trace.origins) > 1:
        notes.append(f"these weights were made of {len(trace.origins)} softmaxes, which were not kept")
    elif trace.is_changed and softmax is None:
        notes.append("the softmax that these weights were made of was overwritten, and was not kept")
    is_part = prod(origin.shape) > product.weights.numel()
    if is_part and product.keys >= origin.keys:
        notes.append(f"a part of a softmax {tuple(origin.shape)}")
    if across:
        origin.is_of_slots = True
        notes.append("the softmax ran over the queries: the columns of its weights sum to 1, not the rows")
    # (Slots compete for keys so; the tokens of one sequence do not.)
    is_own = across and isinstance(origin.streams, Origins) and origin.streams.crosses is False
    how, origins = f"{origin.how}, T x S weights kept", origin.sequences()
    over_depth = origins is not None and origins.keys.sort == "layers"
    heads = OVER_DEPTH if over_depth else _heads_of(thread, product)
    call = WrittenOut(product, result, softmax, origin.how, how, tuple(notes), heads, origins, is_own, is_part)
    call.has_keys = origin.has_keys if len(trace.origins) == 1 else None
    thread.give(call)
    for one in trace.origins:
        one.is_taken = True
        one.calls.append(call.token)
    if over_depth:
        thread.streams.follow(result, product.values)  # (It mixes no positions.)
    elif origins is not None:
        thread.streams.carry(result, origins.queries)
    query = product.query_label
    if query is not None and query in contraction.output:
        certain = not origin.is_projection and product.queries == product.keys
        made = AttentionOutput(
            origins=trace.origins, queries=contraction.output.index(query), token=call.token, is_certain=certain,
            depth=len(thread.stack),
        )  # fmt: skip
        thread.traces.put(result, made)


def _heads_of(thread: ThreadState, product: ValueProduct) -> Heads:
    weights, values = product.laid_out(product.weights), product.laid_out_values()
    leading = weights.shape[:-2]
    if len(leading) > 1:
        return found_heads(thread, () if values is None else (values,), leading)
    is_alike = len(leading) == 1 and values is not None and values.shape[:-1] == (*leading, weights.shape[-1])
    return folded_heads(values) if is_alike and values is not None else AS_DOCUMENTED


def _is_repeated(trace: SoftmaxWeights, product: ValueProduct, contraction: Contraction, thread: ThreadState) -> bool:
    origin = trace.origins[0]
    if not origin.calls:
        return False
    if product.keys < origin.keys:
        _refuse_blocks(thread, trace.origins)
        return True
    return product.weights.numel() >= prod(origin.shape)


def _softmax_of(trace: SoftmaxWeights, product: ValueProduct) -> Tensor | None:
    if not trace.is_changed or len(trace.origins) > 1:
        return None
    origin = trace.origins[0]
    softmax = origin.softmax
    if softmax is None:
        return None
    if product.unfolded and softmax.shape[:-2] == product.unfolded:
        return softmax
    if softmax.shape == product.weights.shape and (not trace.is_moved or product.order[-1] == origin.axis):
        return product.laid_out(softmax)
    last = softmax.dim() - 1
    return softmax.movedim((last - 1 if origin.axis == last else last, origin.axis), (-2, -1))


def _lost(thread: ThreadState, contraction: Contraction, n: int, trace: SoftmaxWeights) -> None:
    """Weights with split keys were multiplied: attention in blocks, or a router's choice."""
    if all(is_learned(t) for m, t in enumerate(contraction.operands) if m != n):
        return
    if any(origin.calls for origin in trace.origins):
        return
    if trace.lost_in in CHOICES and not thread.is_in_attention():
        for origin in trace.origins:
            origin.went_into = trace.lost_in
        return
    _refuse_blocks(thread, trace.origins, f" after {trace.lost_in}" if trace.lost_in else "")


def _refuse_blocks(thread: ThreadState, origins: tuple[SoftmaxOrigin, ...], after: str = "") -> None:
    if (frame := thread.innermost()) is not None:
        frame.is_in_blocks = True
    for origin in origins:
        if not origin.is_refused:
            origin.is_taken = origin.is_refused = True
            shape = tuple(origin.shape)
            thread.unread(f"a softmax {shape} that is not multiplied with values as it stands{after} (in blocks?)")


def _name(thread: ThreadState, trace: SoftmaxWeights, reason: str) -> None:
    for origin in trace.origins:
        origin.is_taken = True
    thread.other(reason)


def _output_multiplied(
    thread: ThreadState,
    contraction: Contraction,
    n: int,
    output: AttentionOutput,
    weights: PlacedWeights,
) -> None:
    """An attention's output summed over its queries: these were landmarks, not positions."""
    label = contraction.labels[n][output.queries]
    if label in contraction.output:
        return
    others = [own for m, own in enumerate(contraction.labels) if m != n and label in own]
    learned = any(is_learned(t) for m, t in enumerate(contraction.operands) if m != n)
    if not others or output.is_certain or learned:
        return
    thread.withdraw(output.token, LOW_RANK)
    for _, found in weights:
        found.is_product = True
        found.origins = tuple(dict.fromkeys((*found.origins, *output.origins)))


LOW_RANK = (
    "weights whose output another product sums over at once, as linear and landmark attention do: their queries are "
    "features or landmarks, not positions"
)


def close(thread: ThreadState, frame: RunningModule) -> None:
    """Report the softmaxes of an ended module, if no living tensor is made of them, and no product used them. Surviving
    ones belong to the module around it."""
    outer = thread.stack[-2] if len(thread.stack) > 1 else None
    for origin in frame.pending:
        if origin.is_taken:
            origin.tensor = None
        elif outer is not None and thread.traces.is_alive(origin):
            outer.pending.append(origin)
        else:
            _report(thread, origin)
    if frame.is_in_blocks:
        thread.refuse(frame, "one softmax of several that the module attends by, in blocks")
    thread.traces.leave(len(thread.stack))


OVER_ANOTHER_AXIS = "the softmax ran over axis"
"""The beginning of the reason for weights that sum to 1 over heads, or over the sequences of a batch."""


def _report(thread: ThreadState, origin: SoftmaxOrigin) -> None:
    origin.tensor = None
    if thread.is_in_attention() or (origin.is_projection and not origin.is_projected):
        after = f"; it went into {origin.went_into}" if origin.went_into else ""
        shape = tuple(origin.shape)
        if origin.is_over_another_axis:
            thread.unread(f"{OVER_ANOTHER_AXIS} {origin.axis} of scores {shape}, not over the keys", origin.module)
        else:
            thread.unread(f"a softmax {shape} that no product with values took up{after}", origin.module)
    else:
        after = f" ({origin.went_into} took some of it)" if origin.went_into else ""
        thread.other(
            f"a softmax over {origin.keys} that multiplied nothing{after}: a router or classifier?", origin.module
        )
