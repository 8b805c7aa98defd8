"""The call itself: its softmax, its dropout, its mask as a number, its sink and its scale."""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.call.scores.base import ScaledDot
from regard.call.shapes import take
from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.breach import breach
from regard.watching.checks.finding import Finding
from regard.watching.checks.rules.base import CallRule
from regard.watching.checks.told import IDS, place
from regard.watching.kept.mask_reading import HIDDEN


class SoftmaxRule(CallRule):
    """Do the weights of each query sum to 1, over the keys?"""

    name: ClassVar = "softmax"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        if call.call.is_over_queries:
            yield Finding(
                "softmax over the wrong axis", "error",
                "the softmax ran over the queries: the columns of its weights sum to 1, not the rows",
                cause="softmax(dim=-2), or scores with keys before queries", remedy="softmax(dim=-1) over the keys",
            )  # fmt: skip
        elif (told := _over_sequences(call)) is not None:
            yield Finding(
                "softmax over the wrong axis", "error",
                f"the sequences of the batch attend to each other: the kernel got {call.sizes.flat_batch} sequences of "
                f"{call.sizes.queries} tokens, and {told} has {call.sizes.queries} of {call.sizes.flat_batch}",
                cause="nn.MultiheadAttention takes (T, B, D) unless it is made with batch_first=True, or axes were "
                "exchanged", remedy="batch_first=True",
            )  # fmt: skip
        elif (rate := _dropped(call)) is not None and call.call.is_evaluated:
            yield Finding(
                "dropout in evaluation", "error",
                f"the weights were dropped with {rate:.2g}, and the model is in evaluation mode",
                numbers={"rate": rate},
                cause="a part of it is in training mode, or the rate is handed over without asking for the mode",
                remedy="dropout_p = p if self.training else 0.0; model.eval() last of all",
            )  # fmt: skip
        elif (share := _equal_rows(call)) is not None:
            yield Finding(
                "row sums", "warning",
                f"every query has the same weights, and those of its softmax differ by up to {share:.2g}",
                numbers={"difference": share}, cause="the weights were averaged over the queries",
                remedy="leave the axis of queries as it is",
            )  # fmt: skip
        elif (found := _off_sum(call)) is not None:
            sequence, head, query, total = found
            yield Finding(
                "row sums", "warning",
                f"the weights of query {query} of sequence {sequence}, head {head}, sum to {total:.3g}, not to 1",
                numbers={"sum": total}, cause="the weights were changed after the softmax, as by a mask",
                remedy="hide keys before the softmax",
            )  # fmt: skip


def _over_sequences(call: AuditedCall) -> str | None:
    """The ids whose sequences are the keys of a call, and whose tokens are its batch; None if there are none."""
    batch, queries, keys = call.sizes.flat_batch, call.sizes.queries, call.sizes.keys
    if batch == queries or queries != keys or call.offset != 0:
        return None
    for frame in call.call.arguments:
        for name in IDS:
            ids = frame.read(name)
            if ids is not None and ids.dim() == 2 and not ids.is_floating_point():
                return place(frame, name) if ids.shape == (queries, batch) else None
    return None


def _dropped(call: AuditedCall) -> float | None:
    """The rate of dropout: that of the kernel, or of written-out weights, which are 0 or the softmax over 1 - rate."""
    if call.call.dropout:
        return call.call.dropout
    softmax = call.call.softmax
    if softmax is None or softmax.shape != call.weights.shape:
        return None
    rows = range(min(call.sizes.queries, 64))
    made, now = call.block(rows, softmax), call.block(rows)
    large = made > 1e-4
    zero = large & (now == 0)
    ratio = (now / made)[large & ~zero]
    if not bool(zero.any()) or not ratio.numel() or not float(ratio.min()) > 1 + 1e-3:
        return None
    return 1 - 1 / float(ratio.mean()) if float(ratio.max() - ratio.min()) < 1e-2 * float(ratio.mean()) else None


