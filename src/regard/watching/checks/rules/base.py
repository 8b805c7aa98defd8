"""How a question is asked: a rule yields the findings of a call, or raises the reason why it cannot be asked of it."""

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

from regard.watching.checks.audited_call import AuditedCall
from regard.watching.checks.finding import AuditQuestion, Finding

Rule = Callable[[AuditedCall], Iterator[Finding]]
"""Yields findings without their path and index, or raises `NotAsked`."""


class NotAsked(Exception):
    """The reason why a question cannot be asked of a call."""


def need(holds: bool, why_not: str) -> None:
    if not holds:
        raise NotAsked(why_not)


def need_attention(call: AuditedCall) -> None:
    need(call.is_attention, "it is no attention over positions")


def need_one_sequence(call: AuditedCall, *, has_own_keys: bool = False) -> None:
    """Self-attention; with `has_own_keys`, each query has a key of its own."""
    is_one = call.is_attention and not call.crosses and not (has_own_keys and call.sizes.queries > call.sizes.keys)
    need(is_one, "it is no attention over the positions of one sequence")


def answers_to(name: str, rule: Rule, calls: Iterable[AuditedCall]) -> tuple[AuditQuestion, list[Finding]]:
    answers: list[tuple[str, str | None]] = []
    found: list[Finding] = []
    for call in calls:
        try:
            found += [replace(one, path=call.name, call=call.call.index, observed=call.call) for one in rule(call)]
            answers.append((call.name, None))
        except NotAsked as why:
            answers.append((call.name, str(why)))
    return AuditQuestion.of(name, answers), found
