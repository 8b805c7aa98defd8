"""The measure: how many planted faults are named by kind, and what is said of clean models. `python -m
tests.audit_bench.table` writes it into docs/uses/audit.md."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import regard
from regard.watching.checks import Checked
from tests import ROOT
from tests.audit_bench.clean import CLEAN
from tests.audit_bench.faults import FAULTS as OF_OURS
from tests.audit_bench.faults import Fault
from tests.audit_bench.faults_of_others import OTHERS

PAGE = ROOT / "docs/uses/audit.md"
FAULTS = [*OF_OURS, *OTHERS]
BEGIN, END = "<!-- table of faults: tests/audit_bench/table.py -->", "<!-- end of the table -->"


def run(model: nn.Module, given: Mapping[str, Any]) -> tuple[Checked, Tensor]:
    torch.manual_seed(3)
    with torch.no_grad(), regard.watch(model) as seen:
        output = model(**given)
    return seen.audit(skip="*"), first(output)


def first(output: Any) -> Tensor:
    if isinstance(output, Tensor):
        return output.double()
    values = output.values() if isinstance(output, Mapping) else output
    return first(next(one for one in values if one is not None))


@dataclass(frozen=True)
class Verdict:
    fault: Fault
    found: Checked
    of_twin: Checked
    differs: float

    @property
    def is_named(self) -> bool:
        return any(one.reason in self.fault.reasons for one in self.found.faults)


@cache
def verdict(fault: Fault) -> Verdict:
    found, bad = run(*fault.make(True))
    of_twin, good = run(*fault.make(False))
    differs = torch.inf if good.shape != bad.shape else float((good - bad).abs().nan_to_num(torch.inf).max())
    return Verdict(fault, found, of_twin, differs)


@cache
def clean(name: str) -> Checked:
    return run(*CLEAN[name]())[0]


def table(verdicts: list[Verdict], clean_runs: list[Checked]) -> str:
    lines = ["| kind of fault | planted by us | named | of kinds that users planted | named |", "|---|---|---|---|---|"]
    kinds = {
        kind: [one for one in verdicts if one.fault.kind == kind] for kind in sorted({v.fault.kind for v in verdicts})
    }
    for kind, same in (kinds | {"**all**": verdicts}).items():
        counts = []
        for is_of_others in (False, True):
            some = [one for one in same if one.fault.is_of_others is is_of_others]
            counts += [len(some), sum(one.is_named for one in some)]
        lines.append(f"| {kind} | {' | '.join(map(str, counts))} |")
    runs = [*clean_runs, *(one.of_twin for one in verdicts)]
    errors, warnings = sum(bool(one.errors) for one in runs), sum(bool(one.warnings) for one in runs)
    lines.append(f"\n{len(runs)} clean runs: {errors} with an error, {warnings} with a warning.")
    return "\n".join(lines)


def main(page: Path = PAGE) -> None:
    text = page.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    made = table([verdict(fault) for fault in FAULTS], [clean(name) for name in CLEAN])
    page.write_text(f"{before}{BEGIN}\n{made}\n{END}{after}", encoding="utf-8")


if __name__ == "__main__":
    main()
