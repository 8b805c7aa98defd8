"""`regard demo`: a model learns to read dates before your eyes."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.loading import loading
from regard.cli.shared import Command, Device

if TYPE_CHECKING:
    from regard.tasks.demo import DemoResult


@dataclass(frozen=True, slots=True)
class DemoCommand(Command):
    """Learn to read dates in 25 languages, before your eyes, and show the attention."""

    _: KW_ONLY
    out: Path = Path("demo")
    """folder for the data, the run and the pictures."""
    seed: int = 0
    """seed of all random numbers."""
    device: Device = "auto"

    def check(self) -> None:
        with loading("lightning_fabric", "matplotlib"):
            from regard.tasks.demo import refuse_others
        refuse_others(self.out)

    def work(self) -> None:
        import torch

        from regard.tasks.demo import run_demo

        print("a small model learns to read dates in 25 languages: two minutes or so, on one core", file=sys.stderr)
        # A second thread or process gains nothing for matrices this small (benchmarks/RESULTS.md), and on a busy
        # machine waiting for it costs up to thirteenfold.
        torch.set_num_threads(1)
        _print_result(run_demo(self.out, seed=self.seed, device=self.device, progress=sys.stderr))


def _print_result(result: "DemoResult") -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("held-out date", "answer", "", title=f"{len(result.shown)} dates that were never seen in training")
    for pair, answer in result.shown:
        table.add_row(pair.source, answer, "✓" if answer == pair.target else f"✗ {pair.target}")
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    console.print(f"exact match on {result.held_out:,} held-out dates: {result.exact_match:.2f} %")
    for path in result.files:
        console.print(str(path), soft_wrap=True)
    console.print(f"a page to type into: regard serve {result.run}", soft_wrap=True)
