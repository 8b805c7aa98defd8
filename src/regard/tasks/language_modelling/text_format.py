"""How the texts of a language model become tokens, begin and end: for a model trained here or a downloaded one."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from regard.tasks.text.running_text import DocumentUnit, encode_text, pieces
from regard.tasks.text.tokenizers import BOS, EOS, UNK, Tokenizer


class Row(NamedTuple):
    tokens: list[int]
    text_bytes: int


class TrainedFormat:
    """The format of a model that was trained here."""

    begin_id = BOS
    """The token that a text begins with."""
    mark_id: int | None = BOS
    """The token that only begins documents, and is not predicted; None if every token may be text."""
    end_ids: Sequence[int] = (EOS,)
    """The tokens that end a text; the model stops after any of them."""

    def __init__(self, tokenizer: Tokenizer, documents: DocumentUnit) -> None:
        self.tokenizer = tokenizer
        self._documents: DocumentUnit = documents
        self._ends = documents != "file"
        # The model never writes a second begin mark or an unknown token, and an end mark only if training had any.
        self.writable = [*([EOS] if self._ends else []), *range(UNK + 1, len(tokenizer))]

    def prompt(self, text: str) -> list[int]:
        return [BOS, *encode_text(self.tokenizer, text)]

    def row(self, lines: Iterable[str]) -> Row:
        ids: list[int] = []
        text_bytes = 0
        for piece in pieces(lines, self._documents):
            if piece.begins:
                ids += [EOS, BOS] if ids and self._ends else [BOS]
            ids += self.tokenizer.encode(piece.text)
            text_bytes += len(piece.text.encode()) + (self._ends and piece.begins)
        return Row([*ids, EOS] if ids and self._ends else ids, text_bytes)


class DownloadedFormat:
    """The format of a downloaded folder, as its tokenizer.json describes it.

    The folder's template makes a prompt from a text: GPT-2's adds nothing, Llama's adds a begin mark. A text that is
    scored always has the begin mark before it, so that its first token can be predicted too.
    """

    mark_id: int | None = None

    def __init__(
        self, tokenizer: Tokenizer, begin_id: int, end_ids: Sequence[int], banned_ids: Sequence[int] = ()
    ) -> None:
        self.tokenizer = tokenizer
        self.begin_id, self.end_ids = begin_id, end_ids
        self.writable = [token for token in range(len(tokenizer)) if token not in banned_ids]

    def prompt(self, text: str) -> list[int]:
        """The tokens that the template makes of a text; the begin mark if there is no text."""
        return self.tokenizer.encode_batch([text])[0] or [self.begin_id]

    def row(self, lines: Iterable[str]) -> Row:
        """The lines as one text after a begin mark, which is cut into tokens as a whole."""
        text = "".join(f"{line}\n" for line in lines)
        ids = self.prompt(text) if text else []
        return Row(ids if not text or ids[0] == self.begin_id else [self.begin_id, *ids], len(text.encode()))


TextFormat = TrainedFormat | DownloadedFormat