def _equal_rows(call: AuditedCall) -> float | None:
    """The largest difference between rows of a softmax whose weights were made equal in all rows; None for others."""
    softmax = call.call.softmax
    if softmax is None or softmax.shape != call.weights.shape or call.sizes.queries < 3 or call.sizes.keys < 3:
        return None
    rows = range(min(call.sizes.queries, 64))
    made, now = call.block(rows, softmax), call.block(rows)
    differ = float((made - made[:, :, :1]).abs().max())
    return differ if differ > 1e-3 and float((now - now[:, :, :1]).abs().max()) < 1e-6 else None


def _off_sum(call: AuditedCall) -> tuple[int, int, int, float] | None:
    """The row of a softmax of the model's own whose weights do not sum to 1; None if all do."""
    if not call.call.is_stored or call.call.softmax is None or call.call.dropout:
        return None
    made = call.call.softmax
    if made.shape != call.weights.shape:
        return None
    for rows in call.chunks():
        block, before = call.block(rows), call.block(rows, made)
        # (A sink has its part of a row, and weights multiplied by a gate have signs or scales of their own.)
        is_masked = ((block == 0) | ((block - before).abs() <= 1e-6)).all() & ((block == 0) & (before > 1e-3)).any()
        off = (block.sum(-1) - before.sum(-1)).abs() > 1e-3
        off = off & call.live[..., rows.start : rows.stop] & call.real_queries[:, None, rows.start : rows.stop]
        if bool(is_masked) and bool(off.any()):
            at = [int(n) for n in off.nonzero()[0]]
            return at[0], at[1], at[2] + rows.start, float(block[tuple(at)].sum())
    return None


class AddedMaskRule(CallRule):
    """Does a mask hide the keys that it names?"""

    name: ClassVar = "hiding"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        factors, added, sizes = call.call.factors, call.facts.mask.added, call.sizes
        if _later_are_constant(call):
            yield Finding(
                "mask added", "error", "in each row all later keys have the same weight, which is not 0: their scores "
                "were replaced by one number, which hides nothing",
                cause="masked_fill with a number such as 0 or -1", remedy="masked_fill with -inf",
            )  # fmt: skip
            return
        bias = None if factors is None else factors.call.bias
        # (Beside a mask that hides, two numbers may be a bias.)
        hides = isinstance(bias, DenseBias) and bool((bias.tensor <= HIDDEN).any())
        if (added.startswith("0 and 1 are added") or "multiplied" in added) and not hides:
            yield Finding(
                "mask added", "error", f"{added}: a mask of zeros and ones changes scores a little, and hides nothing",
                cause="a mask of zeros and ones was used as if it were an additive one",
                remedy="scores.masked_fill(mask == 0, -inf), or hand it over as bool",
            )  # fmt: skip
            return
        if factors is None and added.startswith("0 and -"):
            yield Finding(
                "hidden by a finite number", "warning", f"{added}, and every query sees every key: it hides nothing",
                cause="the number of the mask is no larger than scores are",
                remedy="hide with -inf, or torch.finfo(dtype).min",
            )  # fmt: skip
        if factors is None or not isinstance(bias, DenseBias):
            return
        tensor = bias.tensor.detach()
        low = float(tensor.min())
        if -HIDING_FROM < low < 0 and added and _is_of_later(call, tensor, low):
            yield Finding(
                "mask added", "error", f"{added}, the second to the later keys: it changes scores a little, and hides "
                "nothing", cause="a causal mask of a small number", remedy="hide with -inf, or torch.finfo(dtype).min",
            )  # fmt: skip
            return
        # A learned or a relative bias has many values; a mask of a finite number has two.
        if not -HIDING_FROM >= low > HIDDEN or not bool(((tensor == low) | (tensor == 0) | (tensor <= HIDDEN)).all()):
            return

        def hidden(rows: range) -> Tensor:
            vectors = {"query": take(factors.call.query, rows), "key": factors.call.key}
            return (bias.block(rows, range(sizes.keys), **vectors, sizes=sizes) == low).all(1)

        found = breach(call, hidden, of="that the mask should hide")
        if found is not None:
            yield Finding(
                "hidden by a finite number", "error",
                f"{found.share:.2%} of the weight is on keys that {low:g} should hide",
                numbers={"share": found.share, "number": low}, example=found.example,
                cause="scores are as large as the number", remedy="hide with -inf, or torch.finfo(dtype).min",
            )  # fmt: skip


