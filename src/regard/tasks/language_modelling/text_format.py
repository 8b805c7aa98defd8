"""How texts of a language model become tokens, begin and end: as trained here, or as a downloaded folder has it."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

from regard.text.pretrained import TokenizerFile
from regard.text.running_text import DocumentUnit, PieceBytes, encode_text, pieces
from regard.text.tokenizers import BOS, EOS, UNK, Tokenizer


class Row(NamedTuple):
    """A text as one row of tokens, and its bytes in UTF-8."""

    tokens: list[int]
    text_bytes: int


class TextFormat(Protocol):
    """What a `Writer` needs to know of texts."""

    @property
    def begin_id(self) -> int:
        """What a text begins with."""
        ...

    @property
    def end_ids(self) -> Sequence[int]:
        """Any of them ends a text that is written."""
        ...

    @property
    def writable(self) -> Sequence[int]:
        """The tokens that may be written."""
        ...

    @property
    def tokenizer(self) -> PieceBytes:
        """Tokens to text."""
        ...

    def prompt(self, text: str) -> list[int]:
        """What the model reads before it writes on."""
        ...

    def wholes(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text with its begin mark, and its end mark if texts end."""
        ...

    def row(self, lines: Iterable[str]) -> Row:
        """Lines as one row."""
        ...


class TrainedFormat:
    """As training cut its text.

    Args:
        tokenizer: the one that was trained.
        documents: what a document was in training; where one is "file", texts have no end.
    """

    begin_id = BOS
    end_ids = (EOS,)

    def __init__(self, tokenizer: Tokenizer, documents: DocumentUnit) -> None:
        self.tokenizer = tokenizer
        self._documents: DocumentUnit = documents
        self._ends = documents != "file"
        # A text has no second beginning and no unknown character, and an end only if those of the training had one.
        self.writable = [*([EOS] if self._ends else []), *range(UNK + 1, len(tokenizer))]

    def prompt(self, text: str) -> list[int]:
        """The begin mark and the text."""
        return [BOS, *encode_text(self.tokenizer, text)]

    def wholes(self, texts: Sequence[str]) -> list[list[int]]:
        """Each line with its begin mark, and its end mark if documents end."""
        end = [EOS] if self._ends else []
        return [[BOS, *ids, *end] for ids in self.tokenizer.encode_batch(texts)]

    def row(self, lines: Iterable[str]) -> Row:
        """The tokens of a text as training saw them."""
        ids: list[int] = []
        text_bytes = 0
        for piece in pieces(lines, self._documents):
            if piece.begins:
                ids += [EOS, BOS] if ids and self._ends else [BOS]
            ids += self.tokenizer.encode(piece.text)
            text_bytes += len(piece.text.encode()) + (self._ends and piece.begins)
        return Row([*ids, EOS] if ids and self._ends else ids, text_bytes)


class DownloadedFormat:
    """As a folder's tokenizer.json says.

    A prompt is what its template makes of a text (GPT-2's adds nothing, Llama's a begin mark); a text that is
    scored has the begin mark before it, so that its first token is predicted from something.

    Args:
        tokenizer: the folder's.
        begin_id: what a text begins with.
        end_ids: any of them ends one.
        banned_ids: tokens that are never written.
    """

    def __init__(
        self, tokenizer: TokenizerFile, begin_id: int, end_ids: Sequence[int], banned_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.begin_id, self.end_ids = begin_id, end_ids
        self.writable = [token for token in range(len(tokenizer)) if token not in banned_ids]

    def prompt(self, text: str) -> list[int]:
        """As its template has it; the begin mark if there is no text."""
        return self.tokenizer.encode_batch([text])[0] or [self.begin_id]

    def wholes(self, texts: Sequence[str]) -> list[list[int]]:
        """Each text after a begin mark; its end is not scored."""
        begin = self.begin_id
        return [ids if ids[:1] == [begin] else [begin, *ids] for ids in self.tokenizer.encode_batch(texts)]

    def row(self, lines: Iterable[str]) -> Row:
        """The lines as one text, cut as a whole."""
        text = "".join(f"{line}\n" for line in lines)
        return Row(self.wholes([text])[0] if text else [], len(text.encode()))
