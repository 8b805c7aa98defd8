"""The memory of training, used and available, as the operating system and the GPU count it."""

import os
import re
from collections.abc import Iterator
from pathlib import PurePosixPath

import torch


def resident_bytes() -> int:
    """The present resident memory of this process; without /proc its peak so far; 0 if the system does not tell.

    >>> resident_bytes() > 10_000_000
    True
    """
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return _peak_resident_bytes()


def _peak_resident_bytes() -> int:
    try:
        import resource
    except ImportError:  # Windows
        return 0
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if os.uname().sysname == "Darwin" else peak * 1024  # macOS counts in bytes, other systems in KiB


def most_bytes(device: torch.device) -> int:
    """The memory available to tensors on a device in all, used or not; 0 if unknown.

    For the CPU, the memory of the machine with its swap, or a container's limit; Linux only.

    >>> most_bytes(torch.device("meta"))
    0
    """
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    if device.type != "cpu":
        return 0
    try:
        told = dict(re.findall(r"^(MemTotal|SwapTotal): +(\d+) kB$", _read("/proc/meminfo"), re.MULTILINE))
    except OSError:
        return 0
    if "MemTotal" not in told:
        return 0
    return min([int(told["MemTotal"]) * 1024, *_limits()]) + int(told.get("SwapTotal", 0)) * 1024


def _limits() -> Iterator[int]:
    """The memory limits of this process's control groups, of either version."""
    try:
        groups = _read("/proc/self/cgroup").splitlines()
    except OSError:
        return
    for group in groups:
        _, controllers, path = group.split(":", 2)
        if "memory" in controllers.split(","):
            root, file = "/sys/fs/cgroup/memory", "memory.limit_in_bytes"
        elif controllers == "":
            root, file = "/sys/fs/cgroup", "memory.max"
        else:
            continue
        for folder in (PurePosixPath(path), *PurePosixPath(path).parents):
            try:
                limit = _read(str(PurePosixPath(root + str(folder), file))).strip()
            except OSError:  # no limit can be set there, or the group is called otherwise inside a container
                continue
            if limit.isdecimal():  # "max" is none
                yield int(limit)


def _read(path: str) -> str:
    with open(path, encoding="utf-8") as file:
        return file.read()
