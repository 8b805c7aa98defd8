"""The errors that `regard` raises on purpose.

    RegardError
    ├── ShapeError (ValueError)         a tensor's shape, dtype or device is not what the call needs
    ├── ArgumentError (ValueError)      an argument's value is out of its range
    ├── BackendError (RuntimeError)     the backend that the caller named cannot run this call
    ├── TooLargeError (ValueError)      a dense rendering would exceed the caller's limit
    ├── NonFiniteError (ValueError)     NaN or infinity where a number is needed
    ├── DataError (ValueError)          a line, file or corpus cannot be read; names the file and the line
    ├── FileError (OSError)             a file cannot be written; names it and the reason
    ├── RunFolderError (ValueError)     a run folder or checkpoint is absent, foreign, cut short or does not fit
    ├── NotSeenError (KeyError)         a watch saw no attention of that name
    ├── OverwrittenError (RuntimeError) a part of a call has changed before it was read again
    ├── GradientError (RuntimeError)    no backward pass has handed over the gradient that is asked for
    ├── NotKeptError (ValueError)       a summary does not hold the requested result
    ├── FunctionError (RuntimeError)    a function that was handed in raised, or its result is not usable
    ├── EngineError (RuntimeError)      another engine, such as CTranslate2, failed
    ├── TorchVersionError (ImportError) this torch lacks something; names it, the versions, and the pip line
    └── MissingExtraError (ImportError) an optional dependency is not installed; names the pip line

Each message has the expected value, the actual value and a remedy. The command line prints any of these errors as one
line and exits with status 2. In a program, catch `RegardError` for all of them, or the builtin class in brackets.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Integral

LONGEST = 1_000
"""The most characters of a message: text from a damaged file may be longer."""


class RegardError(Exception):
    """The base class of regard's errors.

    >>> len(str(RegardError("a name: " + "x" * 10_000)))
    1000
    """

    def __init__(self, *args: object) -> None:
        super().__init__(*(_shortened(part) if isinstance(part, str) else part for part in args))


class ShapeError(RegardError, ValueError):
    """A tensor's shape, dtype or device is not what the call needs."""


class ArgumentError(RegardError, ValueError):
    """An argument's value is out of its range."""


class BackendError(RegardError, RuntimeError):
    """The named backend cannot run this call."""


class TooLargeError(RegardError, ValueError):
    """A dense rendering would exceed the caller's limit."""


class NonFiniteError(RegardError, ValueError):
    """There is NaN or infinity where a finite number is needed."""


class DataError(RegardError, ValueError):
    """A line, file or corpus cannot be read; the message names the file and the line."""


class FileError(RegardError, OSError):
    """A file cannot be written; the message names it and the reason. An older file of that name stays as it was."""


class RunFolderError(RegardError, ValueError):
    """A run folder or checkpoint is absent, foreign, cut short or does not fit."""


class NotSeenError(RegardError, KeyError):
    # KeyError shows the repr of its argument, which fits keys, but not sentences.
    __str__ = Exception.__str__


class OverwrittenError(RegardError, RuntimeError):
    """A part of a call has changed since, before its map or its backward pass read it again: the message names it."""


class GradientError(RegardError, RuntimeError):
    """The gradient of a watched call is not available; the message has the reason."""


class NotKeptError(RegardError, ValueError):
    """A summary lacks the requested result; the message lists its content."""


class FunctionError(RegardError, RuntimeError):
    """A caller's function raised (see `__cause__`), or returned an unusable value."""


class EngineError(RegardError, RuntimeError):
    """Another engine failed in a search; the message is its own."""


class TorchVersionError(RegardError, ImportError):
    """This release of torch lacks a needed name, or has changed it; the message has the name and a remedy."""


class MissingExtraError(RegardError, ImportError):
    """An optional dependency is not installed.

    >>> str(MissingExtraError("matplotlib", extra="view"))
    "matplotlib is not installed; it comes with the extra 'view': pip install 'regard[view]'"
    """

    def __init__(self, package: str, *, extra: str) -> None:
        super().__init__(
            f"{package} is not installed; it comes with the extra '{extra}': pip install 'regard[{extra}]'"
        )


@contextmanager
def needs(package: str, *, extra: str) -> Iterator[None]:
    """Import a package of an extra in the block; raises MissingExtraError if it is not installed."""
    try:
        yield
    except ImportError as error:
        raise MissingExtraError(package, extra=extra) from error


def require(given: object, kind: type | tuple[type, ...], name: str, words: str) -> None:
    """Refuse an argument of another kind; a bool is no number.

    Raises:
        ArgumentError: the argument is none of `kind`.

    >>> require("x", int, "size", "a whole number")
    Traceback (most recent call last):
    regard.errors.ArgumentError: size must be a whole number, got str: 'x'
    """
    if not isinstance(given, kind) or (isinstance(given, bool) and kind is not bool):
        raise ArgumentError(f"{name} must be {words}, got {type(given).__name__}: {given!r:.80}")


def require_whole(**given: object) -> None:
    """Refuse arguments that are no whole numbers, by their names; raises ArgumentError."""
    for name, number in given.items():
        require(number, Integral, name, "a whole number")


def _shortened(message: str) -> str:
    if len(message) <= LONGEST:
        return message
    tail = message[-LONGEST // 4 :]
    return f"{message[: LONGEST - len(tail) - 5]} ... {tail}"
