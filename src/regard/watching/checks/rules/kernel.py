"""The call itself: its rows, its softmax, its dropout, its mask as a number, its sink and its scale."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.call.scores.base import ScaledDot
from regard.call.shapes import take
from regard.watching.checks.audited_call import AuditedCall, NotAsked, need
from regard.watching.checks.breach import LEAST, breach
from regard.watching.checks.finding import Finding
from regard.watching.checks.told import IDS, arguments
from regard.watching.kept.mask_reading import HIDDEN

SINK = 0.2
"""A weight on the first key above this is a sink's."""


def is_finite(call: AuditedCall) -> bool:
    facts = call.facts
    return not facts.fault and not any(share is not None and math.isnan(share) for share in (facts.later, facts.first))


def numbers_rule(call: AuditedCall) -> Iterator[Finding]:
    if call.facts.fault:
        yield Finding("recurrence", "error", call.facts.fault)
    elif not is_finite(call):
        remedy = "look at the inputs and at rows without a key"
        yield Finding("not finite", "error", "its weights are not numbers", remedy=remedy)


def rows_without_a_key_rule(call: AuditedCall) -> Iterator[Finding]:
    facts, keep, queries = call.facts, call.keep, call.sizes.queries
    if not facts.no_key or facts.mask.pattern == "inverted":
        return
    first = facts.mask.offset if call.offset is None else call.offset
    real = call.real_queries
    if keep is not None and call.offset is None:
        real = torch.zeros_like(real)  # Which of the queries are padding is not known.
    elif keep is None and 0 <= first <= call.sizes.keys - queries:
        # A sequence without any visible key is no padding.
        is_blind = ~call.seen_keys.any(-1, keepdim=True) & call.is_exact
        real = call.seen_keys[:, first : first + queries] | is_blind
    numbers = {"rows": float(facts.no_key), "of": float(facts.rows)}
    rows = f"{facts.no_key} of {facts.rows} rows have no key"
    if not bool((real & (~call.live).any(1)).any()):
        yield Finding(
            "no key", "info",
            f"{rows}, all of them of padding or at hidden keys: their weights are 0, and their output means nothing",
            numbers=numbers,
        )  # fmt: skip
    elif call.is_exact or keep is not None:  # (Weights of 0 may be a choice, as of one group for each key.)
        yield Finding(
            "no key", "warning" if keep is None else "error",
            f"{rows}, rows of real tokens among them, and the mask that arrived is {facts.mask}: their output is 0, "
            "NaN or an even mean, as the kernel likes",
            numbers=numbers, remedy="let each row see itself",
        )  # fmt: skip


def choice_of_keys_rule(call: AuditedCall) -> Iterator[Finding]:
    choice = call.facts.choice
    if choice is None:
        raise NotAsked("no keys were chosen")
    if not choice.without_first:
        return
    # (Softmax attention often rests on the first key, a sink.)
    weight = "" if choice.first is None else f", where all causal keys would give it {choice.first:.1%} of the weight"
    is_sink = choice.first is not None and choice.first > SINK
    numbers = {"rows": choice.without_first} | ({} if choice.first is None else {"weight": choice.first})
    yield Finding(
        "first key dropped", "warning" if is_sink else "info",
        f"{choice.without_first:.1%} of the rows that choose leave out the first key{weight}",
        numbers=numbers, remedy="keep the first key in every choice" if is_sink else "right if it is no sink",
    )  # fmt: skip


def softmax_rule(call: AuditedCall) -> Iterator[Finding]:
    need(call.is_attention, "it is no attention over positions")
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
    else:
        yield from _changed_weights(call)


def _over_sequences(call: AuditedCall) -> str | None:
    """The ids whose sequences are the keys of a call, and whose tokens are its batch; None if there are none."""
    batch, queries, keys = call.sizes.flat_batch, call.sizes.queries, call.sizes.keys
    if batch == queries or queries != keys or call.offset != 0:
        return None
    for one in arguments(call.call):
        if one.name in IDS and one.values.dim() == 2 and not one.values.is_floating_point():
            return one.told().source if one.values.shape == (queries, batch) else None
    return None


