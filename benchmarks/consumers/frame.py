"""Measure one use of attention weights, ours against the eager way: time, peak memory and the largest difference.

The file of a use has

    TITLE = "..."                        the heading of its section in RESULTS.md
    def eager(length: int) -> Run: ...   makes inputs and model, and returns the function that is measured
    def ours(length: int) -> Run: ...    the same for ours; both functions return one tensor, or a tuple of tensors
    def run() -> Report:
        return measure(__name__, eager_up_to=2048)

Both sides make the same inputs, from `torch.manual_seed`. Gradients are as the functions have them: a side that needs
none enters `torch.no_grad()` itself.
"""

import importlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from benchmarks.harness import Row, Run, compare, peak_memory_mib, seconds_of

LENGTHS = (512, 2048, 8192)
SHORT = 32
"""The length at which a fresh process warms up, before its memory is read."""
HEADER = (
    "| setting | eager, ms | ours, ms | eager / ours: median (quartiles) | eager, MiB | ours, MiB | largest difference "
    "|\n|---|---|---|---|---|---|---|"
)


@dataclass(frozen=True)
class Measured:
    """One line of a table."""

    what: str
    ours: float
    ours_mib: float
    times: Row | None = None
    """Both sides in turn; this and what follows is None where eager was not timed."""
    eager_mib: float | None = None
    difference: float | None = None

    def __str__(self) -> str:
        if self.times is None or self.eager_mib is None or self.difference is None:
            return f"| {self.what} | not timed | {1e3 * self.ours:.1f} | | | {self.ours_mib:.0f} | |"
        ratio = f"{self.times.ratio:.2f}x ({self.times.low:.2f} to {self.times.high:.2f})"
        return (
            f"| {self.what} | {1e3 * self.times.peer:.1f} | {1e3 * self.ours:.1f} | {ratio} | "
            f"{self.eager_mib:.0f} | {self.ours_mib:.0f} | {self.difference:.1e} |"
        )


Report = tuple[list[Measured], list[str]]


def measure(
    module: str,
    *,
    lengths: Sequence[int] = LENGTHS,
    eager_up_to: int = 2048,
    seconds: float = 6.0,
    pairs: int = 3,
    note: str = "",
) -> Report:
    """Measure the two sides of a use, and say a note below the table.

    Args:
        module: the `__name__` of the file.
        lengths: T.
        eager_up_to: the longest T at which the eager way fits into memory and patience.
        seconds: for each length.
        pairs: the fewest runs of each side.
        note: what is measured, in a sentence or two.
    """
    rows = []
    for length in lengths:
        what, ours = f"T = {length}", _side(module, "ours", length)
        mib = peak_mib(module, "ours", length)
        if length > eager_up_to:
            row = Measured(what, seconds_of(ours, pairs), mib)
        else:
            eager = _side(module, "eager", length)
            difference = largest_difference(eager(), ours())
            times = compare(what, eager, ours, seconds=seconds, pairs=pairs)
            row = Measured(what, times.ours, mib, times, peak_mib(module, "eager", length), difference)
        print(row, flush=True)
        rows.append(row)
    return rows, [note] if note else []


def _side(module: str, name: str, length: int) -> Run:
    """One side, with inputs of its own: imported by name, as the process that measures memory does."""
    side: Run = getattr(importlib.import_module(module), name)(length)
    return side


def peak_mib(module: str, side: str, length: int) -> float:
    """What a fresh process needs at the peak of one run, above the inputs and the model."""
    return peak_memory_mib(f"from {module} import {side} as side\nside({SHORT})()\nrun = side({length})")


def largest_difference(eager: object, ours: object) -> float:
    """The largest |eager - ours| over all numbers that the two sides return; NaN if one of them is NaN."""
    pairs = zip(_tensors(eager), _tensors(ours), strict=True)
    each = [(one.detach().double() - other.detach().double()).abs().max() for one, other in pairs]
    return float(torch.stack(each).max())  # (max() of Python passes over NaN)


def _tensors(found: object) -> tuple[Tensor, ...]:
    if isinstance(found, Tensor):
        return (found,)
    assert isinstance(found, tuple | list), f"a side returns tensors, not {type(found).__name__}"
    return tuple(torch.as_tensor(one) for one in found)
