"""Labels of tokens on an axis: readable text, with one label for all pieces of a shared character."""

import codecs
import functools
from collections.abc import Sequence
from typing import NamedTuple

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character of SentencePiece for a space."""


class Label(NamedTuple):
    """The text of a label, with the space before a word, and its first and last (inclusive) token."""

    text: str
    pieces: tuple[int, int]


@functools.cache
def byte_values() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet.

    Printable bytes of Latin-1 stand for themselves. The other 68 are, in order, the characters from U+0100.

    >>> byte_values()["a"], byte_values()["\u0120"]
    (97, 32)
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}


def byte_string(piece: str) -> bytes:
    """The bytes of a byte-level piece.

    >>> byte_string("Ġof")
    b' of'
    """
    return bytes(map(byte_values().__getitem__, piece))


def printed(text: str) -> str:
    r"""Text as an axis shows it: a space before it stays one, and each other white space is a sign of its own.

    >>> printed(" of"), printed("  "), printed("\n\t"), printed("\u3000"), printed("")
    (' of', '␣␣', '↵⇥', 'U+3000', '')
    """
    from regard.views.labels import printable  # the views bring torch, which the flags need not wait for

    kept = text if text.isspace() else " " * text.startswith(" ") + text.strip(" ")
    is_sign = [char.isspace() and (char != " " or text.isspace()) for char in kept]
    return "".join(printable(char) if sign else char for char, sign in zip(kept, is_sign, strict=True))


def piece_label(piece: str) -> str:
    """The label of a piece that is text.

    >>> piece_label("▁the"), piece_label("##ing"), piece_label("<0x0A>")
    (' the', '##ing', '<0x0A>')
    """
    return printed(piece.replace(SPACE, " "))


def byte_level_labels(pieces: Sequence[str], special: Sequence[bool]) -> list[Label]:
    """Labels of byte-level pieces. Pieces of one character share a label.

    >>> byte_level_labels(["Ġ", "æ", "Ĺ", "¥"], [False] * 4)
    [Label(text='␣', pieces=(0, 0)), Label(text='日', pieces=(1, 3))]
    """
    labels: list[Label] = []
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    text, first = "", 0
    for i, piece in enumerate(pieces):
        ends_here = i + 1 == len(pieces) or special[i] or special[i + 1]
        text += piece if special[i] else decoder.decode(byte_string(piece), ends_here)
        if ends_here or not decoder.getstate()[0]:
            labels.append(Label(printed(text), (first, i)))
            text, first = "", i + 1
    return labels


def label_of_each(pieces: Sequence[str], special: Sequence[bool], *, byte_level: bool) -> list[str]:
    """One label for each token: a text, a piece as its tokenizer writes it, or the bytes of a part of a character.

    >>> label_of_each(["Ġto", "Ċ", "æ", "Ĺ¥", "<s>"], [False] * 4 + [True], byte_level=True)
    [' to', '↵', '<0xE6>', '<0x97><0xA5>', '<s>']
    """
    return [_label(piece, byte_level and not one) for piece, one in zip(pieces, special, strict=True)]


def _label(piece: str, is_bytes: bool) -> str:
    if not is_bytes or not set(piece) <= byte_values().keys():  # an added token is plain text
        return piece_label(piece)
    content = byte_string(piece)
    try:
        return printed(content.decode())
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in content)
