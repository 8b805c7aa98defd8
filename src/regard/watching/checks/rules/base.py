"""A rule of an audit: one question, the calls that it can be asked of, and its findings."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar

from regard.watching.checks.audited_call import AuditedCall, AuditedRun
from regard.watching.checks.checked import AuditQuestion
from regard.watching.checks.finding import Finding


class Rule(ABC):
    """One question. A rule has no state: what it needs is in the calls."""

    name: ClassVar[str]
    """The question, in a word or two."""

    @abstractmethod
    def ask(self, run: AuditedRun) -> tuple[AuditQuestion, list[Finding]]:
        """Ask it of all calls of a run."""


class CallRule(Rule):
    def why_not(self, call: AuditedCall) -> str:
        """The reason why it cannot be asked of a call; empty if it can."""
        return "" if call.is_attention else "it is no attention over positions"

    @abstractmethod
    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        """The findings of a call that it can be asked of; path and index are added to them."""

    def ask(self, run: AuditedRun) -> tuple[AuditQuestion, list[Finding]]:
        asked: list[AuditedCall] = []
        not_asked: list[tuple[AuditedCall, str]] = []
        for call in run.calls:
            if reason := self.why_not(call):
                not_asked.append((call, reason))
            else:
                asked.append(call)
        found = [call.placed(one) for call in asked for one in self.of_call(call)]
        return asked_of(self.name, asked, not_asked), found


def asked_of(name: str, asked: Sequence[AuditedCall], not_asked: Sequence[tuple[AuditedCall, str]]) -> AuditQuestion:
    """The question of a rule, by modules: the first reason is told."""
    paths = dict.fromkeys(call.name for call in asked)
    left: dict[str, str] = {}
    for call, reason in not_asked:
        if call.name not in paths:
            left.setdefault(call.name, reason)
    return AuditQuestion(name, tuple(paths), tuple(left.items()))
