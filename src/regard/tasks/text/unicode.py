"""One form of Unicode for all text: NFC, so that different encodings of a letter become the same text."""

import unicodedata

from regard.errors import DataError


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
