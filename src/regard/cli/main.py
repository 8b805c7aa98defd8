"""The entry of the command line: it prints an error as one line, sets the exit status, and configures the process.

Results go to standard output and everything else to standard error. The exit status is 0 for success; 1 if
`regard check` finds a fault; 2 for an error, which one line explains; 130 after Ctrl-C; 143 after SIGTERM.
"""

import errno
import os
import signal
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from regard.cli.loading import loading, speaks
from regard.errors import ArgumentError, RegardError, needs
from regard.tasks.training.interrupts import Interrupted, ending_at_once
from regard.version import __version__, installed_version


def program() -> None:
    """Be the program `regard`: run one command, and leave the process with its exit status."""
    try:
        main()
    finally:
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, signal.SIG_DFL)  # Python's last clean-up is not worth a traceback


def main() -> None:
    if status := run_command(sys.argv[1:]):
        sys.exit(status)


def run_command(arguments: Sequence[str]) -> int:
    """Run one command, tell its error in one line, and return the exit status."""
    debug, arguments = "--debug" in arguments, [argument for argument in arguments if argument != "--debug"]
    try:
        with ending_at_once(), _warning_in_one_line():
            _run(arguments)
            sys.stdout.flush()
    except KeyboardInterrupt as stop:
        _say("; ".join([str(stop) or "interrupted", *getattr(stop, "__notes__", ())]))
        return 128 + stop.signal if isinstance(stop, Interrupted) else 130
    except BrokenPipeError:
        # The reader of the results has closed the pipe: the interpreter must not flush to it at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    except (RegardError, OSError, UnicodeEncodeError) as error:
        if debug:
            raise
        _say(" ".join("; ".join([_message(error, arguments), *getattr(error, "__notes__", ())]).split()))
        return 2
    except SystemExit as leaving:  # after --help, and of `regard check` if it finds a fault
        return int(leaving.code or 0)
    return 0


@contextmanager
def _warning_in_one_line() -> Iterator[None]:
    """Without the line of code that warns: a user of a command has no use for it."""

    def show(message: Warning | str, *_: Any, **__: Any) -> None:
        _say(" ".join(str(message).split()))

    with warnings.catch_warnings():
        warnings.showwarning = show
        yield


def _run(arguments: list[str]) -> None:
    if arguments == ["--version"]:
        print(f"regard {__version__}")
        return
    if sorted(arguments) == ["--verbose", "--version"]:
        print(environment())
        return
    with loading():
        _write_utf8()
        with needs("tyro", extra="train"):
            import tyro  # noqa: F401  (the commands need it)
        from regard.cli.commands import chosen_command

        command = chosen_command(arguments)
    _keep_freed_memory()
    command()


def _message(error: RegardError | OSError | UnicodeEncodeError, arguments: Sequence[str]) -> str:
    if isinstance(error, UnicodeEncodeError):  # of a library that takes no name but in UTF-8
        return f"expected a name in UTF-8, got {error.object[:200]!r}; rename the file or the folder"
    if isinstance(error, ArgumentError):
        from regard.cli.commands import in_flags

        return in_flags(str(error), arguments)
    if isinstance(error, RegardError) or not isinstance(error, OSError) or error.strerror is None:
        return str(error)
    what = f": {os.fsdecode(error.filename)}" if isinstance(error.filename, str | bytes) else ""
    if error.errno == errno.ENOSPC:
        return f"the disk is full{what}; free some space"
    return f"{error.strerror[:1].lower()}{error.strerror[1:]}{what}"


def _say(line: str) -> None:
    if speaks():
        print(f"regard: {line}", file=sys.stderr)


def _write_utf8() -> None:
    """Write UTF-8 whatever the locale is: a translator has to print every script. Names that are not UTF-8 are written
    as they are to standard output, and with escapes to standard error."""
    for stream, errors in ((sys.stdout, "surrogateescape"), (sys.stderr, "backslashreplace")):
        stream.reconfigure(encoding="utf-8", errors=errors)  # type: ignore[union-attr]


def _keep_freed_memory() -> None:
    """Tell glibc's allocator to keep large blocks for the next step instead of handing them back each time.

    This saves a quarter of a training step on the CPU. A program may change the allocator; a library must not.
    """
    import ctypes

    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)
    mallopt(mmap_max, 0)


LIBRARIES = ("torch", "numpy", "numba", "transformers", "tokenizers", "ctranslate2", "matplotlib", "anywidget")


def environment() -> str:
    import platform

    lines = [f"regard {__version__}", f"Python {platform.python_version()} on {platform.platform()}"]
    lines += [f"{name} {installed_version(name) or 'is not installed'}" for name in LIBRARIES]
    return "\n".join([*lines, f"compiled code: {_folder() or 'none'}"])


def _folder() -> str | None:
    """The folder in which the compiled loop of the maps is kept."""
    from regard.tensors.triton_use import has_numba

    if not has_numba():
        return None
    from regard.maps.loop.one_loop import run_in_threads
    from regard.tensors.vector_code import kept_code_folder

    try:
        return kept_code_folder(run_in_threads)
    except RuntimeError:  # no folder can be written
        return None
