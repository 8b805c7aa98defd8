"""A rule of an audit: one question, the calls that it can be asked of, and its findings."""

from collections.abc import Callable, Iterator, Sequence

from regard.watching.checks.audited_call import AuditedCall, AuditedRun
from regard.watching.checks.finding import AuditQuestion, Finding

Rule = Callable[[AuditedRun], tuple[AuditQuestion, list[Finding]]]


class NotAsked(Exception):
    """The reason why a question cannot be asked of a call."""


def rule(name: str) -> Callable[[Callable[[AuditedCall], Iterator[Finding]]], Rule]:
    """The rule of a function that yields the findings of one call, without its path and index, or raises `NotAsked`."""

    def of(findings: Callable[[AuditedCall], Iterator[Finding]]) -> Rule:
        def ask(run: AuditedRun) -> tuple[AuditQuestion, list[Finding]]:
            asked: list[AuditedCall] = []
            not_asked: list[tuple[AuditedCall, str]] = []
            found: list[Finding] = []
            for call in run.calls:
                try:
                    found += [call.placed(one) for one in findings(call)]
                    asked.append(call)
                except NotAsked as why:
                    not_asked.append((call, str(why)))
            return asked_of(name, asked, not_asked), found

        return ask

    return of


def need(holds: bool, why_not: str) -> None:
    if not holds:
        raise NotAsked(why_not)


def need_attention(call: AuditedCall) -> None:
    need(call.is_attention, "it is no attention over positions")


def need_one_sequence(call: AuditedCall, *, has_own_keys: bool = False) -> None:
    """Self-attention; with `has_own_keys`, each query has a key of its own."""
    is_one = call.is_attention and not call.crosses and not (has_own_keys and call.sizes.queries > call.sizes.keys)
    need(is_one, "it is no attention over the positions of one sequence")


def asked_of(name: str, asked: Sequence[AuditedCall], not_asked: Sequence[tuple[AuditedCall, str]]) -> AuditQuestion:
    """The question of a rule, by modules: the first reason is told."""
    paths = dict.fromkeys(call.name for call in asked)
    left: dict[str, str] = {}
    for call, reason in not_asked:
        if call.name not in paths:
            left.setdefault(call.name, reason)
    return AuditQuestion(name, tuple(paths), tuple(left.items()))
