"""The usual statistics of softmax weights on a GPU by a few kernels, if Triton is installed.

Tiles (`regard.maps.statistics.tiles`) write each block of weights to memory and read it once for each statistic. The
programs of `regard.maps.loop.triton_plan` read it in registers, and allocate nothing of T x S: one pass over the keys
of each query, and one over the queries of each key. Values that are not finite pass into the answers as in tiles;
nothing waits for the device.
"""

import torch
from torch import Tensor

from regard.call.biases.relative import ALiBi
from regard.call.masks.row_spans import RowRanges
from regard.call.normalizations import Softmax, SoftmaxWithSink
from regard.call.scores.base import SoftCapped
from regard.kernels.base import Call
from regard.maps.loop.triton_plan import LOG2_E, CallForm, plan_of, reads_rows
from regard.maps.sources.factors import Factors
from regard.maps.sources.source import Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.asked import Answer, Asked, RowReader
from regard.tensors.guards import has_values, in_forward_mode, in_transform, is_recorded
from regard.tensors.memory import row_contiguous
from regard.tensors.triton_use import card_of, is_interpreted, or_else, runs_triton

NAME = "statistics"
FEWEST_QUERIES = 16
"""A block of the programs has at least so many rows: for fewer queries tiles are faster."""
WIDEST = 256
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


class TritonRows(RowReader):
    """Kernels of our own. In float32 they multiply without tensor cores, and leave sums to calls of a fused kernel."""

    name = "kernels of our own (Triton)"
    devices = frozenset({"cuda", "cpu"} if is_interpreted() else {"cuda"})

    def why_not(self, source: Source, asked: Asked) -> str | None:
        if not runs_triton(source.device, NAME) or in_forward_mode() or in_transform("Vmap", "Jvp", "Grad"):
            return "Triton runs from compute capability 8.0 on, and has no transforms"
        if asked.beyond is not None or asked.chosen:
            return asked.beyond or f"it has no {asked.chosen[0]}"
        factors = source.softmax_factors()
        if factors is None or not source.flat_heads:
            return "it reads the softmax of one call"
        call = factors.form
        if is_recorded() and any(tensor.requires_grad for tensor in source.tensors()):
            return "it has no gradient"
        if (reason := _why_tiles(call)) is not None:
            return reason
        if call.query.dtype == torch.float32 and not any(one.needs_tiles for one in asked.statistics):
            return "in float32 calls of a fused kernel are faster"
        if not all(map(has_values, source.tensors())):
            return "the elements of a tensor cannot be read"
        if _ranges(call) is None:
            return f"under the mask ({call.mask}) the keys of a query are not one range"
        return None

    def read(self, source: Source, asked: Asked) -> list[Answer | None]:
        factors = source.softmax_factors()
        assert factors is not None, "the softmax of one call"
        with torch.no_grad():
            return or_else(NAME, lambda: _read(factors, asked), lambda: [None] * len(asked.statistics))


def _ranges(call: Call) -> RowRanges | None:
    return RowRanges.of(call.mask, call.sizes, call.query.device)


def _why_tiles(call: Call) -> str | None:
    """The reason why the kernels cannot take a call, apart from its mask; None if they can."""
    sizes, score, bias = call.sizes, call.score, call.bias
    inner = score.score if isinstance(score, SoftCapped) else score
    scale = inner.dot_scale(call.query.shape[-1])
    if type(call.normalization) not in (Softmax, SoftmaxWithSink) or scale is None:
        return f"the kernels read a softmax of dot products, not {call.normalization} of {score}"
    if scale <= 0:
        return f"the kernels have no scale of {scale:g}, only one above 0"
    if call.query.dtype not in DTYPES:
        return f"the kernels have no {call.query.dtype}"
    if bias is not None and not isinstance(bias, ALiBi):
        return f"the kernels have no {bias}, only ALiBi"
    if isinstance(call.normalization, SoftmaxWithSink) and call.normalization.is_of_rows:
        return "the kernels have no sink for each query, only for each head"
    if sizes.queries < FEWEST_QUERIES:
        return f"{sizes.queries} queries are fewer than a block of the kernels, {FEWEST_QUERIES}"
    if call.query.shape[-1] > WIDEST:
        return f"a width of {call.query.shape[-1]} is above {WIDEST}"
    return None


def _read(factors: Factors, asked: Asked) -> list[Answer | None]:
    call = factors.call
    ranges = _ranges(call)
    assert ranges is not None, "the keys of a query are one range"
    score, bias = call.score, call.bias
    slopes = bias.slopes if isinstance(bias, ALiBi) and isinstance(bias.slopes, Tensor) else None
    inner = score.score if isinstance(score, SoftCapped) else score
    query, key = (row_contiguous(t) for t in (call.query, call.key))
    width, sinks = query.shape[-1], _sinks(call)
    scale = inner.dot_scale(width)
    assert scale is not None, "it was asked"
    # The program for rows finds their log-sum-exp by the way. A kernel's state of half precision is inexact.
    state_of = factors.state_of if query.dtype == call.compute_dtype else factors.known_state_of
    state = None if reads_rows(asked) else state_of(call)
    form = CallForm(
        sizes=call.sizes, width=width, dtype=query.dtype, strides=CallForm.strides_of(query, key, ranges),
        lower=ranges.lower, upper=ranges.upper, scale=scale,
        cap=score.cap if isinstance(score, SoftCapped) else None,
        slopes=(slopes.stride(0), bias.offset or 0) if isinstance(bias, ALiBi) and slopes is not None else None,
        has_state=state is not None, sinks=None if sinks is None else (sinks.stride(0), sinks.stride(1)),
        card=card_of(query.device), is_interpreted=is_interpreted(),
    )  # fmt: skip
    plan = plan_of(form, asked)
    given: dict[str, Tensor | None] = {
        "query": query,
        "key": key,
        "first": ranges.first,
        "stop": ranges.stop,
        "slopes": slopes,
        "sinks": sinks,
    }
    if ranges.keep is not None:
        given["keep"] = ranges.keep.view(torch.uint8)
    if state is not None:
        # A row without keys has any state; its weights are not visible.
        state = (state.float() * LOG2_E).nan_to_num_(nan=torch.nan, posinf=torch.inf, neginf=0.0)
        given["lse"] = state.contiguous()
    answers = plan.run(query.device, {name: one for name, one in given.items() if one is not None})
    return [_answer(answers, statistic) for statistic in asked.statistics]


def _sinks(call: Call) -> Tensor | None:
    """The sinks (B, H); None for none."""
    if not isinstance(call.normalization, SoftmaxWithSink):
        return None
    sink, query = call.normalization.sink, call.query
    # (A number that was moved to the device would be waited for.)
    sink = sink.to(query.device) if isinstance(sink, Tensor) else torch.full((), sink, device=query.device)
    return (sink[:, None] if sink.dim() == 1 else sink).expand(*query.shape[:2], 1)[..., 0]


def _answer(answers: dict[str, Tensor], statistic: Statistic) -> Answer:
    match statistic:
        case st.Received():
            return (answers["received"],)
        case st.Entropy():
            return (answers["entropy"],)
        case st.Distance():
            return (answers["distance"],)
        case st.Largest():
            return (answers["largest"],)
        case st.ArgLargest():
            return (answers["places"][..., 0],)
        case st.TopWeights(k):
            return answers["values"][..., :k], answers["places"][..., :k]
        case st.Pooled(_, how):
            return (answers[f"pooled_{how}"],)
    raise AssertionError(statistic)
