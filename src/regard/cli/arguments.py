"""What is wrong with the arguments of the command line, as one line made of what tyro knows about it."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby
from typing import NamedTuple

from tyro import _errors as events  # the only data that tyro has about errors; pyproject.toml bounds its version

from regard.errors import ArgumentError


class Known(NamedTuple):
    """What could have been meant by an argument that is not known."""

    flags: Sequence[str] = ()
    commands: Sequence[str] = ()
    """The words that may stand where a command or a task was expected."""


AskKnown = Callable[[], Known]
"""Asked only when an argument is not known."""


@contextmanager
def told_in_one_line(known: AskKnown) -> Iterator[None]:
    """Raise what tyro finds wrong with the arguments, instead of the box of several lines that it would print.

    Args:
        known: what could have been meant by an argument that is not known.

    Raises:
        ArgumentError: in the block, if something is wrong; the message is one line.
    """

    def tell(event: events.ParseErrorEvent) -> None:
        said = _told(event, known)
        if said is not None:
            raise ArgumentError(f"{said}; --help says more")

    with events.on_parse_error(tell):
        yield


def _told(event: events.ParseErrorEvent, known: AskKnown) -> str | None:
    """What an event says; None for kinds that a later tyro may add, and prints itself."""
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
    """What is missing, for each sub-command that lacks something."""
    by_command = groupby(event.missing_arguments, lambda one: f"{event.prog} {one.source_parser.prog_suffix}".strip())
    return [
        f"Missing from {command}: {', '.join(one.arg.get_invocation_text()[1].as_str_no_ansi() for one in missing)}"
        for command, missing in by_command
    ]


def _unrecognized(tokens: Sequence[str], known: Known) -> str:
    """What is not known, and what could have been meant.

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
