"""Terms whose translation is given: read from a file, found in sentences, and given a place in translations."""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import DataError
from regard.tasks.text.lines import Lines, StrPath, decoded
from regard.tasks.text.unicode import normalise

UNSPACED = ("CJK", "IDEOGRAPHIC", "HIRAGANA", "KATAKANA", "THAI", "LAO", "KHMER", "MYANMAR")
"""How Unicode's names of letters begin in scripts that put no space between words."""


class Term(NamedTuple):
    """A term of the source, and how it must be translated."""

    source: str
    target: str


class Occurrence(NamedTuple):
    """A term in a sentence."""

    term: Term
    begin: int
    end: int
    """Its first character, and the one behind its last."""


class PlacedTerm(NamedTuple):
    """A term in a translation."""

    occurrence: Occurrence
    first: int
    last: int
    """Its first and its last token."""


def read_terms(path: StrPath) -> tuple[Term, ...]:
    """Read a file with a term, a tab and its translation on each line.

    Raises:
        DataError: the file cannot be read or has no line; or a line is not so, or has a term that came before.
    """
    found: dict[str, Term] = {}
    for number, line in enumerate(Lines(path), start=1):
        cells = [normalise(cell).strip() for cell in decoded(*line).split("\t")]
        if len(cells) != 2 or not all(cells):
            raise DataError(f"{line.place}: expected a term, a tab and its translation, got {line.raw[:60]!r}")
        if cells[0] in found:
            before = [*found].index(cells[0]) + 1
            raise DataError(f"{line.place}: the term {cells[0]!r} was given before, in line {before}: keep one")
        found[cells[0]] = Term(*cells)
        assert number == len(found)
    if not found:
        raise DataError(f"expected terms in {path}, got nothing; name a file that has some")
    return tuple(found.values())


class Terms:
    """Terms and their translations, which translations of sentences with such a term must have.

    Case counts. A term is a whole word or several, except in scripts that put no space between words.

    >>> terms = Terms([Term("cat", "minou"), Term("black cat", "panthère")])
    >>> [(one.term.source, one.begin) for one in terms.found_in("the black cat sees a cat, not cats")]
    [('black cat', 4), ('cat', 21)]
    """

    def __init__(self, terms: Iterable[Term]) -> None:
        self.terms = tuple(terms)
        self._by_source = {normalise(term.source): term for term in self.terms}
        # Of terms that begin at one place the longest counts.
        longest_first = sorted(self._by_source, key=len, reverse=True)
        self._pattern = re.compile("|".join(map(_as_words, longest_first)))

    def found_in(self, sentence: str) -> list[Occurrence]:
        """Where terms stand in a sentence, from left to right. None lies in another."""
        matches = self._pattern.finditer(sentence) if self._by_source else ()
        return [Occurrence(self._by_source[match[0]], *match.span()) for match in matches]


def _as_words(term: str) -> str:
    before = r"(?<!\w)" if _is_spaced(term[0]) else ""
    behind = r"(?!\w)" if _is_spaced(term[-1]) else ""
    return before + re.escape(term) + behind


def _is_spaced(character: str) -> bool:
    """Whether it is a letter or digit that another one beside it would make part of a longer word."""
    return is_letter(character) and not unicodedata.name(character, "").startswith(UNSPACED)


def is_letter(character: str) -> bool:
    """Whether a character may stand in a word.

    >>> is_letter("é"), is_letter("'")
    (True, False)
    """
    return character.isalnum() or character == "_"


def is_spaced(text: str) -> bool:
    """Whether a text ends within a word of a script that puts spaces between words."""
    return bool(text) and _is_spaced(text[-1])


def begins_of_units(pieces: Sequence[str], first: int) -> list[int]:
    """The tokens from `first` on with which a word or sign begins.

    Args:
        pieces: the text each token adds to a translation.
        first: the tokens before it do not count.

    >>> begins_of_units(["un", " pe", "tit", " ", "chat", ".", "木", "々"], 0)
    [0, 1, 4, 5, 6, 7]
    """
    begins, before = [], " "
    for number, piece in enumerate(pieces):
        text = piece.lstrip()
        if text and number >= first:
            is_apart = piece[0].isspace() or not (is_letter(before) and is_letter(text[0]))
            if is_apart or number == first or not (_is_spaced(before) and _is_spaced(text[0])):
                begins.append(number)
        before = piece[-1:] or before
    return begins


def place_of(alignment: Tensor, columns: Sequence[int], pieces: Sequence[str], first: int) -> tuple[int, int]:
    """The tokens of a translation that translate a term of its source: the first, and the one behind the last.

    They are those of the word whose tokens, on average, attend to the term's tokens most, and of the words beside it,
    without a gap, that attend to one of these more than to any other token. Signs are no words.

    Args:
        alignment: (T, S) of the translation.
        columns: the tokens of the term.
        pieces: the text each token of the translation adds; the end mark adds none.
        first: the tokens before it stay as they are.
    """
    begins = begins_of_units(pieces, first)
    ends = [*begins[1:], len(pieces)][: len(begins)]
    units = [(b, e) for b, e in zip(begins, ends, strict=True) if any(map(is_letter, "".join(pieces[b:e])))]
    if not units:
        end = next((n for n in range(first, len(pieces)) if not pieces[n]), len(pieces))
        return (begins[0] if begins else end,) * 2
    rows = torch.stack([alignment[begin:end].cpu().double().mean(0) for begin, end in units])
    low = high = int(rows[:, list(columns)].sum(-1).argmax())
    looks = [best in columns for best in rows.argmax(-1).tolist()]
    while low and looks[low - 1] and units[low - 1][1] == units[low][0]:
        low -= 1
    while high + 1 < len(units) and looks[high + 1] and units[high][1] == units[high + 1][0]:
        high += 1
    return units[low][0], units[high][1]
