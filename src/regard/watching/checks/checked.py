"""The result of an audit or a check: one object, with the questions, the findings, and what could not be asked."""

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, overload

from regard.lazy import Displayed
from regard.watching.checks.finding import Finding, Severity, by_module, grouped
from regard.watching.report import count


@dataclass(frozen=True, slots=True)
class AuditQuestion:
    """One question of an audit: the modules that it was asked of, and the reasons where it was not."""

    name: str
    asked: tuple[str, ...]
    """The paths of the modules that it was asked of."""
    not_asked: tuple[tuple[str, str], ...]
    """(path, reason) of the modules that it could not be asked of."""

    def __str__(self) -> str:
        reasons = list(dict.fromkeys(reason for _, reason in self.not_asked))
        if not self.asked:
            return f"{self.name}: {'; '.join(reasons[:MOST_REASONS])}"
        left = f", not of {len(self.not_asked)}: {'; '.join(reasons[:MOST_REASONS])}" if reasons else ""
        return f"{self.name}: of {len(self.asked)}{left}"


MOST_REASONS = 2
"""The most reasons in a line."""


@dataclass(frozen=True, slots=True, repr=False)
class Checked(Displayed, Sequence[Finding]):
    """The findings of an audit or a check, errors first: a sequence, false without an error and a warning. `print` it.

    >>> checked = Checked("GPT", 12, (), (AuditQuestion("future", ("h.0.attn",), ()),))
    >>> print(checked)
    GPT: 12 layers, 1 question, nothing found
    asked: future
    >>> bool(checked), len(checked)
    (False, 0)
    """

    model: str
    layers: int
    """The number of modules whose attention was read."""
    findings: tuple[Finding, ...]
    questions: tuple[AuditQuestion, ...] = ()
    tried: tuple[str, ...] = ()
    """The trials by results; empty for the audit of a watch alone."""
    unknown: tuple[str, ...] = ()
    """What was not looked at, or not known, and how to tell it: such a check passes nothing."""

    @property
    def errors(self) -> tuple[Finding, ...]:
        """The findings that are wrong for certain."""
        return self._of("error")

    @property
    def warnings(self) -> tuple[Finding, ...]:
        """The findings that are wrong unless they are intended."""
        return self._of("warning")

    @property
    def infos(self) -> tuple[Finding, ...]:
        """Surprising facts, which are no faults."""
        return self._of("info")

    @property
    def faults(self) -> tuple[Finding, ...]:
        """The errors and the warnings."""
        return (*self.errors, *self.warnings)

    @property
    def not_asked(self) -> tuple[AuditQuestion, ...]:
        """The questions that could be asked of no module."""
        return tuple(question for question in self.questions if not question.asked)

    def _of(self, severity: Severity) -> tuple[Finding, ...]:
        return tuple(finding for finding in self.findings if finding.severity == severity)

    def __bool__(self) -> bool:
        return bool(self.faults)

    def __len__(self) -> int:
        return len(self.findings)

    @overload
    def __getitem__(self, key: int) -> Finding: ...
    @overload
    def __getitem__(self, key: slice) -> Sequence[Finding]: ...
    def __getitem__(self, key: int | slice) -> Finding | Sequence[Finding]:
        return self.findings[key]

    def __repr__(self) -> str:
        asked = sum(bool(question.asked) for question in self.questions)
        sizes = [(self.layers, "layer"), (asked, "question"), *([(len(self.tried), "trial")] if self.tried else [])]
        named = (("error", len(self.errors)), ("warning", len(self.warnings)))
        found = ", ".join(count(n, what) for what, n in named if n) or "nothing found"
        infos = f" ({count(len(self.infos), 'info')})" if self.infos else ""
        unknown = "".join(f"; {one}" for one in self.unknown)
        return f"{self.model}: {', '.join(count(n, what) for n, what in sizes)}, {found}{infos}{unknown}"

    def __str__(self) -> str:
        """The faults, and a line each for the infos, the questions and the trials; `details` has them one by one."""
        lines = [repr(self), *(f"  {line}" for line in grouped(self.faults))]
        reasons = list(dict.fromkeys(one.reason for one in self.infos))
        asked = [question.name for question in self.questions if question.asked]
        listed = (("infos", reasons), ("asked", asked), ("tried", self.tried),
                  ("not asked", [one.name for one in self.not_asked]))  # fmt: skip
        return "\n".join([*lines, *(f"{title}: {', '.join(names)}" for title, names in listed if names)])

    @property
    def details(self) -> str:
        """Every finding, and of which modules each question was asked, or why it was not."""
        asked = [question for question in self.questions if question.asked]
        lines = [repr(self), *(f"  {line}" for line in grouped(self.findings)), *_listed("asked:", asked)]
        lines += [f"tried: {', '.join(self.tried)}"] if self.tried else []
        return "\n".join([*lines, *_listed("not asked:", self.not_asked)])

    def to_json(self) -> str:
        """The object as JSON: model, layers, findings, questions and trials."""
        questions = [
            {"name": one.name, "asked": list(one.asked), "not asked": dict(one.not_asked)} for one in self.questions
        ]
        record: dict[str, Any] = {
            "model": self.model, "layers": self.layers, "findings": [one.as_dict() for one in self.findings],
            "questions": questions, "tried": list(self.tried), "unknown": list(self.unknown),
        }  # fmt: skip
        return json.dumps(record, indent=1)


def _listed(title: str, questions: Iterable[AuditQuestion]) -> list[str]:
    lines = [f"  {question}" for question in questions]
    return [title, *lines] if lines else []


def as_one(
    model: str, audits: Sequence[Checked], found: Iterable[Finding], tried: Iterable[str], unknown: Iterable[str]
) -> Checked:
    """One object for several audits of a model and the findings of its trials: a question was asked of a module if one
    audit did."""
    findings = [*found, *(finding for audit in audits for finding in audit)]
    names = dict.fromkeys(question.name for audit in audits for question in audit.questions)
    every = [question for audit in audits for question in audit.questions]
    questions = []
    for name in names:
        same = [question for question in every if question.name == name]
        asked = dict.fromkeys(path for question in same for path in question.asked)
        left = {path: reason for question in reversed(same) for path, reason in question.not_asked if path not in asked}
        questions.append(AuditQuestion(name, tuple(asked), tuple(left.items())))
    layers = len({path for question in every for path in (*question.asked, *dict(question.not_asked))})
    return Checked(
        model, layers, tuple(by_module(findings)), tuple(questions), tuple(tried), tuple(dict.fromkeys(unknown))
    )
