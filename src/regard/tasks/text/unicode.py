"""One form of Unicode for all text, NFC: different encodings of a letter become the same text. And parts of a text."""

import unicodedata
from collections.abc import Iterator

from regard.errors import DataError

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
    """Cut a text into parts of at most 512 characters, before a space if there is one, and never before a mark.

    >>> [len(part) for part in bounded("word " * 200)], [len(part) for part in bounded("-" * 1000)], list(bounded(""))
    ([509, 491], [512, 488], [''])
    """
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
