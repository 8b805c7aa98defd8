"""Findings of an audit or a check, each with its reason, its severity, its measurements, its cause and the remedy; and
the result: one object, with the questions, the findings, and the questions not asked.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args, overload

from torch import Tensor

from regard.errors import NotKeptError
from regard.lazy import Displayed
from regard.watching.report import count

if TYPE_CHECKING:
    from regard.watching.observed import Observed

Severity = Literal["error", "warning", "info"]
"""An error is wrong for certain; a warning is wrong unless intended; an info is a surprising fact."""
OfDirection = Literal["future", "inverted mask", "causal encoder", "causal cross-attention", "image tokens", "prefix"]
OfSequences = Literal["padding", "documents", "no key", "window", "first key dropped", "batch", "length", "labels"]
OfCaches = Literal["causal from the first key", "itself hidden", "earlier keys lost", "positions", "cache"]
OfWeights = Literal["softmax over the wrong axis", "row sums", "dropout in evaluation", "not finite", "recurrence"]
OfScores = Literal["mask added", "hidden by a finite number", "sink", "bias", "scale", "kernel and eager", "training"]
OfReference = Literal["another scale", "another order of heads", "another mask", "other positions", "other values"]
OfOutputs = Literal["another map", "another output", "other calls", "random", "not seen", "not checked"]
Reason = OfDirection | OfSequences | OfCaches | OfWeights | OfScores | OfReference | OfOutputs
"""The fault, in a word a program can match."""


@dataclass(frozen=True, slots=True)
class FaultyWeight:
    """One weight that shows a fault: that of a query on a key, in a head of a sequence of the batch."""

    sequence: int
    head: int
    query: int
    key: int
    weight: float
    of: str = ""
    """The kind of the key, in a few words."""

    def __str__(self) -> str:
        of = f" {self.of}" if self.of else ""
        return f"query {self.query} of sequence {self.sequence} gives {self.weight:.2g} to key {self.key}{of}"


@dataclass(frozen=True, slots=True)
class Finding(Displayed):
    """One thing an audit has found.

    >>> found = Finding("future", "error", "it looks ahead", path="layer.0", call=2, numbers={"share": 0.25})
    >>> print(found)
    error: layer.0, call 2: it looks ahead
    """

    reason: Reason
    severity: Severity
    says: str
    """The fault, with its measured share."""
    path: str = ""
    """The module; "" is the model itself."""
    call: int | None = None
    """The index of the module's call; None for no single call."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements by name; "calls" is the number of calls of the module with this finding."""
    cause: str = ""
    """The probable cause, in a clause; empty if none is known."""
    remedy: str = ""
    """The line to change."""
    example: FaultyWeight | None = None
    """The largest faulty weight of one pair; None for a fault that is of no pair."""
    observed: "Observed | None" = field(default=None, compare=False, repr=False)
    """The call, whose map has the faulty row."""

    @property
    def row(self) -> Tensor:
        """The weights (S,) of the row of the example; `regard.views.faulty_row` draws it.

        Raises:
            NotKeptError: the finding has no example.
        """
        example, weights = self.example, None if self.observed is None else self.observed.map
        if example is None or weights is None or self.observed is None:
            raise NotKeptError(f"the finding {self.reason!r} of {self.path or 'the model'} is of no single row")
        sizes = self.observed.sizes
        block = weights.block(range(example.query, example.query + 1), range(sizes.keys))
        return block.reshape(sizes.flat_batch, sizes.heads, sizes.keys)[example.sequence, example.head]

    def told(self) -> str:
        """The severity, the module, the fault and its example, in a line."""
        where = (self.path or "the model") + ("" if self.call is None else f", call {self.call}")
        times = self.numbers.get("calls", 1)
        example = "" if self.example is None else f"; {self.example}"
        return f"{self.severity}: {where}{f' and {times - 1:g} more' if times > 1 else ''}: {self.says}{example}"

    def __str__(self) -> str:
        return "; ".join(part for part in (self.told(), self.cause, self.remedy) if part)

    def as_dict(self) -> dict[str, Any]:
        """The finding as numbers and text, for JSON."""
        named = ("reason", "severity", "path", "call", "says", "cause", "remedy")
        example = None if self.example is None else asdict(self.example)
        return {name: getattr(self, name) for name in named} | {"numbers": dict(self.numbers), "example": example}


