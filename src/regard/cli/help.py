"""The help of a command: its work, in lines as wide as the terminal, and examples to copy."""

import inspect
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from io import BytesIO, TextIOWrapper

WIDEST = 100
"""The most columns of a line of prose."""
COLOUR = re.compile(r"\x1b\[[\d;]*m")
"""The codes for another colour or weight of type in a terminal."""
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


class _HelpLines(TextIOWrapper):
    """A buffer that passes for the terminal behind it: tyro then writes colours."""

    def __init__(self, *, colours: bool) -> None:
        super().__init__(BytesIO(), encoding="utf-8")  # the encoding tells tyro to draw boxes
        self.colours = colours

    def isatty(self) -> bool:
        return self.colours


@contextmanager
def printed_in_lines() -> Iterator[None]:
    """Print the output of the block in lines no wider than the terminal, with every word whole.

    tyro breaks lines only in its boxes, and cuts words there in fewer than 50 columns. Colours are for a terminal
    alone, and for none where NO_COLOR is set (https://no-color.org).
    """
    width = shutil.get_terminal_size().columns
    said = _HelpLines(colours=sys.stdout.isatty() and not os.environ.get("NO_COLOR"))
    try:
        with redirect_stdout(said):
            yield
    finally:
        said.seek(0)
        for line in map(str.rstrip, said):
            seen = COLOUR.sub("", line)
            print(line if len(seen) <= width else _broken(seen, min(width, WIDEST)))


def _broken(line: str, width: int) -> str:
    indent = line[: len(line) - len(line.lstrip())]
    wrapper = textwrap.TextWrapper(width, subsequent_indent=indent and f"{indent}    ", break_on_hyphens=False)
    wrapper.wordsep_simple_re = re.compile(r"(\s+)|(?<=,)(?=\S)")
    return wrapper.fill(line)