def _made_and_used(call: AuditedCall) -> Iterator[tuple[range, Tensor, Tensor]]:
    """The rows of a softmax of the model's own, and its weights as they were used, (B, H, rows, S) each."""
    softmax = call.call.softmax
    for rows in call.chunks() if softmax is not None and softmax.shape == call.weights.shape else ():
        yield rows, call.block(rows, softmax), call.block(rows)


def _dropped(call: AuditedCall) -> float | None:
    """The rate of dropout: that of the kernel, or of written-out weights, which are 0 or the softmax over 1 - rate."""
    if call.call.dropout:
        return call.call.dropout
    for _, made, used in _made_and_used(call):
        large = made > 1e-4
        ratio = (used / made)[large & (used != 0)]
        if len(ratio) == int(large.sum()) or not ratio.numel() or not float(ratio.min()) > 1 + 1e-3:
            return None
        return 1 - 1 / float(ratio.mean()) if float(ratio.max() - ratio.min()) < 1e-2 * float(ratio.mean()) else None
    return None


def _changed_weights(call: AuditedCall) -> Iterator[Finding]:
    """A softmax of the model's own whose weights were made equal in all rows, or hidden in some, afterwards."""
    for rows, made, used in _made_and_used(call):
        differ = float((made - made[:, :, :1]).abs().max())
        if min(made.shape[-2:]) >= 3 and differ > 1e-3 and float((used - used[:, :, :1]).abs().max()) < 1e-6:
            yield Finding(
                "row sums", "warning",
                f"every query has the same weights, and those of its softmax differ by up to {differ:.2g}",
                numbers={"difference": differ}, cause="the weights were averaged over the queries",
                remedy="leave the axis of queries as it is",
            )  # fmt: skip
            return
        if not call.call.is_stored or call.call.dropout:
            return
        # (A sink has its part of a row, and weights multiplied by a gate have signs or scales of their own.)
        is_masked = ((used == 0) | ((used - made).abs() <= 1e-6)).all() & ((used == 0) & (made > 1e-3)).any()
        real = (call.live & call.real_queries[:, None])[..., rows.start : rows.stop]
        off = ((used.sum(-1) - made.sum(-1)).abs() > 1e-3) & real
        if bool(is_masked) and bool(off.any()):
            sequence, head, query = (int(n) for n in off.nonzero()[0])
            total = float(used[sequence, head, query].sum())
            yield Finding(
                "row sums", "warning",
                f"the weights of query {query + rows.start} of sequence {sequence}, head {head}, sum to {total:.3g}, "
                "not to 1",
                numbers={"sum": total}, cause="the weights were changed after the softmax, as by a mask",
                remedy="hide keys before the softmax",
            )  # fmt: skip
            return


def hiding_rule(call: AuditedCall) -> Iterator[Finding]:
    need(call.is_attention, "it is no attention over positions")
    factors, added, keys = call.call.factors, call.facts.mask.added, range(call.sizes.keys)
    hide = "hide with -inf, or torch.finfo(dtype).min"
    bias = None if factors is None else factors.call.bias
    tensor = bias.tensor.detach() if isinstance(bias, DenseBias) else None
    # (Beside a mask that hides, two numbers may be a bias.)
    hides = tensor is not None and bool((tensor <= HIDDEN).any())
    if _later_are_constant(call):
        yield Finding(
            "mask added", "error", "in each row all later keys have the same weight, which is not 0: their scores "
            "were replaced by one number, which hides nothing",
            cause="masked_fill with a number such as 0 or -1", remedy="masked_fill with -inf",
        )  # fmt: skip
    elif (added.startswith("0 and 1 are added") or "multiplied" in added) and not hides:
        yield Finding(
            "mask added", "error", f"{added}: a mask of zeros and ones changes scores a little, and hides nothing",
            cause="a mask of zeros and ones was used as if it were an additive one",
            remedy="scores.masked_fill(mask == 0, -inf), or hand it over as bool",
        )  # fmt: skip
    elif factors is None and added.startswith("0 and -") and _least_weight(call) * len(keys) > LEAST:
        yield Finding(
            "hidden by a finite number", "warning", f"{added}, and every query sees every key: it hides nothing",
            cause="the number of the mask is no larger than scores are", remedy=hide,
        )  # fmt: skip
    if factors is None or bias is None or tensor is None:
        return
    low = float(tensor.min())
    # A learned or a relative bias has many values; a mask of a finite number has two.
    is_of_two = HIDDEN < low < 0 and bool(((tensor == low) | (tensor == 0)).all())
    is_small = low > -HIDING_FROM
    if not is_of_two or (is_small and not _is_of_later(call, tensor, low)):
        return

    def hidden(rows: range) -> Tensor:
        vectors = {"query": take(factors.call.query, rows), "key": factors.call.key}
        return (bias.block(rows, keys, **vectors, sizes=call.sizes) == low).all(1)

    if (found := breach(call, hidden, of="that the mask should hide")) is not None:
        yield Finding(
            "mask added" if is_small else "hidden by a finite number", "error",
            f"{found.amount:.2%} of the weight is on keys that {low:g} should hide",
            numbers={"share": found.amount, "number": low}, example=found.example,
            cause="scores are as large as the number", remedy=hide,
        )  # fmt: skip


