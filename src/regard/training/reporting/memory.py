"""How much memory training takes, as the operating system and the GPU count it."""

import os

import torch


def resident_bytes() -> int:
    """Resident memory of this process now; on systems without /proc the most that it had; 0 if nobody knows.

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
    return peak if os.uname().sysname == "Darwin" else peak * 1024  # the one counts in bytes, the others in KiB


def device_peak_bytes(device: torch.device) -> int:
    """The most that tensors took on a GPU since the process began; 0 on other devices.

    >>> device_peak_bytes(torch.device("cpu"))
    0
    """
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0
