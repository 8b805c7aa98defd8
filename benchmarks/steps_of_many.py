"""A window of a file translated by this version of regard, and by another one: the same run, the same lines.

    python -m benchmarks steps_of_many        with REGARD_RUN naming a run, and REGARD_TEST a file of pairs

The sources of the first 1,024 pairs, from text to text, as they stand in the file and sorted by length, by one thread,
as each worker has. REGARD_BEFORE names the folder `src` of a checkout of the other version; without it the peer is this
version by the operations of torch. Each side is a process that glibc is told to keep its memory in.
"""

import json
import os
import subprocess
import sys
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import regard
from benchmarks.harness import KEEP_MEMORY, Row, compare
from regard.text.pairs import read_pairs

TITLE = "A window of a file with compiled steps"
LINES, ASKED = 1_024, 1.2
WORKER = str(Path(__file__).with_name("window_worker.py"))
PRECISIONS = ("float32", "bf16")


class Side:
    """A process that translates."""

    def __init__(self, source: str, folder: str, precision: str, is_by_operations: bool) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", WORKER, folder, precision, "yes" if is_by_operations else "no"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            env={**os.environ, **KEEP_MEMORY, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        )  # fmt: skip
        self.found: list[str] = []
        """The last translations."""

    def translate(self, asked: dict[str, Any]) -> None:
        """Translate once."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps(asked), file=self._process.stdin, flush=True)
        self.found = json.loads(self._process.stdout.readline())

    def close(self) -> None:
        """End the process."""
        self._process.communicate()


def runs(sides: tuple[Side, Side], asked: dict[str, Any]) -> list[Callable[[], None]]:
    """The same work by each side."""
    return [lambda side=side: side.translate(asked) for side in sides]  # type: ignore[misc]


def run() -> tuple[list[Row], list[str]]:
    folder, test, before = (os.environ.get(name) for name in ("REGARD_RUN", "REGARD_TEST", "REGARD_BEFORE"))
    if folder is None or test is None:
        return [], ["Not run: REGARD_RUN and REGARD_TEST name a run and a file of pairs."]
    here = str(Path(regard.__file__).parents[1])
    lines = [source for source, _ in islice(read_pairs([Path(test)]), LINES)]
    orders = {"unsorted": lines, "by length": sorted(lines, key=len)}
    rows, notes = [], []
    for precision in PRECISIONS:
        sides = Side(before or here, folder, precision, before is None), Side(here, folder, precision, False)
        for beam in (1, 5):
            for order, sources in orders.items():
                peer, ours = runs(sides, {"beam": beam, "lines": sources})
                what = f"{'greedy' if beam == 1 else f'beam {beam}'}, {order}, {precision}, 1 thread"
                rows.append(compare(what, peer, ours, seconds=10, pairs=5, target=ASKED))
                equal = sum(one == other for one, other in zip(*(side.found for side in sides), strict=True))
                notes.append(f"{what}: {equal:,} of {len(lines):,} translations equal")
        for side in sides:
            side.close()
    return rows, ["; ".join(notes) + "."]
