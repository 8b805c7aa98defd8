"""The operating system's permission to use tiles: their registers hold 8 KiB, which it saves only for who asks."""

import ctypes
import platform
import sys

SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA = 158, 0x1023, 18
"""The numbers of the system call, of the question and of the registers, on Linux for x86-64 (since 5.16)."""


def may_use_tiles() -> bool:
    """Ask for this process and all of its threads. It may be asked again; what has no tiles says no."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    return bool(ctypes.CDLL(None).syscall(SYS_ARCH_PRCTL, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0)
