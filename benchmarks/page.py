"""RESULTS.md: a section for each claim, in it a part for each processor, which a run on that processor replaces.

A part is a table, and below it one paragraph: the command, its date, versions and notes. Claims of one kind share a
section, with a list in place of the paragraph: `consumers.relevance` replaces its own rows and its own item, and leaves
those of the other uses.
"""

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from pathlib import Path

RESULTS = Path(__file__).parent / "RESULTS.md"
TOP = "# Results\n\n`python -m benchmarks NAME` measures a claim and rewrites its rows here.\n"
SHARED = {
    "additive": "Attention beside other implementations",
    "sparse_masks": "Attention beside other implementations",
    "learned_bias": "Attention beside other implementations",
    "kernel_regression": "Attention beside other implementations",
    "half_precision": "Attention beside other implementations",
    "character_model*": "Character language models",
    "consumers.*": "Uses of attention weights",
    "quality.*": "Quality of translations",
}
"""Patterns of names, and the sections that claims of these names share."""


@dataclass(frozen=True)
class Found:
    """The answer of one claim."""

    name: str
    title: str
    command: str
    header: str
    rows: Sequence[str]
    notes: Sequence[str]

    @property
    def section(self) -> str:
        """The title of the section that it stands in."""
        return next((title for pattern, title in SHARED.items() if fnmatch(self.name, pattern)), self.title)

    def part(self, old: str, details: str) -> str:
        """The part of a processor, made from the old one: other claims keep their rows and paragraphs."""
        rows, told = list(self.rows), [f"`{self.command}`, {details}.", *self.notes]
        if self.section == self.title:
            return "\n\n".join(["\n".join([self.header, *rows]), " ".join(told)] if rows else [" ".join(told)])
        row, item = f"| `{self.name}`: ", f"- `{self.command}`, "
        kept = [line for line in old.splitlines() if not line.startswith((row, item))]
        rows = [line for line in kept if line.startswith("| `")] + [row + line.removeprefix("| ") for line in rows]
        items = [line for line in kept if line.startswith("- ")]
        table = "\n".join([self.header, *rows])
        return f"{table}\n\n" + "\n".join([*items, f"- {told[0]} {self.title}. {' '.join(told[1:])}"])


def write(found: Found, *, processor: str, details: str) -> None:
    """Put an answer into RESULTS.md, in the place of the claim's answer on such a processor before."""
    page = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else TOP

    def section(old: str) -> str:
        return within(old, f"### {processor}", lambda part: found.part(part, details))

    RESULTS.write_text(within(page, f"## {found.section}", section), encoding="utf-8")


def within(text: str, heading: str, make: Callable[[str], str]) -> str:
    """A text in which the part under a heading is made anew from the old one; a new heading comes last."""
    marks = heading.partition(" ")[0]
    old = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^{marks} |\Z)", text, flags=re.DOTALL | re.MULTILINE)
    part = f"{heading}\n{make(old[1].strip() if old else '').strip()}\n"
    if old is None:
        return f"{text.strip()}\n\n{part}".lstrip()
    rest = text[old.end() :]
    return f"{text[: old.start()]}{part}" + (f"\n{rest}" if rest else "")
