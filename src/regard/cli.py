"""The command line, from the outside: errors as one line, exit statuses, and what a program may set but a library not.

Results go to standard output and everything else to standard error. The exit status is 0; 2 for an error,
which one line explains; 130 after Ctrl-C, 143 when training is stopped by SIGTERM.
"""

import ctypes
import io
import os
import re
import sys
from collections.abc import Callable
from contextlib import redirect_stderr
from functools import partial, wraps
from typing import Any, NoReturn

from regard.errors import ArgumentError, MissingExtraError, RegardError
from regard.training.interrupts import Interrupted
from regard.version import __version__

DESCRIPTION = (
    "Train models with attention on your own text, use them, and see what they attend to. "
    "--version prints the version; --debug, with any command, shows the traceback of an error."
)


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
        # Whoever read the results has gone: the interpreter must not flush to it at exit either.
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
        import tyro
    except ImportError:
        raise MissingExtraError("tyro", extra="text") from None
    from regard.commands import COMMANDS, train_command

    app = tyro.extras.SubcommandApp()
    for command in (train_command(arguments), *COMMANDS):
        app.command(_later(command))
    said = io.StringIO()
    try:
        with redirect_stderr(said):
            run = app.cli(prog="regard", description=DESCRIPTION, args=arguments)
    except SystemExit as end:
        if end.code == 2:
            raise ArgumentError(_one_line(said.getvalue())) from None
        raise
    sys.stderr.write(said.getvalue())
    run()


def _later(command: Callable[..., None]) -> Callable[..., Any]:
    """The command with its arguments, not run yet: what is wrong with them is told in another way than its errors."""

    @wraps(command)
    def bound(*arguments: Any, **options: Any) -> Callable[[], None]:
        return partial(command, *arguments, **options)

    return bound


def _one_line(box: str) -> str:
    """What tyro's box of several lines says, without its frame and its help texts.

    >>> print(_one_line("╭─ Value error ─╮\\n│ Error parsing --beam: 'x' │\\n│ ──── │\\n│ For full helptext, ... │"))
    Error parsing --beam: 'x'; --help says more
    """
    lines = [line.strip("│").rstrip() for line in box.splitlines() if not line.startswith(("╭", "╰"))]
    parts = [part.split("\n") for part in re.split(r"\n ─+\n", "\n".join(lines))]
    wanted = [part for part in parts if not part[0].strip().startswith(("For full helptext", "Argument helptext"))]
    # Help texts stand deeper than the options that they explain.
    told = [" ".join(line.strip() for line in part if not line.startswith(" " * 8)) for part in wanted]
    return "; ".join([*told, "--help says more"])


def _leave(line: str, status: int) -> NoReturn:
    if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
        print(f"regard: {line}", file=sys.stderr)
    sys.exit(status)


def _write_utf8() -> None:
    """Results are UTF-8 whatever the locale: a translator has to print every script."""
    for stream in (sys.stdout, sys.stderr):
        stream.reconfigure(encoding="utf-8")  # type: ignore[union-attr]


def _keep_freed_memory() -> None:
    """Tell glibc's allocator to keep large blocks for the next step instead of handing them back each time.

    Worth a quarter of a training step on the CPU. A program may ask for it, a library may not.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, TypeError, AttributeError):  # not glibc
        return
    trim_threshold, top_pad, mmap_max = -1, -2, -4
    mallopt(trim_threshold, 2**31 - 1)
    mallopt(top_pad, 2**28)
    mallopt(mmap_max, 0)