def by_module(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each reason and module, with the number of its calls; the gravest first. Those of no single call
    stand by themselves."""
    alike: dict[tuple[str, str, str, bool], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.reason, one.severity, one.path, one.call is None), []).append(one)
    found = [
        replace(same[0], numbers={**same[0].numbers, "calls": sum(one.numbers.get("calls", 1) for one in same)})
        if same[0].call is not None else same[0] for same in alike.values()
    ]  # fmt: skip
    return sorted(found, key=lambda one: get_args(Severity).index(one.severity))


def grouped(findings: Iterable[Finding]) -> list[str]:
    """The lines of each fault that modules share: the first of them, the count of the others, cause and remedy."""
    alike: dict[tuple[str, str, str, str], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.reason, one.severity, one.cause, one.remedy), []).append(one)
    lines = []
    for same in alike.values():
        others = len(same) - 1
        lines.append(same[0].told() + (f" (and {others} more module{'s' if others > 1 else ''})" if others else ""))
        lines += [f"  {name}: {said}" for name, said in (("cause", same[0].cause), ("remedy", same[0].remedy)) if said]
    return lines


@dataclass(frozen=True, slots=True)
class AuditQuestion:
    """One question of an audit: the modules that it was asked of, and the reasons where it was not."""

    name: str
    asked: tuple[str, ...]
    """The paths of the modules that it was asked of."""
    not_asked: tuple[tuple[str, str], ...]
    """(path, reason) of the modules that it could not be asked of."""

    @classmethod
    def of(cls, name: str, answers: Iterable[tuple[str, str | None]]) -> "AuditQuestion":
        """By (path, reason) of calls, None where it was asked: of a module it was if it was of one of its calls, and
        else the first reason is told."""
        why: dict[str, str | None] = {}
        for path, reason in answers:
            if reason is None or path not in why:
                why[path] = reason
        left = tuple((path, reason) for path, reason in why.items() if reason is not None)
        return cls(name, tuple(path for path, reason in why.items() if reason is None), left)

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
    """The parts that were not looked at, or not known, and how to tell them: such a check does not pass."""

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
        listed: dict[str, Sequence[str]] = {
            "infos": [one.reason for one in self.infos],
            "asked": [one.name for one in self.questions if one.asked],
            "tried": self.tried,
            "not asked": [one.name for one in self.questions if not one.asked],
        }
        named = (f"{title}: {', '.join(dict.fromkeys(names))}" for title, names in listed.items() if names)
        return "\n".join([repr(self), *(f"  {line}" for line in grouped(self.faults)), *named])

    @property
    def details(self) -> str:
        """Every finding, and of which modules each question was asked, or why it was not."""
        lines = [repr(self), *(f"  {line}" for line in grouped(self.findings))]
        lines += [f"tried: {', '.join(self.tried)}"] if self.tried else []
        return "\n".join([*lines, "asked:", *(f"  {question}" for question in self.questions)])

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


def as_one(
    model: str, audits: Sequence[Checked], found: Iterable[Finding], tried: Iterable[str], unknown: Iterable[str]
) -> Checked:
    """One object for several audits of a model and the findings of its trials: a question was asked of a module if one
    audit did."""
    findings = [*found, *(finding for audit in audits for finding in audit)]
    answers: dict[str, list[tuple[str, str | None]]] = {}
    for question in (question for audit in audits for question in audit.questions):
        answers.setdefault(question.name, []).extend([*((path, None) for path in question.asked), *question.not_asked])
    questions = tuple(AuditQuestion.of(name, given) for name, given in answers.items())
    layers = len({path for given in answers.values() for path, _ in given})
    return Checked(model, layers, tuple(by_module(findings)), questions, tuple(tried), tuple(dict.fromkeys(unknown)))
