"""The entry of the command line: it prints an error as one line, sets the exit status, and configures the process.

Results go to standard output and everything else to standard error. The exit status is 0 for success; 1 if
`regard check` finds a fault; 2 for an error, which one line explains; 130 after Ctrl-C; 143 when SIGTERM stops a
training.
"""

import ctypes
import os
import sys
from typing import NoReturn

from regard.errors import MissingExtraError, RegardError
from regard.training.interrupts import Interrupted
from regard.version import __version__


def main() -> None:
    """Run one command of the command line and leave the process with its exit status."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--debug"]
    debug = len(arguments) < len(sys.argv) - 1
    _write_utf8()
    _keep_freed_memory()
    try:
        _run(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt as stop:
        status = 128 + stop.signal if isinstance(stop, Interrupted) else 130
        _leave("; ".join([str(stop) or "interrupted", *getattr(stop, "__notes__", ())]), status)
    except BrokenPipeError:
        # The reader of the results has closed the pipe: the interpreter must not flush to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RegardError, OSError) as error:
        if debug:
            raise
        _leave(" ".join("; ".join([str(error), *getattr(error, "__notes__", ())]).split()), 2)


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print(f"regard {__version__}")
        return
    try:
        import tyro  # noqa: F401  (the commands need it)
    except ImportError:
        raise MissingExtraError("tyro", extra="text") from None
    from regard.cli.commands import chosen_command

    chosen_command(arguments)()


def _leave(line: str, status: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"regard: {line}", file=sys.stderr)
    sys.exit(status)


def _write_utf8() -> None:
    """Write UTF-8 whatever the locale is: a translator has to print every script."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]


def _keep_freed_memory() -> None:
    """Tell glibc's allocator to keep large blocks for the next step instead of handing them back each time.

    This saves a quarter of a training step on the CPU. A program may change the allocator; a library must not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)
    mallopt(mmap_max, 0)
