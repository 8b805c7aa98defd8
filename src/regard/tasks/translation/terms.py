"""Terms whose translation is given: read from a file, found in sentences, and given a place in translations."""

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import DataError
from regard.tasks.text.codec import Codec, finished_text
from regard.tasks.text.lines import Lines, StrPath, decoded
from regard.tasks.text.unicode import normalise
from regard.tasks.text.words import boundaries, is_word


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
    """Read a file with a term, a tab and its translation on each line."""
    found: dict[str, Term] = {}
    for line in Lines(path):
        cells = [normalise(cell).strip() for cell in decoded(*line).split("\t")]
        if len(cells) != 2 or not all(cells):
            raise DataError(f"{line.place}: expected a term, a tab and its translation, got {line.raw[:60]!r}")
        if cells[0] in found:
            before = [*found].index(cells[0]) + 1
            raise DataError(f"{line.place}: the term {cells[0]!r} was given before, in line {before}: keep one")
        found[cells[0]] = Term(*cells)
    if not found:
        raise DataError(f"expected terms in {path}, got nothing; name a file that has some")
    return tuple(found.values())


class Terms:
    """Terms and their translations, which translations of sentences with such a term must have.

    Case counts. A term is a whole word or several, also in scripts that put no space between words: see `words`.

    >>> terms = Terms([Term("cat", "minou"), Term("black cat", "panthère")])
    >>> [(one.term.source, one.begin) for one in terms.found_in("the black cat sees a cat, not cats")]
    [('black cat', 4), ('cat', 21)]
    """

    def __init__(self, terms: Iterable[Term]) -> None:
        self.terms = tuple(terms)
        self._by_source = {normalise(term.source): term for term in self.terms}
        self._longest = max(map(len, self._by_source), default=0)

    def found_in(self, sentence: str) -> list[Occurrence]:
        """Where terms stand in a sentence, from left to right. None lies in another, and the longest counts."""
        found, borders = list[Occurrence](), boundaries(sentence)
        for number, begin in enumerate(borders):
            if found and begin < found[-1].end:
                continue
            ends = borders[number + 1 : bisect_right(borders, begin + self._longest)]
            terms = ((self._by_source.get(sentence[begin:end]), end) for end in reversed(ends))
            found += [Occurrence(term, begin, end) for term, end in terms if term is not None][:1]
        return found


def added_texts(codec: Codec, tokens: Sequence[int], unknown: Sequence[str] = ()) -> list[str]:
    """The text that each token adds; of tokens that share a character the first adds it."""
    text = finished_text(codec, tokens, unknown=unknown)
    ends = [min(len(codec.decode(tokens[:n], unknown=unknown)), len(text)) for n in range(len(tokens))]
    return [text[begin:end] for begin, end in pairwise(accumulate([*ends, len(text)], max))]


def begins_of_units(pieces: Sequence[str], first: int) -> list[int]:
    """The tokens from `first` on with which a word or sign begins.

    Args:
        pieces: the text each token adds to a translation.
        first: the tokens before it do not count.

    >>> begins_of_units(["un", " pe", "tit", " ", "chat", ".", "木", "々"], 0)
    [0, 1, 4, 5, 6]
    """
    begins, borders, place = [], set(boundaries("".join(pieces))), 0
    for number, piece in enumerate(pieces):
        text = piece.lstrip()
        if text and (number == first or (number > first and place + len(piece) - len(text) in borders)):
            begins.append(number)
        place += len(piece)
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
    units = [(b, e) for b, e in zip(begins, ends, strict=True) if is_word("".join(pieces[b:e]))]
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
