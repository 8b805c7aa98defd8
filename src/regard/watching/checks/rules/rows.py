"""Rows: weights are numbers, rows of real tokens see a key, and a choice of keys keeps the first one."""

import math
from collections.abc import Iterator
from typing import ClassVar

import torch

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.finding import Finding
from regard.watching.checks.rules.base import CallRule

SINK = 0.2
"""A weight on the first key above this is a sink's."""


def is_finite(call: AuditedCall) -> bool:
    facts = call.facts
    return not facts.fault and not any(share is not None and math.isnan(share) for share in (facts.later, facts.first))


class FiniteRule(CallRule):
    """Are the weights numbers?"""

    name: ClassVar = "numbers"

    def why_not(self, call: AuditedCall) -> str:
        return ""

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        if call.facts.fault:
            yield Finding("recurrence", "error", call.facts.fault)
        elif not is_finite(call):
            yield Finding(
                "not finite",
                "error",
                "its weights are not numbers",
                remedy="look at the inputs and at rows without a key",
            )


class NoKeyRule(CallRule):
    """Does each row of a real token see a key?"""

    name: ClassVar = "rows without a key"

    def why_not(self, call: AuditedCall) -> str:
        return ""

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        facts, keep = call.facts, call.keep
        if not facts.no_key or facts.mask.pattern == "inverted":
            return
        queries, keys = call.weights.shape[-2:]
        dead = (~call.live).any(1)
        real = torch.ones_like(dead)
        first = facts.mask.offset if call.offset is None else call.offset
        if keep is not None and call.offset is not None:
            real = call.real_queries
        elif keep is not None:
            # (Which of the queries are padding is not known.)
            real = torch.zeros_like(dead)
        elif first >= 0 and first + queries <= keys:
            seen = call.seen_keys
            # A sequence without any visible key is no padding.
            real = seen[:, first : first + queries] | (~seen.any(-1, keepdim=True) & facts.seen.is_exact)
        count = int((dead & real).sum())
        numbers = {"rows": float(facts.no_key), "of": float(facts.rows)}
        if not count:
            of = (
                "all of them of padding"
                if keep is not None and call.offset is not None
                else "all of them at hidden keys, as of padding"
            )
            yield Finding(
                "no key", "info",
                f"{facts.no_key} of {facts.rows} rows have no key, {of}: their weights are 0 here, and their output "
                "means nothing",
                numbers=numbers,
            )  # fmt: skip
            return
        if not facts.seen.is_exact and keep is None:
            return  # Weights of 0 may be a choice, as of one group for each key.
        yield Finding(
            "no key", "warning" if keep is None else "error",
            f"{facts.no_key} of {facts.rows} rows have no key, rows of real tokens among them, and the mask that "
            f"arrived is {facts.mask}: their output is 0, NaN or an even mean, as the kernel likes",
            numbers=numbers, remedy="let each row see itself",
        )  # fmt: skip


class ChoiceRule(CallRule):
    """Does a choice of keys keep the first one?"""

    name: ClassVar = "choice of keys"

    def why_not(self, call: AuditedCall) -> str:
        return "" if call.facts.choice is not None else "no keys were chosen"

    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        choice = call.facts.choice
        assert choice is not None
        if not choice.without_first:
            return
        # (Softmax attention often rests on the first key, a sink.)
        weight = (
            "" if choice.first is None else f", where all causal keys would give it {choice.first:.1%} of the weight"
        )
        is_sink = choice.first is not None and choice.first > SINK
        numbers = {"rows": choice.without_first} | ({} if choice.first is None else {"weight": choice.first})
        yield Finding(
            "first key dropped", "warning" if is_sink else "info",
            f"{choice.without_first:.1%} of the rows that choose leave out the first key{weight}",
            numbers=numbers, remedy="keep the first key in every choice" if is_sink else "right if it is no sink",
        )  # fmt: skip
