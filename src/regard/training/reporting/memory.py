"""The memory that training uses, as the operating system and the GPU count it."""

import os

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


def device_peak_bytes(device: torch.device) -> int:
    """The most memory that tensors used on a GPU since the process began; 0 on other devices.

    >>> device_peak_bytes(torch.device("cpu"))
    0
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
