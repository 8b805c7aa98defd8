"""Measure ours and a peer's in turn, and say how sure the ratio is."""

import json
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch

Run = Callable[[], object]


@dataclass(frozen=True)
class Row:
    """One line of a table: times in seconds, the ratio peer / ours as median and quartiles of the pairs."""

    what: str
    peer: float
    ours: float
    ratio: float
    low: float
    high: float
    target: float | None = None

    def __str__(self) -> str:
        target = "" if self.target is None else f"{self.target:g}x"
        met = "" if self.target is None else "yes" if self.ratio >= self.target else "**no**"
        return (
            f"| {self.what} | {1e3 * self.peer:.1f} | {1e3 * self.ours:.1f} | "
            f"{self.ratio:.2f}x ({self.low:.2f} to {self.high:.2f}) | {target} | {met} |"
        )

    def cell(self) -> str:
        """The row in one cell of a table: the ratio, bold if it misses its target, and both times."""
        missed = self.target is not None and self.ratio < self.target
        ratio = f"**{self.ratio:.2f}x**" if missed else f"{self.ratio:.2f}x"
        asked = "" if self.target is None else f" of {self.target:g}x"
        return f"{ratio} ({self.low:.2f} to {self.high:.2f}){asked}; {1e3 * self.peer:.1f}, {1e3 * self.ours:.1f} ms"


HEADER = (
    "| setting | peer, ms | ours, ms | peer / ours: median (quartiles) | at least | met |\n|---|---|---|---|---|---|"
)


def side_by_side(rows: Sequence[Row], columns: dict[str, str]) -> tuple[str, list[str]]:
    """The header and lines of a table with several rows in one line, by the ends of their names.

    Args:
        rows: each ends in one of the columns.
        columns: the title of each column, by the end of a row's name; a longer end stands before its own end.
    """
    found: dict[str, dict[str, Row]] = {}
    for row in rows:
        end = next(end for end in columns if row.what.endswith(end))
        found.setdefault(row.what.removesuffix(end), {})[end] = row
    header = f"| setting | {' | '.join(columns.values())} |\n|---{'|---' * len(columns)}|"
    cells = ([what, *(some[end].cell() if end in some else "" for end in columns)] for what, some in found.items())
    return header, [f"| {' | '.join(line)} |" for line in cells]


def compare(
    what: str,
    peer: Run,
    ours: Run,
    *,
    target: float | None = None,
    seconds: float = 6.0,
    pairs: int = 5,
    work: Sequence[float] = (1.0, 1.0),
) -> Row:
    """Run the two alternately for about so many seconds, at least `pairs` pairs (2 or more) after one to warm up.

    Where a run of theirs and of ours does not do as much, `work` says how much: times are for one unit of it.
    """
    times: tuple[list[float], list[float]] = ([], [])
    _once(peer), _once(ours)
    end = time.perf_counter() + seconds
    while len(times[0]) < pairs or (time.perf_counter() < end and len(times[0]) < 200):
        # The order changes from pair to pair, so that neither always runs in the other's wake.
        for side in (0, 1) if len(times[0]) % 2 else (1, 0):
            times[side].append(_once((peer, ours)[side]) / work[side])
    ratios = sorted(p / o for p, o in zip(*times, strict=True))
    low, middle, high = statistics.quantiles(ratios, n=4)
    row = Row(what, statistics.median(times[0]), statistics.median(times[1]), middle, low, high, target)
    print(row, flush=True)
    return row


def seconds_of(run: Run, times: int = 3) -> float:
    """The median time of a run alone, after one to warm up."""
    _once(run)
    return statistics.median(_once(run) for _ in range(times))


def _once(run: Run) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def forward_backward(function: Callable[..., torch.Tensor], *tensors: torch.Tensor) -> Run:
    """A run that makes the gradients of all the tensors."""
    leaves = [t for t in tensors if t.requires_grad]

    def run() -> object:
        output = function(*tensors)
        return torch.autograd.grad(output, leaves, torch.ones_like(output))

    return run


