"""Errors in the arguments of the command line, told in one line, which is made from tyro's own data about them."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby
from typing import NamedTuple

from tyro import _errors as events  # the only data that tyro has about errors; pyproject.toml bounds its version

from regard.errors import ArgumentError


class Known(NamedTuple):
    """The flags and commands that the user could have meant by an unknown argument."""

    flags: Sequence[str] = ()
    commands: Sequence[str] = ()
    """The words that may stand where a command or a task was expected."""


AskKnown = Callable[[], Known]
"""Returns them; called only when an argument is unknown."""


@contextmanager
def told_in_one_line(known: AskKnown) -> Iterator[None]:
    """Raise an error of one line for wrong arguments, instead of the box of several lines that tyro would print.

    Args:
        known: returns the flags and commands that the user could have meant by an unknown argument.

    Raises:
        ArgumentError: tyro, called in the block, finds the arguments wrong.
    """

    def tell(event: events.ParseErrorEvent) -> None:
        said = _told(event, known)
        if said is not None:
            raise ArgumentError(f"{said}; --help says more")

    with events.on_parse_error(tell):
        yield


def _told(event: events.ParseErrorEvent, known: AskKnown) -> str | None:
    """The message of an event; None for kinds that a later tyro may add, which tyro then prints itself."""
    match event:
        case events.UnrecognizedArgs():
            return _unrecognized(event.tokens, known())
        case events.MissingArgs():
            unrecognized = [_unrecognized(event.unrecognized_tokens, known())] if event.unrecognized_tokens else []
            return "; ".join([*unrecognized, *_missing(event)])
        case events.MissingSubcommand():
            return f"Expected one of {{{', '.join(event.subcommand_spec.parser_from_name)}}}"
        case events.SubcommandConflict():
            return f"{event.attempted} must stand before all flags, and comes after {event.trigger_flag}"
        case events.InvalidChoice():
            choices = ", ".join(event.choices)
            return f"Error parsing {event.argument.display_name()}: expected one of {choices}, got {event.value!r}"
        case events.BadValue(reason="too_few_values"):
            return f"Missing value for argument '{event.argument.display_name()}'"
        case events.InstantiationFailure():
            place = "" if event.argument is None else f"Error parsing {event.argument.display_name()}: "
            return f"{place}{event.message}"
    return None


def _missing(event: events.MissingArgs) -> list[str]:
    """The missing arguments of each sub-command that lacks any."""
    by_command = groupby(event.missing_arguments, lambda one: f"{event.prog} {one.source_parser.prog_suffix}".strip())
    return [
        f"Missing from {command}: {', '.join(one.arg.get_invocation_text()[1].as_str_no_ansi() for one in missing)}"
        for command, missing in by_command
    ]


def _unrecognized(tokens: Sequence[str], known: Known) -> str:
    """The unknown arguments, and the flags or commands that the user could have meant.

    >>> _unrecognized(["--bem", "2"], Known(flags=["--beam", "--nbest"]))
    'Unrecognized options: --bem 2; perhaps you meant --beam'
    >>> _unrecognized(["fly"], Known(commands=["train", "view"]))
    'Unrecognized options: fly; Available subcommands: train, view'
    """
    said = f"Unrecognized options: {' '.join(tokens)}"
    words = [token.partition("=")[0].replace("_", "-") for token in tokens]
    candidates = [*known.flags, *known.commands]
    meant = [found for word in words for found in get_close_matches(word, candidates, n=1, cutoff=0.7)]
    if meant:
        return f"{said}; perhaps you meant {', '.join(meant)}"
    is_a_word = not tokens[0].startswith("-")
    return f"{said}; Available subcommands: {', '.join(known.commands)}" if is_a_word and known.commands else said
