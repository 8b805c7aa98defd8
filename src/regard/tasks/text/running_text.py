"""Running text: documents as one row of tokens in a memory-mapped array, and text streamed token by token."""

import codecs
from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from typing import Literal, NamedTuple, get_args

from regard.errors import ArgumentError
from regard.tasks.text.codec import Codec
from regard.tasks.text.lines import StrPath
from regard.tasks.text.pair_store import CHUNK_PAIRS, TokenFolder, chunks, dtype_below, growing, write_about
from regard.tasks.text.tokenizers import BOS, EOS, UNK, Tokenizer
from regard.tasks.text.unicode import bounded
from regard.tensors.ranges import require_one_of

DocumentUnit = Literal["file", "paragraphs", "lines"]
"""The unit of a document: the whole file, the text between blank lines, or each line."""


class TextPiece(NamedTuple):
    text: str
    """The text, with its line feed at the end of a line; without it if each line is a document."""
    begins: bool
    """True if a document begins with it."""


def pieces(lines: Iterable[str], documents: DocumentUnit) -> Iterator[TextPiece]:
    r"""The pieces of documents, from lines without their line feeds."""
    require_one_of("documents", documents, get_args(DocumentUnit))
    begins = True
    for line in lines:
        if documents == "file" or line.strip():
            for part in bounded(line if documents == "lines" else line + "\n"):
                yield TextPiece(part, begins)
                begins = False
            begins = documents == "lines"
        else:
            begins = True


def encode_text(tokenizer: Tokenizer, text: str) -> list[int]:
    """The tokens of a text as a store has them: each line, with its line feed, by itself, and a long one in parts."""
    *lines, last = text.split("\n")
    parts = chain.from_iterable(map(bounded, (*(line + "\n" for line in lines), last)))
    return list(chain.from_iterable(tokenizer.encode_batch(parts)))


class TextStore(TokenFolder):
    """BOS, document, EOS, BOS, document, EOS, ...; only pages in use are loaded. If the whole file is one document
    ("file"), there is no EOS: the text may have been cut, so it has no true end."""

    counts = ("text_bytes", "documents", "unknown")

    def __init__(self, path: StrPath) -> None:
        super().__init__(path)
        self.text_bytes: int = self.about["text_bytes"]
        """The bytes of the text in UTF-8. The separator of documents, tokenised as EOS, counts as one byte."""
        self.documents: int = self.about["documents"]
        self.unknown: int = self.about["unknown"]

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def build(cls, path: StrPath, pieces: Iterable[TextPiece], tokenizer: Tokenizer, *, is_whole: bool) -> "TextStore":
        """Tokenise pieces into a folder, chunk by chunk, in place of an older one, which stays where an error ends the
        work."""
        text_bytes = documents = unknown = 0
        with growing(path, tokens=dtype_below(len(tokenizer))) as (add,):
            for chunk in chunks(pieces, CHUNK_PAIRS):
                row: list[int] = []
                for piece, ids in zip(chunk, tokenizer.encode_batch(piece.text for piece in chunk), strict=True):
                    if piece.begins:
                        row += [EOS, BOS] if is_whole and documents else [BOS]
                        documents += 1
                    row += ids
                add(row)
                unknown += row.count(UNK)
                text_bytes += sum(len(piece.text.encode()) + (is_whole and piece.begins) for piece in chunk)
            if is_whole and documents:
                add([EOS])
        write_about(path, tokenizer, text_bytes=text_bytes, documents=documents, unknown=unknown)
        return cls(path)


class TextStream:
    """Text from streamed tokens. Half characters and possible stop strings are held back."""

    def __init__(self, tokenizer: Codec, *, stop: Sequence[str] = ()) -> None:
        if not all(stop):
            raise ArgumentError("a stop string must have at least one character")
        self._tokenizer = tokenizer
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._stop = tuple(stop)
        self._held = ""
        self.stopped = False
        """True after a stop string. It is not returned, and neither is anything after it."""

    def add(self, token: int) -> str:
        return self._hand_out(self._decoder.decode(self._tokenizer.bytes_of(token)), is_last=False)

    def finish(self) -> str:
        """Return the text still held back. A part of a character at the end is left out: no character was written."""
        return self._hand_out("", is_last=True)

    def _hand_out(self, text: str, *, is_last: bool) -> str:
        if self.stopped:
            return ""
        self._held += text
        ends = [at for one in self._stop if (at := self._held.find(one)) >= 0]
        if ends:
            self.stopped = True
            text, self._held = self._held[: min(ends)], ""
            return text
        keep = 0 if is_last else max((_overlap(self._held, one) for one in self._stop), default=0)
        cut = len(self._held) - keep
        text, self._held = self._held[:cut], self._held[cut:]
        return text


def _overlap(text: str, stop: str) -> int:
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)
