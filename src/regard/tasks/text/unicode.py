"""One form of Unicode for all text, NFC: different encodings of a letter become the same text. And parts of a text.

Words go by Unicode's rules, and by dictionaries for scripts that put no space between them. A tokenizer.json holds no
dictionary: there the patterns keep letters and their `MARKS` together.
"""

import re
import unicodedata
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

from regard.errors import DataError, needs

MOST_CHARACTERS = 512
"""A longer text is cut where it is tokenised: the trainer of BPE takes quadratic time in the length of a word."""


def normalise(text: str) -> str:
    r"""Text in Unicode's composed form, NFC.

    Raises:
        DataError: the text holds half of a surrogate pair, which UTF-8 cannot encode.

    >>> normalise("e\u0301") == "\u00e9"
    True
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"expected text that UTF-8 can write, got half of a surrogate pair (U+{ord(text[error.start]):04X}) "
            f"at character {error.start + 1}; read the text as UTF-8 or leave that character out"
        ) from None
    return unicodedata.normalize("NFC", text)


def bounded(text: str) -> Iterator[str]:
    """Cut a text into parts of at most 512 characters, before a space if there is one, and never before a mark."""
    begin = 0
    while len(text) - begin > MOST_CHARACTERS:
        end = text.rfind(" ", begin + 1, begin + MOST_CHARACTERS)
        if end < 0:
            end = begin + MOST_CHARACTERS
            while end > begin + 1 and unicodedata.combining(text[end]):
                end -= 1
        yield text[begin:end]
        begin = end
    yield text[begin:]


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


def is_word(text: str) -> bool:
    return any(map(str.isalnum, text))


def is_blank(text: str) -> bool:
    """Whether a text has nothing that is printed: white space, and characters that only format or control.

    >>> is_blank(" \\u00a0\\ufeff"), is_blank("."), is_blank("")
    (True, False, True)
    """
    return all(character.isspace() or unicodedata.category(character) in ("Cc", "Cf") for character in text)


def has_unspaced(text: str) -> bool:
    """Whether a text has letters of a script without spaces between words.

    >>> has_unspaced("GPU的"), has_unspaced("été 5"), has_unspaced("안녕")
    (True, False, False)
    """
    return _pattern(rf"(?!{SPACED})\p{{L}}").search(text) is not None


@cache
def _pattern(pattern: str) -> Any:
    with needs("regex", extra="train"):
        import regex
    return regex.compile(pattern)
