"""Findings of an audit or a check, each with its reason, its severity, its measurements and advice."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Literal

from regard.lazy import Displayed

Severity = Literal["error", "warning", "info"]
"""An error is wrong for certain; a warning is wrong unless intended; an info is a surprising fact."""
Reason = Literal[
    "future",
    "inverted mask",
    "causal cross-attention",
    "causal from the first key",
    "padding",
    "no key",
    "first key dropped",
    "not finite",
    "recurrence",
    "not seen",
    "batch",
    "cache",
    "kernel and eager",
    "random",
    "not checked",
]
"""The fault, in a word a program can match."""
_ORDER = ("error", "warning", "info")


@dataclass(frozen=True, slots=True)
class Finding(Displayed):
    """One thing an audit has found.

    >>> found = Finding("future", "error", "it looks ahead: mask it", path="layer.0", call=2, numbers={"share": 0.25})
    >>> print(found)
    error: layer.0, call 2: it looks ahead: mask it
    """

    reason: Reason
    severity: Severity
    says: str
    """The fault, and advice."""
    path: str = ""
    """The module; "" is the model itself."""
    call: int | None = None
    """The index of the module's call; None for no single call."""
    numbers: Mapping[str, float] = field(default_factory=dict)
    """Measurements by name; "calls" is the number of calls of the module with this finding."""

    def __str__(self) -> str:
        where = (self.path or "the model") + ("" if self.call is None else f", call {self.call}")
        times = self.numbers.get("calls", 1)
        return f"{self.severity}: {where}{f' and {times - 1:g} more' if times > 1 else ''}: {self.says}"


def by_module(findings: Iterable[Finding]) -> list[Finding]:
    """One finding for each reason and module, with the number of its calls; the gravest first."""
    first: dict[tuple[str, str, str], Finding] = {}
    calls: dict[tuple[str, str, str], int] = {}
    for one in findings:
        key = (one.reason, one.severity, one.path)
        first.setdefault(key, one)
        calls[key] = calls.get(key, 0) + (one.call is not None)
    found = [
        replace(one, numbers={**one.numbers, "calls": calls[key]}) if calls[key] else one for key, one in first.items()
    ]
    return sorted(found, key=lambda one: _ORDER.index(one.severity))
