"""Weight on pairs that a contract forbids: its share, and the largest one, a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from regard.maps.sources.source import LinearSource
from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.finding import FaultyWeight, Finding, Reason, Severity

LEAST = 1e-6
"""A share of weight below this is rounding."""
Pairs = Callable[[range], Tensor]
"""For some rows, pairs of a query and a key: bool (B or 1, rows, S)."""


@dataclass(frozen=True, slots=True)
class Breach:
    """Weight where there should be none, or hidden pairs that should be seen."""

    amount: float
    """The share of the weight of the counted rows, over all heads and sequences; or the number of pairs."""
    unit: Literal["share", "pairs"]
    example: FaultyWeight | None = None
    first: str = ""
    """The first of the pairs."""

    def finding(
        self, call: AuditedCall, reason: Reason, says: str, *, severity: Severity = "error", cause: str = "",
        remedy: str = "", **numbers: float,
    ) -> Finding:  # fmt: skip
        """The finding: how much, the place, and the mask that arrived."""
        much = f"{self.amount:.1%} of the weight" if self.unit == "share" else f"{self.amount:.0f}"
        said = f"{much} {says}{self.first}, and the mask that arrived is {call.facts.mask}"
        given = {self.unit: self.amount, **numbers}
        return Finding(reason, severity, said, numbers=given, example=self.example, cause=cause, remedy=remedy)


@torch.no_grad()
def breach(call: AuditedCall, forbidden: Pairs, *, of: str = "") -> Breach | None:
    """Measure the weight on forbidden pairs, in the rows of real tokens; None if there is none. The example says that
    its key is `of` a kind."""
    counted, total, best = call.counted, 0.0, None
    is_range = isinstance(call.weights.source, LinearSource)
    for rows in call.chunks():
        bad = forbidden(rows) & counted[:, rows.start : rows.stop, None]
        if is_range:
            bad = bad & _in_reach(call, rows)
        if not bool(bad.any()):
            continue
        block = call.block(rows)
        # (The weights of a recurrence have signs, and sum to no number.)
        block = block.abs() / block.abs().sum(-1, keepdim=True).clamp_min(1e-30) if is_range else block
        block = block.masked_fill(~(bad[:, None] & ((block > 0) if is_range else call.sees(rows))), 0.0)
        total += float(block.sum(dtype=torch.float64))
        sequence, head, query, key = (int(n) for n in torch.unravel_index(block.argmax(), block.shape))
        weight = float(block[sequence, head, query, key])
        if best is None or weight > best.weight:
            best = FaultyWeight(sequence, head, query + rows.start, key, weight, of)
    share = total / max(1, int(counted.sum()) * call.sizes.heads)
    return None if best is None or not share > LEAST else Breach(min(1.0, share), "share", best)


def _in_reach(call: AuditedCall, rows: range) -> Tensor:
    """The pairs from the first key that each row sees to the last, bool (C, rows, S)."""
    seen, places = call.facts.seen, torch.arange(call.sizes.keys, device=call.device)
    first, last = (one[:, rows.start : rows.stop, None] for one in (seen.first, seen.last))
    return ((places >= first) & (places <= last)).any(0, keepdim=True)


@torch.no_grad()
def hidden_pairs(call: AuditedCall, required: Pairs) -> Breach | None:
    """The required pairs that are hidden, of rows of real tokens; None if there are none. Weights tell of the pattern
    alone that they have as a whole, because an allowed pair may have the weight 0."""
    mask, count, first = call.facts.mask, 0, ""
    if not call.is_exact and mask.pattern not in ("causal", "window"):
        return None
    counted = call.counted
    for rows in call.chunks():
        wanted = required(rows) & counted[:, rows.start : rows.stop, None]
        away = call.back(rows, mask.offset)
        seen = call.sees(rows).any(1) if call.is_exact else (away >= 0) & (away < (mask.size or call.sizes.keys + 1))
        lost = wanted & ~seen
        if bool(lost.any()):
            count += int(lost.sum())
            sequence, query, key = (int(n) for n in lost.nonzero()[0])
            first = first or f": query {query + rows.start} of sequence {sequence} does not see key {key}"
    return Breach(count, "pairs", first=first) if count else None
