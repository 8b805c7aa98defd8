"""Everything that `regard` raises on purpose.

    RegardError
    ├── ShapeError (ValueError)         a tensor's shape, dtype or device is not what the call needs
    ├── ArgumentError (ValueError)      an argument's value is out of its range
    ├── BackendError (RuntimeError)     the backend that the caller named cannot run this call
    ├── TooLargeError (ValueError)      a dense rendering would exceed the caller's limit
    ├── NonFiniteError (ValueError)     NaN or infinity where a number is needed
    ├── DataError (ValueError)          a line, file or corpus that cannot be read; names the file and the line
    ├── RunFolderError (ValueError)     a run folder or checkpoint that is absent, foreign, cut short or does not fit
    ├── NotSeenError (KeyError)         a watch saw no attention of that name
    ├── OverwrittenError (RuntimeError) a watched model has written to what a map is read from
    ├── NotKeptError (ValueError)       a summary does not hold what is asked of it
    ├── WorkerError (RuntimeError)       a process that shared the work ended, or failed
    └── MissingExtraError (ImportError) an optional dependency is not installed; names the pip line

Each message says what was expected, what came and what to do. The command line prints any of
them as one line and leaves with status 2; in a program, catch `RegardError` for all of them, or
the builtin in brackets.
"""


class RegardError(Exception):
    """The root of every error that regard raises on purpose."""


class ShapeError(RegardError, ValueError):
    """A tensor's shape, dtype or device is not what the call needs."""


class ArgumentError(RegardError, ValueError):
    """An argument's value is out of its range."""


class BackendError(RegardError, RuntimeError):
    """The backend that the caller named cannot run this call."""


class TooLargeError(RegardError, ValueError):
    """A dense rendering would exceed the caller's limit."""


class NonFiniteError(RegardError, ValueError):
    """NaN or infinity where a number is needed."""


class DataError(RegardError, ValueError):
    """A line, file or corpus that cannot be read; the message names the file and the line."""


class RunFolderError(RegardError, ValueError):
    """A run folder or checkpoint that is absent, foreign, cut short or does not fit."""


class NotSeenError(RegardError, KeyError):
    """A watch saw no attention of that name, or could not read it."""

    # KeyError shows the repr of its argument, which is meant for keys and spoils sentences.
    __str__ = Exception.__str__


class OverwrittenError(RegardError, RuntimeError):
    """A watched model has written to what a map is read from."""


class NotKeptError(RegardError, ValueError):
    """A summary does not hold what is asked of it; the message says what it holds."""


class WorkerError(RegardError, RuntimeError):
    """A process that shared the work ended before it had answered, or failed; the message says how."""


class MissingExtraError(RegardError, ImportError):
    """An optional dependency is not installed.

    >>> str(MissingExtraError("matplotlib", extra="view"))
    "matplotlib is not installed; it comes with the extra 'view': pip install 'regard[view]'"
    """

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; it comes with the extra '{extra}': pip install 'regard[{extra}]'"
        )
