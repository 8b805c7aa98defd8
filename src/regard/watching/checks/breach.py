"""Weight on pairs that a contract forbids: its share, and the largest one, a few rows at a time."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from regard.tensors.tile_sizes import fitting, ranges
from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.finding import FaultyWeight, Finding, Reason, Severity
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS

LEAST = 1e-6
"""A share of weight below this is rounding."""
Pairs = Callable[[range], Tensor]
"""For some rows, pairs of a query and a key: bool (B or 1, rows, S)."""


@dataclass(frozen=True, slots=True)
class Breach:
    """Weight where there should be none."""

    share: float
    """The share of the weight of the counted rows, over all heads and sequences."""
    rows: int
    """How many rows have some, in any head."""
    example: FaultyWeight

    def finding(
        self, call: AuditedCall, reason: Reason, says: str, *, severity: Severity = "error", cause: str = "",
        remedy: str = "", **numbers: float,
    ) -> Finding:  # fmt: skip
        """The finding: the share, its place, and the mask that arrived."""
        said = f"{self.share:.1%} of the weight {says}, and the mask that arrived is {call.facts.mask}"
        given = {"share": self.share, **numbers}
        return Finding(reason, severity, said, numbers=given, example=self.example, cause=cause, remedy=remedy)


class HiddenPairs(NamedTuple):
    """Required pairs that are hidden in every head."""

    number: int
    sequence: int
    query: int
    key: int
    """The first of them."""

    def finding(
        self, call: AuditedCall, reason: Reason, says: str, *, cause: str = "", remedy: str = "", **numbers: float
    ) -> Finding:
        """The finding: how many pairs, the first of them, and the mask that arrived."""
        return Finding(
            reason, "error", f"{self.number} {says}: query {self.query} of sequence {self.sequence} does not see key "
            f"{self.key}, and the mask that arrived is {call.facts.mask}",
            numbers={"pairs": float(self.number), **numbers}, cause=cause, remedy=remedy,
        )  # fmt: skip


@torch.no_grad()
def breach(call: AuditedCall, forbidden: Pairs, *, of: str = "", counted: Tensor | None = None) -> Breach | None:
    """Measure the weight on forbidden pairs; None if there is none.

    Args:
        call: the call.
        forbidden: the pairs, for some rows.
        of: the kind of the forbidden keys, for the example.
        counted: the rows that count, bool (B, T); those of real tokens by default.
    """
    sizes, counted = call.sizes, call.real_queries if counted is None else counted
    counted = counted & call.live_rows
    step = fitting(CHUNK_ELEMENTS, sizes.flat_batch * sizes.heads * sizes.keys)
    total, rows_with, best = 0.0, 0, None
    for rows in ranges(sizes.queries, step):
        bad = forbidden(rows) & counted[:, rows.start : rows.stop, None]
        if not bool(bad.any()):
            continue
        pairs = bad[:, None] & call.sees(rows)
        if not bool(pairs.any()):
            continue
        block = call.block(rows).masked_fill(~pairs, 0.0)
        total += float(block.sum(dtype=torch.float64))
        by_row = block.amax((1, 3))
        rows_with += int((by_row > LEAST).sum())
        largest = block.flatten().argmax()
        at = [int(n) for n in torch.unravel_index(largest, block.shape)]
        weight = float(block[tuple(at)])
        if best is None or weight > best.weight:
            best = FaultyWeight(at[0], at[1], at[2] + rows.start, at[3], weight, of)
    share = total / max(1, int(counted.sum()) * sizes.heads)
    return None if best is None or not share > LEAST else Breach(min(1.0, share), rows_with, best)


@torch.no_grad()
def hidden_pairs(call: AuditedCall, required: Pairs) -> HiddenPairs | None:
    """The required pairs that are hidden, of rows of real tokens; None if there are none. Nothing is told by weights,
    where an allowed pair may have the weight 0."""
    if not call.is_exact:
        return None
    sizes, count, first = call.sizes, 0, None
    for rows in ranges(sizes.queries, fitting(CHUNK_ELEMENTS, sizes.flat_batch * sizes.heads * sizes.keys)):
        wanted = required(rows) & call.real_queries[:, rows.start : rows.stop, None]
        if not bool(wanted.any()):
            continue
        lost = wanted & ~call.sees(rows).any(1)
        if call.facts.seen.even.any():
            even = call.facts.seen.even.unflatten(0, call.facts.seen.shape).any(1)
            lost = lost & ~(even if even.shape[-1] == 1 else even[:, rows.start : rows.stop])[..., None]
        if bool(lost.any()):
            count += int(lost.sum())
            if first is None:
                sequence, query, key = (int(n) for n in lost.nonzero()[0])
                first = sequence, query + rows.start, key
    return None if first is None else HiddenPairs(count, *first)
