"""The peak memory of each use of attention weights, ours beside the eager way, each in a fresh process.

REGARD_USES=contacts,relevance measures these alone, and keeps the lines of the others that RESULTS.md has.
"""

import os
import pkgutil
import subprocess

from benchmarks import consumers
from benchmarks.consumers.frame import LENGTHS, SHORT
from benchmarks.harness import peak_memory_mib
from benchmarks.page import RESULTS

TITLE = "Consumers: peak memory of each use"
HEADER = (
    "| use | T = 512: eager, MiB | ours | T = 2048: eager, MiB | ours | T = 8192: eager, MiB | ours |\n"
    "|---|---|---|---|---|---|---|"
)
MOST_GIB, SECONDS = 20.0, 240.0
"""What one run may take: the address space, of which torch's libraries have about 2 GiB, and the time."""


def run() -> tuple[list[str], list[str]]:
    names = [found.name for found in pkgutil.iter_modules(consumers.__path__) if found.name != "frame"]
    wanted = os.environ.get("REGARD_USES", ",".join(names)).split(",")
    rows = [measured(name) if name in wanted else known(name) for name in names]
    note = (
        f"Above the inputs and the model, after a run at T = {SHORT}. A run that would take more than {MOST_GIB:g} GiB "
        f"of addresses, or more than {SECONDS:g} s beside other work, is named so. What each of them does: the tables "
        "of the uses."
    )
    return [row for row in rows if row], [note]


def measured(name: str) -> str:
    """The line of a use."""
    figures = [_peak(name, side, length) for length in LENGTHS for side in ("eager", "ours")]
    row = f"| {name} | {' | '.join(figures)} |"
    print(row, flush=True)
    return row


def known(name: str) -> str:
    """The line of a use as RESULTS.md has it; empty if it has none."""
    section = RESULTS.read_text(encoding="utf-8").partition(f"## {TITLE}\n")[2].partition("\n## ")[0]
    return next((line for line in section.splitlines() if line.startswith(f"| {name} |")), "")


def _peak(name: str, side: str, length: int) -> str:
    code = f"from benchmarks.consumers.{name} import {side} as side\nside({SHORT})()\nrun = side({length})"
    try:
        return f"{peak_memory_mib(code, most_gib=MOST_GIB, seconds=SECONDS):,.0f}"
    except subprocess.TimeoutExpired:
        return f"not in {SECONDS:g} s"
    except subprocess.CalledProcessError as error:
        if "DefaultCPUAllocator" in error.stderr or "MemoryError" in error.stderr:
            return "does not fit"
        raise
