"""The report of a run with edits."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass

from regard.lazy import Displayed
from regard.watching.report import count

UNCHANGED = "unchanged"
"""The plan of a call no edit changes: it runs as without edits, with the same bits."""


@dataclass(frozen=True, slots=True)
class EditReport(Displayed):
    """The plans of the edited calls; `print` it."""

    model: str
    plans: Mapping[str, Mapping[str, int]]
    """For each module, the number of its calls by plan."""
    no_key: Mapping[str, int]
    """For each module, how many rows of its edited calls had no key: their weights and outputs are 0."""
    not_reached: tuple[str, ...]
    """The named paths without a call, each with the reason."""
    not_editable: tuple[tuple[str, str], ...]
    """(module path, reason) of named modules that look like attention and have no editable call."""

    def __str__(self) -> str:
        lines = [f"{self.model}: edits of {count(len(self.plans), 'module')}"]
        for path, plans in self.plans.items():
            for plan, n in plans.items():
                lines.append(f"  {path or 'the model itself'}: {'' if n == 1 else f'{n} calls, '}{plan}")
            if n := self.no_key.get(path, 0):
                lines.append(f"    {count(n, 'row')} without a key: weights and output are 0 there")
        lines += ["not reached:"] if self.not_reached else []
        lines += [f"  {text}" for text in self.not_reached]
        lines += ["not edited:"] if self.not_editable else []
        lines += [f"  {path or 'the model itself'}: {reason}" for path, reason in self.not_editable]
        return "\n".join(lines)


def times(counts: Counter[tuple[str, str]]) -> tuple[tuple[str, str], ...]:
    """(path, reason) with how often it was seen."""
    return tuple((path, reason if n == 1 else f"{reason} ({n} times)") for (path, reason), n in counts.items())
