"""Tokenizers of models from elsewhere: Marian's SentencePiece files, or a tokenizer.json."""

import re
from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

from regard.errors import MissingExtraError, RunFolderError, needs
from regard.files.model_folder import family_of
from regard.files.untrusted import parse_json
from regard.tasks.text.codec import Codec, Marks
from regard.tasks.text.labels import SPACE, Label, byte_level_labels, byte_string, label_of_each, piece_label
from regard.tasks.text.tokenizer_files import encoding, read_tokenizer, reads_lower_case
from regard.tasks.text.tokenizers import REPLACEMENT, is_byte_level
from regard.tasks.text.unicode import normalise

UNKNOWN = "<unk>"
MOST_IDS = 2**31
_BYTE = re.compile(r"<0x[0-9A-F]{2}>")
"""A byte in a vocabulary with byte fallback."""


class SentencePieces:
    """Marian's tokenizer: a SentencePiece model splits the text, and a separate vocabulary maps pieces to ids.

    A language code such as `>>fra<<` at the beginning of a text stays one token.
    """

    def __init__(self, model: Path, vocabulary: Path, marks: Marks) -> None:
        self.marks = marks
        self._pieces = _load_pieces(model)
        self._ids = _read_vocabulary(vocabulary)
        self._names = {number: piece for piece, number in self._ids.items()}

    def __len__(self) -> int:
        return max(self._names) + 1

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        parts = (_language_code(normalise(text)) for text in texts)
        pieces = ([*code, *self._pieces.encode(rest, out_type=str)] for code, rest in parts)
        return [[self._ids.get(piece, self._ids[UNKNOWN]) for piece in some] for some in pieces]

    @property
    def unknown_id(self) -> int | None:
        return self._ids[UNKNOWN]

    @property
    def lowercases(self) -> bool:
        return False

    def surfaces(self, text: str) -> list[str]:
        """The text of each token, as it was given. A piece at the beginning of a word has a space before it."""
        code, rest = _language_code(normalise(text))
        found = self._pieces.encode(rest, return_type="proto").pieces
        return [*code, *(" " * one.piece.startswith(SPACE) + one.surface.lstrip() for one in found)]

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        words = iter(unknown)
        pieces = [self._names.get(i, UNKNOWN) for i in ids if i not in self.marks]
        text = "".join(next(words, REPLACEMENT) if piece == UNKNOWN else piece for piece in pieces)
        return text.replace(SPACE, " ").strip()

    def bytes_of(self, token: int) -> bytes:
        piece = "" if token in self.marks else self._names.get(token, UNKNOWN)
        return (REPLACEMENT if piece == UNKNOWN else piece.replace(SPACE, " ")).encode()

    def labels(self, ids: Sequence[int]) -> list[Label]:
        return [Label(text, (n, n)) for n, text in enumerate(self.label_of_each(ids))]

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        return [piece_label(self._names.get(i, UNKNOWN)) for i in ids]