def without_gradients(function: Callable[..., object], *tensors: torch.Tensor) -> Run:
    """A run without recording gradients."""

    def run() -> object:
        with torch.no_grad():
            return function(*tensors)

    return run


def peak_memory_mib(code: str, *, most_gib: float | None = None, seconds: float | None = None) -> float:
    """What a fresh process needs at its peak for `run()` above what stood before it; `code` defines run.

    Args:
        code: Python; torch and regard are imported.
        most_gib: how much address space the process may take; it fails if it asks for more.
        seconds: how long it may run.

    Raises:
        subprocess.CalledProcessError: it failed.
        subprocess.TimeoutExpired: it took longer.
    """
    if most_gib is not None:
        code = f"import resource\nresource.setrlimit(resource.RLIMIT_AS, ({int(most_gib * 2**30)},) * 2)\n{code}"
    # (A process's ru_maxrss begins with that of the one that started it.)
    program = (
        "import torch, regard\ntorch.set_num_threads(2)\n"
        "def read(field):\n"
        "    line = next(l for l in open('/proc/self/status') if l.startswith(field))\n"
        "    return int(line.split()[1]) / 1024\n"
        f"{code}\n"
        "open('/proc/self/clear_refs', 'w').write('5')\n"
        "before = read('VmRSS')\nrun()\nprint(read('VmHWM') - before)"
    )
    command = [sys.executable, "-c", program]
    return float(subprocess.run(command, check=True, capture_output=True, text=True, timeout=seconds).stdout)


def processor() -> str:
    """The processor's name, and whether it has the units of which the kernels of bf16 take account."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    name = next((line.split(":")[1].strip() for line in lines if "model name" in line), platform.processor())
    flags = next((line.split() for line in lines if line.startswith("flags")), [])
    units = {"amx_tile": " with AMX", "avx512_bf16": " with AVX-512 BF16"}
    return name + next((said for flag, said in units.items() if flag in flags), "")


def details() -> str:
    """The commit, threads and versions."""
    threads = torch.get_num_threads()
    return (
        f"{commit()}, {threads} thread{'s' if threads > 1 else ''}, torch {torch.__version__}, "
        f"Python {platform.python_version()}"
    )


def commit() -> str:
    """That of the code which runs, and whether files of it have changed since."""
    git = partial(subprocess.run, cwd=Path(__file__).parent, capture_output=True, text=True)
    name = git(["git", "rev-parse", "--short=8", "HEAD"]).stdout.strip()
    has_changed = git(["git", "status", "--porcelain", "../src", "*.py"]).stdout.strip()
    return (f"commit {name}" + " with changes" * bool(has_changed)) if name else "no commit"


KEEP_MEMORY = {
    "MALLOC_MMAP_THRESHOLD_": "4294967296",
    "MALLOC_TRIM_THRESHOLD_": "8589934592",
    "MALLOC_TOP_PAD_": "268435456",
}
"""Settings that tell glibc to keep its memory; it reads them when a process starts."""


def keeping_memory(module: str, *arguments: str, **environment: str) -> tuple[list[Row], list[str]]:
    """The rows and notes of `measure(*arguments)` of a module of benchmarks, in a process that keeps its memory."""
    program = f"from benchmarks import harness, {module} as m; harness.tell(*m.measure(*{arguments!r}))"
    run = subprocess.run(
        [sys.executable, "-c", program], check=True, stdout=subprocess.PIPE, text=True,
        env={**os.environ, **KEEP_MEMORY, **environment},
    )  # fmt: skip
    *lines, last = run.stdout.splitlines()
    print("\n".join(lines))
    rows, notes = json.loads(last)
    return [Row(**row) for row in rows], notes


def tell(rows: list[Row], notes: list[str]) -> None:
    """Print rows and notes for the process that has started this one."""
    print(json.dumps([[asdict(row) for row in rows], notes]))
