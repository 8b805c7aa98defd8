"""Errors in the arguments of the command line, told in one line made from tyro's own data, and the texts of help."""

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from itertools import groupby, zip_longest
from typing import NamedTuple

from tyro import _errors as events  # tyro's only data about errors; pyproject.toml bounds its version

from regard.errors import ArgumentError


class Known(NamedTuple):
    flags: Sequence[str] = ()
    commands: Sequence[str] = ()
    """The words in the place of a command or a task."""
    lists: Sequence[str] = ()
    """The flags with one value or more."""


AskKnown = Callable[[], Known]
"""Returns them; called only when an argument is unknown."""


@contextmanager
def told_in_one_line(known: AskKnown) -> Iterator[None]:
    """Raise an error of one line for wrong arguments, instead of tyro's box of several lines."""

    def tell(event: events.ParseErrorEvent) -> None:
        said = _told(event, known)
        if said is not None:
            raise ArgumentError(f"{said}; --help says more")

    with events.on_parse_error(tell):
        yield


def refuse_bare_lists(arguments: Sequence[str], known: Known) -> None:
    """Refuse a flag for one value or more without any: tyro would take it for an absent flag.

    >>> refuse_bare_lists(["--data", "--out", "x"], Known(flags=["--data", "--out"], lists=["--data"]))
    Traceback (most recent call last):
    regard.errors.ArgumentError: Missing value for argument '--data'
    """
    for one, following in zip_longest(arguments, arguments[1:]):
        if one in known.lists and (following is None or following.partition("=")[0] in known.flags):
            raise ArgumentError(f"Missing value for argument '{one}'")


def _told(event: events.ParseErrorEvent, known: AskKnown) -> str | None:
    """The message of an event; None for a later tyro's kinds, which tyro then prints itself."""
    match event:
        case events.UnrecognizedArgs():
            return _unrecognized(event.tokens, known())
        case events.MissingArgs():
            unrecognized = [_unrecognized(event.unrecognized_tokens, known())] if event.unrecognized_tokens else []
            if unrecognized and not event.unrecognized_tokens[0].startswith("-"):
                return unrecognized[0]  # of another command, other arguments would be missing
            return "; ".join([*unrecognized, *_missing(event)])
        case events.MissingSubcommand():
            return f"Expected one of {{{', '.join(event.subcommand_spec.parser_from_name)}}}"
        case events.SubcommandConflict():
            return f"{event.attempted} must stand before all flags, and comes after {event.trigger_flag}"
        case events.InvalidChoice():
            # tyro has the choices of an optional value in a set, whose order is another in each process.
            choices = sorted({*event.choices} - {"None"}) if "None" in event.choices else event.choices
            name = event.argument.display_name()
            return f"Error parsing {name}: expected one of {', '.join(choices)}, got {event.value!r}"
        case events.BadValue(reason="too_few_values"):
            return f"Missing value for argument '{event.argument.display_name()}'"
        case events.InstantiationFailure():
            place = "" if event.argument is None else f"Error parsing {event.argument.display_name()}: "
            return f"{place}{_of_numbers(event.message)}"
    return None


def _of_numbers(message: str) -> str:
    """Python's error about a text in place of a number, in other words.

    >>> _of_numbers("invalid literal for int() with base 10: 'x'")
    "expected a whole number, got 'x'"
    >>> _of_numbers("could not convert string to float: 'x'")
    "expected a number, got 'x'"
    >>> _of_numbers("no type matching INT could be instantiated from ['x'].\\n\\nGot errors:\\n- <class 'int'>: "
    ...             "invalid literal for int() with base 10: 'x'")
    "expected a whole number, got 'x'"
    >>> _of_numbers("no type matching INT|{mean} could be instantiated from ['x'].\\n\\nGot errors:\\n- <class 'int'>: "
    ...             "invalid literal for int() with base 10: 'x'\\n- typing.Literal['mean']: ['x'] does not match ...")
    "expected a whole number or mean, got 'x'"
    """
    # An optional value is tried as each of its types; None is written by leaving out the flag.
    message = re.sub(r"^no type matching .*?Got errors:\s+- <class '(int|float)'>: ", "", message, flags=re.DOTALL)
    message, *others = re.split(r"\s+- typing\.Literal\['(\w+)'\]: .*", message, flags=re.DOTALL)
    wanted = " or ".join(["a whole number", *filter(None, others)])
    message = re.sub(r"^invalid literal for int\(\) with base 10: ", f"expected {wanted}, got ", message)
    return re.sub("^could not convert string to float: ", "expected a number, got ", message)


def _missing(event: events.MissingArgs) -> list[str]:
    by_command = groupby(event.missing_arguments, lambda one: f"{event.prog} {one.source_parser.prog_suffix}".strip())
    return [
        f"Missing from {command}: {', '.join(one.arg.get_invocation_text()[1].as_str_no_ansi() for one in missing)}"
        for command, missing in by_command
    ]