def _least_weight(call: AuditedCall) -> float:
    return min(float(call.block(rows).min()) for rows in call.chunks())


def _is_of_later(call: AuditedCall, bias: Tensor, low: float) -> bool:
    """True if a bias (..., T, S) has this number at all later keys, and at no others."""
    rows = range(call.sizes.queries)
    if call.offset is None or bias.shape[-2:] != (len(rows), call.sizes.keys) or len(rows) < 3:
        return False
    return bool(((bias == low) == (call.back(rows, call.offset) < 0)).all())


def _later_are_constant(call: AuditedCall) -> bool:
    """True if the weights on later keys are one number in each row, and those on earlier ones are not."""
    queries = call.sizes.queries
    if not call.call.is_stored or call.offset != 0 or queries != call.sizes.keys or queries < FEWEST_ROWS:
        return False
    rows = range(2, min(queries, 64) - 2)
    block, later = call.block(rows), call.back(rows, 0) < 0
    top, low = block.masked_fill(~later, -torch.inf).amax(-1), block.masked_fill(~later, torch.inf).amin(-1)
    earlier = block.masked_fill(later, -torch.inf).amax(-1) - block.masked_fill(later, torch.inf).amin(-1)
    return bool(((top == low) & (low > 0)).all() & (earlier > 1e-6).all())


FEWEST_ROWS = 6
"""The fewest rows in which equal weights are no chance."""
HIDING_FROM = 5.0
"""The least size of a number that is taken for one that should hide."""


NO_SINK = "the kernel did not get the sinks, or they are far below every score"
HAND_SINKS = "hand the sinks to the kernel (s_aux), or load them from the checkpoint"


def sink_rule(call: AuditedCall) -> Iterator[Finding]:
    need(sinks_of(call.module, call.sizes.heads) is not None, "it has no learned sink, as far as is known")
    is_free = call.call.is_stored and not call.call.is_part
    need(not is_free, "its own softmax has no sink, which may scale the output afterwards: regard.check tries it")
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
    named = (getattr(module, name, None) for name in ("sinks", "sink", "attention_sink"))
    return next((one for one in named if isinstance(one, torch.nn.Parameter) and one.numel() == heads), None)


def scale_rule(call: AuditedCall) -> Iterator[Finding]:
    factors = call.call.factors
    if factors is None or not isinstance(factors.call.score, ScaledDot):
        raise NotAsked("its weights tell no scale")
    scale, dim = getattr(factors.call.score, "scale", None), factors.call.query.shape[-1]
    if scale is not None and abs(float(scale) * math.sqrt(dim) - 1) > 1e-3:
        yield Finding(
            "scale", "info", f"its scores are scaled by {float(scale):.4g}; 1/sqrt({dim}) is {dim**-0.5:.4g}",
            numbers={"scale": float(scale)}, remedy="right if the model is made for it, as T5 and Gemma are",
        )  # fmt: skip
