"""The interface of tokenizers, the tokens that are not text, and the labels of tokens on an axis."""

import codecs
import functools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

SPACE = "\N{LOWER ONE EIGHTH BLOCK}"
"""The character of SentencePiece for a space."""


class Label(NamedTuple):
    """The text of a label, with the space before a word, and its first and last (inclusive) token."""

    text: str
    pieces: tuple[int, int]


@functools.cache
def byte_values() -> dict[str, int]:
    """The byte of each character of the byte-level alphabet: printable bytes of Latin-1 stand for themselves, and the
    other 68 are, in order, the characters from U+0100."""
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
    """One label for each token: a text, a piece as its tokenizer writes it, or the bytes of a part of a character."""
    return [_label(piece, byte_level and not one) for piece, one in zip(pieces, special, strict=True)]


def _label(piece: str, is_bytes: bool) -> str:
    if not is_bytes or not set(piece) <= byte_values().keys():  # an added token is plain text
        return piece_label(piece)
    content = byte_string(piece)
    try:
        return printed(content.decode())
    except UnicodeDecodeError:
        return "".join(f"<0x{byte:02X}>" for byte in content)


UNPREDICTED = -100
"""The target where nothing is predicted: the id of no token in any vocabulary."""


class Marks(NamedTuple):
    """The ids of the special tokens around a text. The defaults are those of the tokenizers trained here."""

    pad_id: int = 0
    begin_id: int = 1
    end_id: int = 2


class Codec(Protocol):
    """Text to ids and back, for any tokenizer."""

    @property
    def marks(self) -> Marks:
        """The special tokens around a text."""

    def __len__(self) -> int: ...

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        """The ids of each text, without the end token."""

    @property
    def unknown_id(self) -> int | None:
        """The token for text outside the vocabulary; None for tokenizers without gaps."""

    @property
    def lowercases(self) -> bool:
        """True if text is lowercased before it is tokenised, so that decoded text is in lower case too."""

    def surfaces(self, text: str) -> list[str]:
        """The stretch of text of each token, including spaces; empty for a special token."""

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        """The text of ids, without special tokens. `unknown` has the text for each unknown token, else it is U+FFFD."""

    def bytes_of(self, token: int) -> bytes:
        """The bytes that a token adds to a text, in UTF-8; they may be only a part of a character."""

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """The labels of the tokens on an axis, in order; tokens of one character share a label."""

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        """One label for each token."""


def unknown_texts(codec: Codec, text: str, ids: Sequence[int]) -> list[str]:
    """The stretches of a text whose tokens stand for text outside the vocabulary; `ids` are those of the text.

    >>> from regard.tasks.text import Words
    >>> tokenizer = Words().train(["to be"])
    >>> unknown_texts(tokenizer, "to see", tokenizer.encode("to see"))
    ['see']
    """
    if codec.unknown_id is None or codec.unknown_id not in ids:
        return []
    surfaces = codec.surfaces(text)  # those of the template's end are more
    return [surface.strip() for token, surface in zip(ids, surfaces, strict=False) if token == codec.unknown_id]


def finished_text(codec: Codec, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
    """The text of ids that may end within a character, as at a limit of tokens: the part of it is left out."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for token in ids:
        decoder.decode(codec.bytes_of(token))
    text = codec.decode(ids, unknown=unknown)
    for _ in decoder.getstate()[0]:  # libraries write one U+FFFD for the part, or one for each of its bytes
        text = text.removesuffix("\N{REPLACEMENT CHARACTER}")
    return text