def _is_of_later(call: AuditedCall, bias: Tensor, low: float) -> bool:
    """True if a bias (..., T, S) has this number at all later keys, and at no others."""
    if call.offset is None or bias.shape[-2:] != (call.sizes.queries, call.sizes.keys) or call.sizes.queries < 3:
        return False
    return bool(((bias == low) == (call.back(range(call.sizes.queries), call.offset) < 0)).all())


def _later_are_constant(call: AuditedCall) -> bool:
    """True if the weights on later keys are one number in each row, and those on earlier ones are not."""
    queries, keys = call.sizes.queries, call.sizes.keys
    if not call.call.is_stored or call.offset != 0 or queries != keys or queries < FEWEST_ROWS:
        return False
    rows = range(2, min(queries, 64) - 2)
    block = call.block(rows)
    later = call.back(rows, 0) < 0
    top, low = block.masked_fill(~later, -torch.inf).amax(-1), block.masked_fill(~later, torch.inf).amin(-1)
    earlier = block.masked_fill(later, -torch.inf).amax(-1) - block.masked_fill(later, torch.inf).amin(-1)
    return bool(((top == low) & (low > 0)).all()) and bool((earlier > 1e-6).all())


FEWEST_ROWS = 6
"""The fewest rows in which equal weights are no chance."""
HIDING_FROM = 5.0
"""The least size of a number that is taken for one that should hide."""


NO_SINK = "the kernel did not get the sinks, or they are far below every score"
HAND_SINKS = "hand the sinks to the kernel (s_aux), or load them from the checkpoint"


class SinkRule(CallRule):
    """Does a learned sink take part in the softmax?"""

    name: ClassVar = "sink"

    def why_not(self, call: AuditedCall) -> str:
        if sinks_of(call.module, call.sizes.heads) is None:
            return "it has no learned sink, as far as is known"
        is_free = call.call.is_stored and not call.call.is_part
        return "its own softmax has no sink, which may scale the output afterwards: regard.check tries it" * is_free

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        if not call.is_attention:
            return
        rows = range(max(0, call.sizes.queries - 64), call.sizes.queries)
        taken = 1 - call.block(rows).sum(-1)
        counted = taken[(call.real_queries[:, None, rows.start :] & call.live[..., rows.start :]).expand_as(taken)]
        if counted.numel() and float(counted.max()) < 1e-6:
            yield Finding(
                "sink", "error" if call.call.is_part else "warning",
                "its learned sinks take no weight: every row sums to 1 without them",
                numbers={"largest": float(counted.max())},
                cause=NO_SINK, remedy=HAND_SINKS,
            )  # fmt: skip


def sinks_of(module: torch.nn.Module | None, heads: int) -> torch.nn.Parameter | None:
    for name in ("sinks", "sink", "attention_sink"):
        found = getattr(module, name, None)
        if isinstance(found, torch.nn.Parameter) and found.numel() == heads:
            return found
    return None


class ScaleRule(CallRule):
    """Are scores scaled by one over the root of the dimension?"""

    name: ClassVar = "scale"

    def why_not(self, call: AuditedCall) -> str:
        factors = call.call.factors
        if factors is None or not isinstance(factors.call.score, ScaledDot):
            return "its weights tell no scale"
        return ""

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        factors = call.call.factors
        assert factors is not None
        scale, dim = getattr(factors.call.score, "scale", None), factors.call.query.shape[-1]
        if scale is not None and abs(float(scale) * math.sqrt(dim) - 1) > 1e-3:
            yield Finding(
                "scale", "info", f"its scores are scaled by {float(scale):.4g}; 1/sqrt({dim}) is {dim**-0.5:.4g}",
                numbers={"scale": float(scale)}, remedy="right if the model is made for it, as T5 and Gemma are",
            )  # fmt: skip
