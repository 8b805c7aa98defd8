"""Findings of an audit or a check, each with its reason, its severity, its measurements, its cause and the remedy."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from regard.errors import NotKeptError
from regard.lazy import Displayed

if TYPE_CHECKING:
    from regard.watching.observed import Observed

Severity = Literal["error", "warning", "info"]
"""An error is wrong for certain; a warning is wrong unless intended; an info is a surprising fact."""
Reason = Literal[
    "future",
    "inverted mask",
    "causal encoder",
    "causal cross-attention",
    "causal from the first key",
    "itself hidden",
    "earlier keys lost",
    "padding",
    "documents",
    "image tokens",
    "prefix",
    "window",
    "positions",
    "no key",
    "softmax over the wrong axis",
    "mask added",
    "hidden by a finite number",
    "row sums",
    "dropout in evaluation",
    "sink",
    "bias",
    "scale",
    "first key dropped",
    "labels",
    "training",
    "not finite",
    "recurrence",
    "not seen",
    "batch",
    "length",
    "cache",
    "kernel and eager",
    "another scale",
    "another order of heads",
    "another mask",
    "other positions",
    "other values",
    "another map",
    "another output",
    "random",
    "other calls",
    "not checked",
]
"""The fault, in a word a program can match."""
_ORDER = ("error", "warning", "info")


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
        found: Tensor = block.reshape(sizes.flat_batch, sizes.heads, sizes.keys)[example.sequence, example.head]
        return found

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
        example = self.example
        shown = None if example is None else {name: getattr(example, name) for name in example.__slots__}
        named = ("reason", "severity", "path", "call", "says", "cause", "remedy")
        return {name: getattr(self, name) for name in named} | {"numbers": dict(self.numbers), "example": shown}


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
    return sorted(found, key=lambda one: _ORDER.index(one.severity))


def grouped(findings: Iterable[Finding]) -> list[str]:
    """The lines of each fault that modules have in common: the first of them, the number of the others, the cause and
    the remedy."""
    alike: dict[tuple[str, str, str, str], list[Finding]] = {}
    for one in findings:
        alike.setdefault((one.reason, one.severity, one.cause, one.remedy), []).append(one)
    lines = []
    for same in alike.values():
        others = len(same) - 1
        lines.append(same[0].told() + (f" (and {others} more module{'s' if others > 1 else ''})" if others else ""))
        lines += [f"  {name}: {said}" for name, said in (("cause", same[0].cause), ("remedy", same[0].remedy)) if said]
    return lines
