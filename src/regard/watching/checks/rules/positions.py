"""Positions: those of a step follow those of the step before it, and padding is no position."""

from collections.abc import Iterator
from typing import ClassVar

from torch import Tensor

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.finding import Finding
from regard.watching.checks.rules.base import CallRule
from regard.watching.checks.rules.cached import NEWEST, OLDEST
from regard.watching.checks.told import ENDS, handed


class PositionsRule(CallRule):
    """Do positions go on from step to step?"""

    name: ClassVar = "positions"

    def why_not(self, call: AuditedCall) -> str:
        if not call.is_attention or call.crosses:
            return "it is no attention over the positions of one sequence"
        if call.positions is None:
            return "its positions are in no table and no argument"
        return (
            ""
            if call.is_later_step or _has_left_padding(call) or _has_documents(call)
            else "it is no step with a cache, and has no padding on the left"
        )

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        now, before = call.positions, None if call.before is None else call.before.positions
        assert now is not None
        if not call.is_later_step:
            yield from _counted_padding(call)
            yield from _over_documents(call)
            return
        if before is None or call.before is None or call.step is None or call.before.step is None:
            return
        if call.step.origins is not None or now.source.partition(" of ")[0] != before.source.partition(" of ")[0]:
            return
        # (Where a cache was cut back, a step begins earlier than the last one ended.)
        gone = call.step.first - call.before.step.first - call.before.sizes.queries
        # (Padding at the end of a prompt may count, or not; before its first real token a sequence has no position.)
        expected, was_real = _of_last_real(before.values, call.before.real_queries)
        got, is_real = _of_first_real(now.values, call.real_queries)
        expected, counted = expected + 1 + gone, before.values[:, -1] + 1 + gone
        wrong = (expected != got) & (counted != got) & was_real & is_real
        if bool(wrong.any()):
            row = int(wrong.long().argmax())
            here, there = int(got[row]), int(expected[row])
            # (They go on after the last token, and the keys do not.)
            is_cut = gone < 0 and here == there - gone
            cause = "positions begin anew at each step" if not here else "positions are not advanced with the cache"
            yield Finding(
                "positions", "error",
                f"its first new token has position {here} in sequence {row}, by {now.source}, and follows "
                + (f"the oldest {there} keys" if is_cut else f"position {there - 1}"),
                numbers={"position": float(here), "expected": float(there)},
                cause=OLDEST if is_cut else cause,
                remedy=NEWEST if is_cut else "add the length of the cache to the positions of new tokens",
            )  # fmt: skip


def _of_first_real(positions: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    """The position of the first real token of each sequence, and whether there is one."""
    real = real.expand_as(positions)
    return positions.gather(1, real.long().argmax(-1, keepdim=True))[:, 0], real.any(-1)


def _of_last_real(positions: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
    return _of_first_real(positions.flip(-1), real.flip(-1))


def _has_left_padding(call: AuditedCall) -> bool:
    return call.offset == 0 and call.keep is not None and bool((~call.keep.values[:, 0]).any())


def _has_documents(call: AuditedCall) -> bool:
    return call.position_table is not None and call.documents is not None


def _over_documents(call: AuditedCall) -> Iterator[Finding]:
    if not _has_documents(call) or call.positions is None or call.documents is None:
        return
    begins = (call.documents.values.diff(dim=-1) != 0) & call.real_keys[:, 1:] & call.real_keys[:, :-1]
    if bool(begins.any()) and bool((call.positions.values.diff(dim=-1)[begins] == 1).all()):
        row, key = (int(n) for n in begins.nonzero()[0])
        # (With their ends, sequences of a batch are packed, which should be as alone.)
        is_of_ends = call.documents.source.startswith(ENDS)
        yield Finding(
            "positions", "warning" if is_of_ends else "info",
            f"positions go on from one document to the next, which {call.documents.source} tell apart: the first token "
            f"of a document, key {key + 1} of sequence {row}, has position {int(call.positions.values[row, key + 1])}",
            numbers={"documents": float(begins.sum())},
            cause="a document then has other positions than alone", remedy="count the positions of each document anew",
        )  # fmt: skip


def _counted_padding(call: AuditedCall) -> Iterator[Finding]:
    """Positions by a table that count padding on the left: a sequence then has other positions than alone."""
    if call.positions is None or call.position_table is None or call.keep is None:
        return
    keep = call.keep.values
    first = keep.long().argmax(-1)
    at = call.positions.values.gather(1, first[:, None])[:, 0]
    base = call.positions.values.min()
    if bool((keep.any(-1) & (at - base == first) & (first > 0)).any()):
        row = int((first > 0).long().argmax())
        is_handed = any(not one.frame.path for one in handed(call.call, ("position_ids",), call.sizes.queries))
        yield Finding(
            "positions", "warning" if is_handed and call.role.direction == "causal" else "info",
            f"padding on the left counts as positions: the first token of sequence {row} has position {int(at[row])}, "
            f"and alone {int(base)}",
            numbers={"position": float(at[row])}, remedy="hand over position_ids that count from the first real token",
        )  # fmt: skip
