"""A line where a machine is too busy for the threads of a training."""

import os

BUSY = 2.0
"""A machine is busy if the threads of a run bring its load to so many for each core."""


def line_if_busy(chosen: int | None, threads: int) -> str | None:
    """The line for threads that wait for cores on which other programs run: each waits for the slowest.

    Args:
        chosen: the threads that the caller chose; nothing is said of those. None if torch chose.
        threads: those that a step takes.
    """
    cores = os.cpu_count() or 1
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if chosen is not None or threads == 1 or load + threads < BUSY * cores:
        return None
    return (
        f"the machine is busy (a load of {load:.1f} on {cores} cores, and {threads} threads more): beside other work "
        "fewer threads are several times as fast, as --threads 1"
    )
