"""A rule of an audit: one question, the calls that it can be asked of, and its findings."""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import replace
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
    """A question about single calls."""

    @abstractmethod
    def why_not(self, call: AuditedCall) -> str:
        """The reason why it cannot be asked of a call; empty if it can."""

    @abstractmethod
    def of_call(self, call: AuditedCall) -> Iterator[Finding]:
        """The findings of a call that it can be asked of; path and index are added to them."""

    def ask(self, run: AuditedRun) -> tuple[AuditQuestion, list[Finding]]:
        asked: dict[str, None] = {}
        not_asked: dict[str, str] = {}
        found: list[Finding] = []
        for call in run.calls:
            if reason := self.why_not(call):
                not_asked.setdefault(call.name, reason)
                continue
            asked[call.name] = None
            found += [
                replace(one, path=call.name, call=call.call.index, observed=call.call) for one in self.of_call(call)
            ]
        left = tuple((path, reason) for path, reason in not_asked.items() if path not in asked)
        return AuditQuestion(self.name, tuple(asked), left), found


def asked_of(name: str, asked: Sequence[AuditedCall], not_asked: Sequence[tuple[AuditedCall, str]]) -> AuditQuestion:
    """The question of a rule that compares calls."""
    paths = dict.fromkeys(call.name for call in asked)
    left = {call.name: reason for call, reason in not_asked if call.name not in paths}
    return AuditQuestion(name, tuple(paths), tuple(left.items()))
