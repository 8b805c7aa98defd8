"""A window of a file translated with compiled steps, and by the operations of torch: the same run, the same lines.

    python -m benchmarks steps_of_many        with REGARD_RUN naming a run, and REGARD_TEST a file of pairs

The sources of the first 1,024 pairs, from text to text, as they stand in the file and sorted by length, by one thread,
as each worker has. The peer is regard where no window is large enough for compiled steps. glibc is told
to keep its memory.
"""

import os
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from unittest.mock import patch

import torch

from benchmarks.harness import Row, compare, keeping_memory
from regard.generation.config import Beam
from regard.training.distributed.choices import Precision

TITLE = "A window of a file with compiled steps"
LINES, ASKED = 1_024, 1.2
PRECISIONS: tuple[Precision, ...] = ("float32", "bf16")


def measure(folder: str, test: str) -> tuple[list[Row], list[str]]:
    from regard.tasks.translation import search_job
    from regard.tasks.translation.translator import Translator
    from regard.text.pairs import read_pairs

    lines = [source for source, _ in islice(read_pairs([Path(test)]), LINES)]
    orders = {"unsorted": lines, "by length": sorted(lines, key=len)}
    rows, notes = [], []
    torch.set_num_threads(1)
    for precision in PRECISIONS:
        translator = Translator.load(Path(folder), device="cpu", precision=precision)
        for beam in (1, 5):
            for order, sources in orders.items():

                def ours(beam: int = beam, sources: list[str] = sources, by: Translator = translator) -> list[str]:
                    return [one.text for one in by.translate(sources, beam=Beam(beam))]

                def by_operations(run: Callable[[], list[str]] = ours) -> list[str]:
                    with patch.object(search_job, "MANY", LINES + 1):
                        return run()

                what = f"{'greedy' if beam == 1 else f'beam {beam}'}, {order}, {precision}, 1 thread"
                rows.append(compare(what, by_operations, ours, seconds=10, pairs=3, target=ASKED))
                same = sum(one == other for one, other in zip(ours(), by_operations(), strict=True))
                notes.append(f"{what}: {same} of {len(sources)} translations equal")
    return rows, ["; ".join(notes) + "."]


def run() -> tuple[list[Row], list[str]]:
    folder, test = (os.environ.get(name) for name in ("REGARD_RUN", "REGARD_TEST"))
    if folder is None or test is None:
        return [], ["Not run: REGARD_RUN and REGARD_TEST name a run and a file of pairs."]
    return keeping_memory("steps_of_many", folder, test)
