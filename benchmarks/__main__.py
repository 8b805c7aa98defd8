"""Run the named claims, or all of them, and write their tables into RESULTS.md.

`consumers` stands for all uses in that package; `consumers.divergence` is one of them.
"""

import importlib
import itertools
import pkgutil
import re
import sys
from datetime import date
from pathlib import Path

from benchmarks import consumers
from benchmarks.consumers import frame
from benchmarks.harness import HEADER, machine

CLAIMS = [
    "scaled_dot",
    "half_precision",
    "statistics",
    "sparse_masks",
    "additive",
    "learned_bias",
    "kernel_regression",
    "watching",
    "start",
    "attention_log",
    "consumers",
]
RESULTS = Path(__file__).parent / "RESULTS.md"
TOP = """# Results

Each table is made by the command above it, which runs the peer and ours in turn on the same machine. These machines
are shared and noisy: only the ratios count, and they are given with their quartiles. Where a bar is not met, the
figure stands as it is.
"""


def main(names: list[str]) -> None:
    for name in itertools.chain.from_iterable(map(expanded, names or CLAIMS)):
        module = importlib.import_module(f"benchmarks.{name}")
        print(f"== {name}", flush=True)
        rows, notes = module.run()
        header = frame.HEADER if name.startswith("consumers.") else getattr(module, "HEADER", HEADER)
        table = "\n".join([header, *map(str, rows)])
        text = f"`python -m benchmarks {name}`, {date.today()}, {machine()}\n\n{table}\n"
        write_section(module.TITLE, text + "".join(f"\n{note}\n" for note in notes))


def expanded(name: str) -> list[str]:
    """The uses in the package of consumers; any other name alone."""
    if name != "consumers":
        return [name]
    return [f"{name}.{found.name}" for found in pkgutil.iter_modules(consumers.__path__) if found.name != "frame"]


def write_section(title: str, section: str) -> None:
    """Put a section into RESULTS.md, in the place of the one of that title if there is one."""
    text = RESULTS.read_text(encoding="utf-8") if RESULTS.exists() else TOP
    section = f"## {title}\n{section}"
    old = re.compile(rf"## {re.escape(title)}\n.*?(?=\n## |\Z)", re.DOTALL)
    text = old.sub(lambda _: section, text) if old.search(text) else f"{text.rstrip()}\n\n{section}"
    RESULTS.write_text(text.rstrip() + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
