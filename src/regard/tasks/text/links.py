"""Links between the words of a sentence and of its translation, in the Pharaoh format: `0-0 1-2 3?4`."""

import re
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import NamedTuple

from regard.errors import DataError
from regard.tasks.text.forms import items_of
from regard.tasks.text.gate import PairFormat
from regard.tasks.text.lines import BadLines, Line, Lines, Reader, StrPath, decoded
from regard.tasks.text.pairs import PAIR_FORMS, Pair

LINK = re.compile(r"(\d{1,9})([-?p])(\d{1,9})", re.ASCII)

Links = frozenset[tuple[int, int]]
"""Pairs of a source word and a target word, both counted from 0."""


class GoldLinks(NamedTuple):
    """The links of one pair of sentences, as people drew them or a program found them."""

    sure: Links
    possible: Links
    """All acceptable links, including the sure ones."""
    place: str


class LinkedPair(NamedTuple):
    """A sentence, its translation, and the links between their words."""

    source: str
    target: str
    links: str = ""
    """The links as written in the file."""


def read_links(path: StrPath) -> list[GoldLinks]:
    """Read a file with the links of one pair on each line: `0-0 1-2` are sure, `3?4` or `3p4` only possible."""
    return [links_of(decoded(*line), line.place) for line in Lines(path)]


def links_of(text: str, place: str) -> GoldLinks:
    """The links of one line.

    >>> sorted(links_of("0-0 1?2", "links:1").possible)
    [(0, 0), (1, 2)]
    """
    sure, possible = set(), set()
    for cell in text.split():
        match = LINK.fullmatch(cell)
        if match is None:
            raise DataError(f"{place}: expected links like 0-0 or 3?4 (source word, target word), got {cell[:60]!r}")
        link = int(match[1]), int(match[3])
        possible.add(link)
        if match[2] == "-":
            sure.add(link)
    return GoldLinks(frozenset(sure), frozenset(possible), place)


def as_line(links: Links) -> str:
    """Links as a file has them.

    >>> as_line(frozenset({(1, 2), (0, 0)}))
    '0-0 1-2'
    """
    return " ".join(f"{source}-{target}" for source, target in sorted(links))


def check_links(source: str, target: str, links: GoldLinks) -> None:
    """Raise DataError, with the line of the links, if a linked word (separated by spaces) does not exist."""
    counts = len(source.split()), len(target.split())
    for link in sorted(links.possible):
        if link[0] >= counts[0] or link[1] >= counts[1]:
            within = f"words from 0 to {counts[0] - 1} and 0 to {counts[1] - 1}"
            raise DataError(f"{links.place}: expected {within}, got {link[0]}-{link[1]}")


def read_linked_pairs(
    paths: Sequence[StrPath], links: StrPath | None, *, format: PairFormat | None = None, bad_lines: BadLines = "stop"
) -> Reader[LinkedPair]:
    """Pairs as in `read_pairs`, each with a line of a file of links; a bad line of either is a bad pair.

    Without such a file, the links are empty.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     _ = Path(folder, "pairs.tsv").write_text("Good day.\\tBonjour.\\n", encoding="utf-8")
    ...     _ = Path(folder, "links").write_text("0-0 1-0\\n")
    ...     list(read_linked_pairs([Path(folder, "pairs.tsv")], Path(folder, "links")))
    [LinkedPair(source='Good day.', target='Bonjour.', links='0-0 1-0')]
    """
    pairs = items_of(paths, format, PAIR_FORMS)
    must_hold = f"pairs of sentences in {' and '.join(map(str, paths))}"
    linked = (partial(_linked, pair, None) for pair in pairs) if links is None else _beside(pairs, links)
    return Reader(linked, bad_lines=bad_lines, must_hold=must_hold)


def _linked(parse: Callable[[], Pair], line: Line | None) -> LinkedPair:
    pair = parse()
    if line is None:
        return LinkedPair(*pair)
    text = decoded(*line)
    check_links(*pair, links_of(text, line.place))
    return LinkedPair(*pair, text)


def _beside(pairs: Iterator[Callable[[], Pair]], links: StrPath) -> Iterator[Callable[[], LinkedPair]]:
    for count, (pair, line) in enumerate(zip_longest(pairs, Lines(links))):
        if line is None:
            raise DataError(f"{links} ends after line {count}, before the pairs: expected a line of links for each")
        if pair is None:
            raise DataError(f"{line.place}: expected a line of links for each of {count:,} pairs, got one more")
        yield partial(_linked, pair, line)
