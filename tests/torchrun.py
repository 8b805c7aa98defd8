"""Real ranks, started by `torchrun`."""

import os
import subprocess
import sys
from pathlib import Path


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


def torchrun(*arguments: str) -> list[str]:
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    return [sys.executable, *launcher, *arguments]


def rank_of(launcher: subprocess.Popen[str], rank: int) -> int:
    for number in Path(f"/proc/{launcher.pid}/task/{launcher.pid}/children").read_text().split():
        if f"RANK={rank}".encode() in Path(f"/proc/{number}/environ").read_bytes().split(b"\0"):
            return int(number)
    raise AssertionError(f"no process of rank {rank}")