class TokenizerFile:
    """A tokenizer.json, with its template's tokens before a text. The batch adds the end token."""

    def __init__(self, path: Path, marks: Marks) -> None:
        self.marks = marks
        try:
            self._backend = read_tokenizer(path.read_text(encoding="utf-8"))
        except MissingExtraError:
            raise
        except (OSError, ValueError) as error:
            raise RunFolderError(f"{path} is not a tokenizer that can be read ({error})") from None
        self._byte_level = is_byte_level(self._backend)

    def __len__(self) -> int:
        return max(self._backend.get_vocab().values()) + 1

    def encode_batch(self, texts: Iterable[str]) -> list[list[int]]:
        batch = [normalise(text) for text in texts]
        with encoding():
            encoded = self._backend.encode_batch(batch)
        # If there are only special tokens, the text is empty, and the result must be empty too.
        ids = ([] if all(one.special_tokens_mask) else one.ids for one in encoded)
        return [one[:-1] if one[-1:] == [self.marks.end_id] else one for one in ids]

    @property
    def unknown_id(self) -> int | None:
        if self._byte_level:
            return None
        model = parse_json(self._backend.to_str())["model"]
        if model.get("byte_fallback"):
            return None
        name = model.get("unk_token")
        return model.get("unk_id") if name is None else self._backend.token_to_id(name)

    @property
    def lowercases(self) -> bool:
        return reads_lower_case(self._backend)

    def surfaces(self, text: str) -> list[str]:
        """The stretch of text of each token; empty for tokens of the template. Where stretches overlap (a token for the
        beginning of a word includes the word's first letter), the later token gets the whole overlap."""
        text, found, next_first = normalise(text), [], len(text)
        with encoding():
            encoded = self._backend.encode(text)
        for first, end in reversed(encoded.offsets):
            found.append(text[first : min(end, max(first, next_first))])
            next_first = first if end > first else next_first
        return found[::-1]

    def decode(self, ids: Sequence[int], *, unknown: Sequence[str] = ()) -> str:
        kept = [i for i in ids if i not in self.marks]
        if not unknown:
            return str(self._backend.decode(kept, skip_special_tokens=True)).strip()
        unknown_id, special, words = self.unknown_id, self._special_ids(), iter(unknown)
        pieces = [
            next(words, REPLACEMENT) if i == unknown_id else self._backend.id_to_token(i)
            for i in kept
            if i == unknown_id or i not in special
        ]
        return str(self._backend.decoder.decode(pieces) if self._backend.decoder else " ".join(pieces)).strip()

    def _special_ids(self) -> set[int]:
        return {i for i, token in self._backend.get_added_tokens_decoder().items() if token.special}

    def bytes_of(self, token: int) -> bytes:
        """The UTF-8 bytes a token adds to a text, perhaps only a part of a character; none for a special token."""
        piece = self._backend.id_to_token(token) or ""
        added = self._backend.get_added_tokens_decoder().get(token)
        if token in self.marks or (added is not None and added.special):
            return b""
        if self._byte_level and added is None:
            return byte_string(piece)
        if _BYTE.fullmatch(piece):
            return bytes.fromhex(piece[3:5])
        return piece.replace(SPACE, " ").encode()

    def labels(self, ids: Sequence[int]) -> list[Label]:
        """One label for each token. Byte-level pieces of one character share a label."""
        pieces, special = self._pieces(ids)
        if not self._byte_level:
            return [Label(piece_label(piece), (n, n)) for n, piece in enumerate(pieces)]
        return byte_level_labels(pieces, special)

    def label_of_each(self, ids: Sequence[int]) -> list[str]:
        return label_of_each(*self._pieces(ids), byte_level=self._byte_level)

    def _pieces(self, ids: Sequence[int]) -> tuple[list[str], list[bool]]:
        special = self._special_ids()
        return [self._backend.id_to_token(i) or UNKNOWN for i in ids], [i in special or i in self.marks for i in ids]


def pretrained_tokenizers(folder: Path, source: Marks, target: Marks) -> tuple[Codec, Codec]:
    """The source and target tokenizers of a folder, from tokenizer.json or else from Marian's SentencePiece files."""
    one, separate = folder / "tokenizer.json", folder / "target_tokenizer.json"
    if one.is_file():
        return TokenizerFile(one, source), TokenizerFile(separate if separate.is_file() else one, target)
    separate = folder / "target_vocab.json"
    vocabularies = folder / "vocab.json", separate if separate.is_file() else folder / "vocab.json"
    return (
        SentencePieces(folder / "source.spm", vocabularies[0], source),
        SentencePieces(folder / "target.spm", vocabularies[1], target),
    )


def check_tokenizer(folder: Path) -> None:
    """Check that a folder has the files of a tokenizer that regard reads."""
    names = ["tokenizer.json", *(["source.spm"] if family_of(folder) == "marian" else [])]
    if not any((folder / name).is_file() for name in names):
        more = ", or source.spm, target.spm and vocab.json" if len(names) > 1 else ""
        raise RunFolderError(f"{folder} has no tokenizer that regard reads: expected tokenizer.json{more}")


def check_rows(folder: Path, name: str, tokenizer: Codec, rows: Sized) -> None:
    """Check that a model has a row of weights for each token of the tokenizer of its folder."""
    if len(tokenizer) > len(rows):
        raise RunFolderError(
            f"{folder}: the {name} has {len(tokenizer)} tokens and the model {len(rows)}: they are not of one folder"
        )


def _load_pieces(model: Path) -> Any:
    with needs("sentencepiece", extra="train"):
        import sentencepiece
    try:
        return sentencepiece.SentencePieceProcessor(model_file=str(model))
    except (OSError, RuntimeError) as error:
        raise RunFolderError(f"{model} is not a SentencePiece model that can be read ({error})") from None


def _read_vocabulary(path: Path) -> dict[str, int]:
    try:
        ids = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is not a vocabulary that can be read ({error})") from None
    if not isinstance(ids, dict) or not all(type(number) is int and 0 <= number < MOST_IDS for number in ids.values()):
        raise RunFolderError(f"{path} is not a vocabulary: expected an object of pieces and their ids, 0 to 2^31 - 1")
    if UNKNOWN not in ids:
        raise RunFolderError(f"{path} has no {UNKNOWN}, which pieces outside the vocabulary need")
    return ids


def _language_code(text: str) -> tuple[list[str], str]:
    """The language code >>...<< at the beginning of a text, and the rest of the text.

    >>> _language_code(">>fra<< a rose"), _language_code("a rose")
    ((['>>fra<<'], ' a rose'), ([], 'a rose'))
    """
    end = text.find("<<")
    return ([text[: end + 2]], text[end + 2 :]) if text.startswith(">>") and end != -1 else ([], text)
