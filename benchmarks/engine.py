"""A file translated with `--engine ctranslate2`, and by regard's own search.

    python -m benchmarks engine        with REGARD_RUN naming a run, and REGARD_TEST a file of pairs

The sources of the first 1,024 pairs, which is a window of a file, from text to text: tokens are cut and joined on both
sides. Two threads search for regard (float32), and for CTranslate2. glibc is told to keep its memory.
The first table has regard as the peer.
"""

import os
from contextlib import AbstractContextManager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

from benchmarks.harness import Row, compare, keeping_memory
from regard.tasks.generation.config import Beam

TITLE = "A file of lines with --engine ctranslate2"
LINES = 1024


def measure(folder: str, test: str) -> tuple[list[Row], list[str]]:
    from regard.tasks.exports.engine import searching_by_ctranslate2
    from regard.tasks.text.pairs import read_pairs
    from regard.tasks.translation.translator import Translator

    lines = [source for source, _ in islice(read_pairs([Path(test)]), LINES)]
    rows, notes, run = [], [], Path(folder)
    for beam in (1, 5):
        searchers: dict[str, AbstractContextManager[Any]] = {}
        translators = {name: Translator.load(run, device="cpu") for name in ("regard", "float32", "int8")}
        for precision in ("float32", "int8"):
            translator = translators[precision]
            searchers[precision] = searching_by_ctranslate2(translator, run, precision=precision, threads=2)

        def translate(name: str, beam: int = beam, translators: dict[str, Translator] = translators) -> list[str]:
            return [one.text for one in translators[name].translate(lines, beam=Beam(beam))]

        with searchers["float32"], searchers["int8"]:
            ours = translate("regard")
            for precision in ("float32", "int8"):
                kind = "greedy" if beam == 1 else f"beam {beam}"
                what = f"regard (float32): {kind}, {len(lines)} lines, ctranslate2 in {precision}"
                row = compare(what, partial(translate, "regard"), partial(translate, precision), seconds=1, pairs=3)
                rows.append(row)
                same = sum(a == b for a, b in zip(ours, translate(precision), strict=True))
                notes.append(
                    f"{kind}, {precision}: {len(lines) / row.ours:,.0f} sentences/s against "
                    f"{len(lines) / row.peer:,.0f}, {same} of {len(lines)} translations equal"
                )
    return rows, ["; ".join(notes) + "."]


def run() -> tuple[list[Row], list[str]]:
    folder, test = (os.environ.get(name) for name in ("REGARD_RUN", "REGARD_TEST"))
    if folder is None or test is None:
        return [], ["Not run: REGARD_RUN and REGARD_TEST name a run and a file of pairs."]
    return keeping_memory("engine", folder, test)
