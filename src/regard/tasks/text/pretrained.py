"""Tokenizers of models from elsewhere: Marian's SentencePiece files, or a tokenizer.json."""

from collections.abc import Iterable, Sequence, Sized
from pathlib import Path
from typing import Any

from regard.errors import RunFolderError, needs
from regard.files.model_folder import family_of
from regard.files.untrusted import parse_json
from regard.tasks.text.codec import SPACE, Codec, Label, Marks, piece_label
from regard.tasks.text.tokenizers import REPLACEMENT, UNKNOWN, Tokenizer
from regard.tasks.text.unicode import normalise

MOST_IDS = 2**31


class SentencePieces:
    """Marian's tokenizer: a SentencePiece model splits the text, and a vocabulary maps pieces to ids. A language code
    such as `>>fra<<` at the beginning of a text stays one token."""

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


def pretrained_tokenizers(folder: Path, source: Marks, target: Marks) -> tuple[Codec, Codec]:
    one, separate = folder / "tokenizer.json", folder / "target_tokenizer.json"
    if one.is_file():
        return Tokenizer.downloaded(one, source), Tokenizer.downloaded(separate if separate.is_file() else one, target)
    separate = folder / "target_vocab.json"
    vocabularies = folder / "vocab.json", separate if separate.is_file() else folder / "vocab.json"
    return (
        SentencePieces(folder / "source.spm", vocabularies[0], source),
        SentencePieces(folder / "target.spm", vocabularies[1], target),
    )


def check_tokenizer(folder: Path) -> None:
    names = ["tokenizer.json", *(["source.spm"] if family_of(folder) == "marian" else [])]
    if not any((folder / name).is_file() for name in names):
        more = ", or source.spm, target.spm and vocab.json" if len(names) > 1 else ""
        raise RunFolderError(f"{folder} has no tokenizer that regard reads: expected tokenizer.json{more}")


def check_rows(folder: Path, name: str, tokenizer: Codec, rows: Sized) -> None:
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
