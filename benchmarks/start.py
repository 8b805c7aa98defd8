"""CPU time of the first moments of the program: version, help and wrong flags, beside `import torch`.

    python -m benchmarks start

Each is a process of its own, in turn, and its CPU time is the kernel's (user and system, of all its threads).
"""

import os
import statistics
import subprocess
import sys
from typing import NamedTuple

from regard.cli.commands import COMMANDS as COMMANDS_BY_NAME

TITLE = "The first minute: version, help, errors"
TURNS = 3
PEER = [sys.executable, "-c", "import torch"]
COMMANDS = {
    0.3: ["--version"],
    0.6: [
        "--help",
        "train --help",
        "train translation --help",
        "train language-model --help",
        *(f"{name} --help" for name in COMMANDS_BY_NAME),
        "trian",
        "train --dat x",
        "train --data x --out y --learning-rate nan",
        "translate run --bem 4",
    ],
}
"""The commands, by the CPU seconds that they may take."""
HEADER = "| command | CPU ms, median | import torch, CPU ms | at most | met |\n|---|---|---|---|---|"


class CpuRow(NamedTuple):
    """One line of the table, in CPU seconds."""

    what: str
    ours: float
    peer: float
    most: float

    def __str__(self) -> str:
        met = "yes" if self.ours <= self.most else "**no**"
        return f"| {self.what} | {1e3 * self.ours:.0f} | {1e3 * self.peer:.0f} | {1e3 * self.most:.0f} | {met} |"


def run() -> tuple[list[CpuRow], list[str]]:
    """Measure every command a few times, in turn with the peer, and give the slowest of those with one limit."""
    rows = []
    for most, commands in COMMANDS.items():
        found = []
        for command in commands:
            typed = [sys.executable, "-m", "regard", *command.split()]
            pairs = [(cpu_seconds(typed), cpu_seconds(PEER)) for _ in range(TURNS)]
            ours, peer = (statistics.median(side) for side in zip(*pairs, strict=True))
            found.append(CpuRow(f"`regard {command}`", ours, peer, most))
            print(found[-1], flush=True)
        slowest = max(found, key=lambda row: row.ours)
        rows.append(
            slowest._replace(what=f"{slowest.what}, the slowest of {len(found)}" if found[1:] else slowest.what)
        )
    return rows, ["`import torch` is what every other command needs before it begins."]


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a process."""
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0
    return used.ru_utime + used.ru_stime