def _unrecognized(tokens: Sequence[str], known: Known) -> str:
    """The unknown arguments, and the nearest flags or commands.

    >>> _unrecognized(["--bem", "2"], Known(flags=["--beam", "--nbest"]))
    'Unrecognized options: --bem 2; perhaps you meant --beam'
    >>> _unrecognized(["-Hello."], Known(flags=["--beam"]))
    'Unrecognized options: -Hello.; a text that begins with - stands after --'
    >>> _unrecognized(["trian"], Known(commands=["train", "view"]))
    "unknown command 'trian': train?"
    >>> _unrecognized(["fly"], Known(commands=["train", "view"]))
    "unknown command 'fly': expected one of train, view"
    """
    if known.commands and not tokens[0].startswith("-"):
        meant = get_close_matches(tokens[0], known.commands, n=1, cutoff=0.6)
        every = f"expected one of {', '.join(known.commands)}"
        return f"unknown command {tokens[0]!r}: {f'{meant[0]}?' if meant else every}"
    said = f"Unrecognized options: {' '.join(tokens)}"
    if re.match("-[^-]", tokens[0]):
        return f"{said}; a text that begins with - stands after --"
    words = [token.partition("=")[0].replace("_", "-") for token in tokens]
    meant = [found for word in words for found in get_close_matches(word, known.flags, n=1, cutoff=0.7)]
    return f"{said}; perhaps you meant {', '.join(meant)}" if meant else said


def with_flags(message: str, flags: Sequence[str]) -> str:
    """A message in which a setting or an argument of a function has the name of its flag.

    Names of two words or more are replaced wherever they stand, and a single word where a message gives its limits.

    >>> with_flags("batch_tokens must be at least 1, got 0", ["--batch-tokens"])
    '--batch-tokens must be at least 1, got 0'
    >>> with_flags("dim must be a multiple of num_heads, got 3 and 2", ["--model.dim", "--model.num-heads"])
    '--model.dim must be a multiple of --model.num-heads, got 3 and 2'
    >>> with_flags("/data/batch_tokens/a is empty", ["--batch-tokens"])
    '/data/batch_tokens/a is empty'
    """
    by_name: dict[str, str] = {}
    for flag in flags:
        by_name.setdefault(flag.removeprefix("--").rpartition(".")[2].replace("-", "_"), flag)
    several = r"(?<![\w./'\"-])[a-z]+(?:_[a-z0-9]+)+(?![\w/'\"])"
    alone = r"^[a-z0-9]+(?=:| must be )|(?<=: )[a-z]+(?= must be )|\bdim(?= / )"
    return re.sub(f"{several}|{alone}", lambda found: by_name.get(found[0], found[0]), message)


EXAMPLES: dict[str, tuple[str, ...]] = {
    "": (
        "regard train --data pairs.tsv --out runs/mine",
        'regard translate runs/mine "a sentence"',
        "regard train --help",
    ),
    "train": (
        "regard train --data pairs.tsv --out runs/mine --epochs 10",
        "regard train --data train.en train.de --out runs/mine",
        "regard train language-model --data book.txt --out runs/book",
        "regard train --out runs/mine --resume",
        "regard train translation --help",
    ),
    "train translation": (
        "regard train --data pairs.tsv --out runs/mine --epochs 10",
        "regard train --data train.en train.de --valid valid.en valid.de --out runs/mine --size tiny",
        "regard train --out runs/mine --resume --steps 20000",
    ),
    "train language-model": (
        "regard train language-model --data book.txt --out runs/book --epochs 10",
        "regard train language-model --data *.txt --out runs/books --tokenizer characters",
    ),
    "translate": (
        'regard translate runs/mine "a sentence"',
        "regard translate runs/mine --input big.txt --output big.de",
        "regard translate runs/mine --input big.txt --output big.de --resume",
    ),
    "generate": ('regard generate runs/book "Once upon a time" --max-tokens 100 --temperature 0.8',),
    "evaluate": (
        "regard evaluate runs/mine --data test.tsv",
        "regard evaluate runs/mine --data test.en --references test.de",
        "regard evaluate runs/book --data other.txt",
    ),
    "align": ("regard align runs/mine --data pairs.tsv > links",),
    "view": (
        'regard view runs/mine "a sentence" "another one" --out pictures',
        "regard view gpt2 --input text.txt --layers 0 -1 --out page.html",
        "regard view vit-base --image cat.png",
        "regard view antiberty --tokens 2 5 6 7 3 --terminal",
    ),
    "measure": (
        "regard measure gpt2 --data 'shards/*.parquet' --out stats --max-tokens 512",
        "regard measure gpt2 --data 'shards/*.parquet' --out stats --max-tokens 512 --resume",
        "regard measure runs/book --data lines.txt --out stats --statistics entropy induction top_keys",
    ),
    "atlas": (
        "regard atlas stats --out page.html",
        "regard atlas stats-before stats-after --out page.html --csv heads.csv",
    ),
    "serve": (
        "regard serve runs/mine --languages de-en",
        "regard serve runs/mine runs/book --port 8080",
        "regard serve opus-mt-en-de --host 0.0.0.0 --token-file token.txt --allow-host example.org",
    ),
    "check": ("regard check runs/mine", "regard check opus-mt-en-de", "regard check my_package.models:make --causal"),
    "export": (
        "regard export runs/mine --to huggingface --out mine-hf",
        "regard export runs/mine --to ctranslate2 --out mine-ct2",
    ),
    "demo": ("regard demo --out demo",),
}


def described(text: str, examples: Sequence[str]) -> str:
    return "\n\n".join([text, "\n".join(["For example:", *(f"  {line}" for line in examples)])])


def documented(command: type, name: str) -> str:
    text = inspect.getdoc(command) or ""
    if name.startswith("train "):
        text += " --help shows the flags that a first run needs, and --help-all shows all."
    return described(text, EXAMPLES[name])
