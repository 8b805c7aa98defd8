"""Run the named claims, or all of them, and write their tables into RESULTS.md.

`consumers` stands for all uses in that package; `consumers.divergence` is one of them.
"""

import importlib
import itertools
import pkgutil
import sys
from datetime import date

from benchmarks import consumers, page
from benchmarks.consumers import frame
from benchmarks.harness import HEADER, details, processor, side_by_side

CLAIMS = [
    "scaled_dot",
    "half_precision",
    "statistics",
    "sparse_masks",
    "additive",
    "learned_bias",
    "kernel_regression",
    "watching",
    "watching_alone",
    "start",
    "view_folder",
    "corpus",
    "consumers",
]


def main(names: list[str]) -> None:
    for name in itertools.chain.from_iterable(map(expanded, names or CLAIMS)):
        print(f"== {name}", flush=True)
        found = measured(name)
        if found.rows or not found.notes[0].startswith("Not run"):
            page.write(found, processor=processor(), details=f"{date.today()}, {details()}")
        else:
            print(found.notes[0])


def measured(name: str) -> page.Found:
    """Run a claim. Some give their table as a note."""
    module = importlib.import_module(f"benchmarks.{name}")
    rows, notes = module.run()
    header = frame.HEADER if name.startswith("consumers.") else getattr(module, "HEADER", HEADER)
    if columns := getattr(module, "COLUMNS", None):
        header, rows = side_by_side(rows, columns)
    tables = [note.splitlines() for note in notes if note.startswith("| ")]
    if tables:
        header, rows = "\n".join(tables[0][:2]), tables[0][2:]
    words = [note for note in notes if not note.startswith("| ")]
    return page.Found(name, module.TITLE, f"python -m benchmarks {name}", header, [str(row) for row in rows], words)


def expanded(name: str) -> list[str]:
    """The uses in the package of consumers; any other name alone."""
    if name != "consumers":
        return [name]
    return [f"{name}.{found.name}" for found in pkgutil.iter_modules(consumers.__path__) if found.name != "frame"]


if __name__ == "__main__":
    main(sys.argv[1:])
