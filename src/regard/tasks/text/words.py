"""Words, by Unicode's rules and by dictionaries for scripts that put no space between them.

Tags, copied words and counts of words all go by `segments`. A tokenizer.json holds no
dictionary: there the patterns keep letters and their `MARKS` together.
"""

import re
import unicodedata
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

from regard.errors import needs

Span = tuple[int, int]
"""The first character of a stretch of text, and the one behind its last."""

MARKS = r"\p{M}\u200C\u200D"
"""Marks of letters, and the joiners between these, for a class of a pattern."""
SPACED = r"[\p{WB=ALetter}\p{WB=HebrewLetter}\p{WB=Numeric}\p{WB=ExtendNumLet}]"
"""A letter or digit of a script that puts spaces between words."""
APOSTROPHE = re.compile("(['’])")


def segments(text: str) -> list[str]:
    """A text cut at the boundaries of its words: words, signs and white space, which together are the text.

    Boundaries are those of Unicode and, in Chinese, Japanese, Thai, Lao, Khmer and Burmese, of the dictionaries of ICU.
    An apostrophe is a sign of its own, as the annex proposes for French and Italian: `l'homme` has the word `homme`.

    Source: Unicode Standard Annex #29, section 4; https://unicode-org.github.io/icu/userguide/boundaryanalysis/

    >>> segments("l'été, हिन्दी 3.14"), segments("我今天喜欢茶。")
    (['l', "'", 'été', ',', ' ', 'हिन्दी', ' ', '3.14'], ['我', '今天', '喜欢', '茶', '。'])
    """
    return [part for piece in _breaker()(text, "") for part in APOSTROPHE.split(piece) if part]


@cache
def _breaker() -> Callable[[str, str], Any]:
    with needs("icu4py", extra="train"):
        from icu4py.breakers import WordBreaker
    return WordBreaker


def boundaries(text: str) -> list[int]:
    """Where the segments of a text begin, and its end.

    >>> boundaries("a cat")
    [0, 1, 2, 5]
    """
    found = [0]
    for segment in segments(text):
        found.append(found[-1] + len(segment))
    return found


def units(text: str) -> list[Span]:
    """Where the words and signs of a text stand.

    >>> units("the house, now")
    [(0, 3), (4, 9), (9, 10), (11, 14)]
    """
    return [(begin, end) for begin, end in pairwise(boundaries(text)) if not is_blank(text[begin:end])]


def is_word(text: str) -> bool:
    """Whether a text has a letter or digit."""
    return any(map(str.isalnum, text))


def is_blank(text: str) -> bool:
    """Whether a text has nothing that is printed: white space, and characters that only format or control.

    >>> is_blank(" \\u00a0\\ufeff"), is_blank("."), is_blank("")
    (True, False, True)
    """
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


def is_spaced(text: str) -> bool:
    """Whether a text ends within a word of a script that puts spaces between words.

    >>> is_spaced("cat"), is_spaced("हिन्दी"), is_spaced("cat,"), is_spaced("木"), is_spaced("")
    (True, True, False, False, False)
    """
    return _pattern(SPACED + rf"[{MARKS}]*\Z").search(text) is not None


def has_unspaced(text: str) -> bool:
    """Whether a text has letters of a script without spaces between words.

    >>> has_unspaced("GPU的"), has_unspaced("été 5"), has_unspaced("안녕")
    (True, False, False)
    """
    return _pattern(rf"(?!{SPACED})\p{{L}}").search(text) is not None


def lengthens(piece: str) -> bool:
    """Whether a piece, written behind a word of such a script, makes it longer.

    >>> lengthens("s"), lengthens("्दी"), lengthens("'s"), lengthens(" s"), lengthens("木")
    (True, True, False, False, False)
    """
    return _pattern(rf"{SPACED}|[{MARKS}]").match(piece) is not None


@cache
def _pattern(pattern: str) -> Any:
    with needs("regex", extra="train"):
        import regex
    return regex.compile(pattern)


def stretches(surfaces: Sequence[str], text: str) -> list[tuple[int, int]]:
    """Where the surfaces of tokens stand in their text; pieces of one character stand at the same place.

    >>> stretches(["a", " b", "é", "é", "!"], "a bé!")
    [(0, 1), (1, 3), (3, 4), (3, 4), (4, 5)]
    """
    found, place = list[tuple[int, int]](), 0
    for surface in surfaces:
        begin = text.find(surface, place) if surface else place
        if begin < 0 or text[place:begin].strip():  # a further piece of the character before it
            found.append(found[-1] if found else (0, 0))
            continue
        place = begin + len(surface)
        found.append((begin, place))
    return found
