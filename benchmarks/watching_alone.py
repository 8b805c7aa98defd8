"""A watched and an unwatched forward pass, each in processes of its own: `benchmarks.watching` runs both in one.

There, the heap of glibc grows by the tensors that a watch keeps. The unwatched pass finds room for its activations in
it; the watched pass has them mapped anew, and each of their pages faults once. Here neither has the other's heap.
"""

import statistics
import subprocess
import sys

from benchmarks.harness import Row
from benchmarks.watching import SHAPES

TITLE = "Watching a model, each side in processes of its own"
LENGTHS, ROUNDS = (512, 4096), 3
PROGRAM = """
import statistics, sys, time, torch
from benchmarks import watching as w
torch.set_num_threads(2)
name, shape, length = sys.argv[1], sys.argv[2], int(sys.argv[3])
of, ids = w.model(shape, length), w.tokens(length)
def seconds():
    start = time.perf_counter()
    getattr(w, name)(of, ids)
    return time.perf_counter() - start
seconds()
print(statistics.median(seconds() for _ in range(3 if length > 1024 else 9)))
"""


def run() -> tuple[list[Row], list[str]]:
    rows = [_compared(shape, length) for shape in SHAPES for length in LENGTHS]
    passes = "9 passes each, or 3 of 4,096 tokens, after one to warm up"
    return rows, [f"Medians of {ROUNDS} processes of each side in turn: {passes}."]


def _compared(shape: str, length: int) -> Row:
    pairs = [[_seconds(name, shape, length) for name in ("unwatched", "watched")] for _ in range(ROUNDS)]
    low, middle, high = statistics.quantiles([bare / seen for bare, seen in pairs], n=4)
    bare, seen = map(statistics.median, zip(*pairs, strict=True))
    row = Row(f"{shape}, T = {length}: forward, unwatched / watched", bare, seen, middle, low, high, 0.98)
    print(row, flush=True)
    return row


def _seconds(name: str, shape: str, length: int) -> float:
    command = [sys.executable, "-c", PROGRAM, name, shape, str(length)]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
