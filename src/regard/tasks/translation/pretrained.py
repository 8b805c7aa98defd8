"""Read a downloaded folder in Hugging Face's format as the parts of a translator or of a language model."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import RunFolderError
from regard.files.atomic import read_json
from regard.models.convert import Pretrained, from_huggingface
from regard.models.decoder_only import DecoderOnly
from regard.models.transformer import Transformer
from regard.nn import TokenEmbedding
from regard.tasks.language_modelling.text_format import DownloadedFormat
from regard.tasks.runs.foreign_folders import check_tokenizer
from regard.tasks.text.codec import Codec, Marks
from regard.tasks.text.pretrained import TokenizerFile, pretrained_tokenizers

LONGEST_BLOCK = 2_048
"""The most tokens a language model reads at once, even if it has more positions."""


class Parts(NamedTuple):
    """The parts of a translator."""

    model: Transformer
    source_tokenizer: Codec
    target_tokenizer: Codec


class TextParts(NamedTuple):
    """The parts of a language model."""

    model: DecoderOnly
    language: DownloadedFormat
    block_length: int


def load_pretrained_text(folder: Path) -> TextParts:
    """Read the language model and the tokenizer of a Hugging Face folder."""
    check_tokenizer(folder)
    pretrained = from_huggingface(folder)
    model = pretrained.model
    if not isinstance(model, DecoderOnly):
        raise RunFolderError(f"{folder} holds a {pretrained.family} model, which does not write on after a text")
    marks = _marks(pretrained, folder)
    tokenizer = TokenizerFile(folder / "tokenizer.json", marks)
    _check_fit(folder, "", tokenizer, model.output.weight)
    language = DownloadedFormat(tokenizer, marks.begin_id, pretrained.end_ids, pretrained.banned_ids)
    values = read_json(folder / "config.json")
    positions = model.max_length or values.get("max_position_embeddings") or LONGEST_BLOCK
    return TextParts(model, language, min(int(positions), LONGEST_BLOCK))


def load_pretrained(folder: Path) -> Parts:
    """Read the translator and the tokenizers of a Hugging Face folder."""
    check_tokenizer(folder)
    pretrained = from_huggingface(folder)
    model = pretrained.model
    if not isinstance(model, Transformer) or not isinstance(model.source_embedding, TokenEmbedding):
        raise RunFolderError(f"{folder} holds a {pretrained.family} model, which does not translate text")
    marks = _marks(pretrained, folder)
    tokenizers = pretrained_tokenizers(folder, marks, marks)
    embeddings = model.source_embedding, model.target_embedding
    for side, tokenizer, embedding in zip(("source", "target"), tokenizers, embeddings, strict=True):
        _check_fit(folder, f"{side} ", tokenizer, embedding.weight)
    _ban(model, pretrained.banned_ids)
    return Parts(model, *tokenizers)


def _check_fit(folder: Path, side: str, tokenizer: Codec, rows: Tensor) -> None:
    if len(tokenizer) > len(rows):
        raise RunFolderError(
            f"{folder}: the {side}tokenizer has {len(tokenizer)} tokens and the model {len(rows)}: "
            "they are not of one folder"
        )


def _marks(pretrained: Pretrained, folder: Path) -> Marks:
    if pretrained.begin_id is None or not pretrained.end_ids:
        raise RunFolderError(f"{folder / 'config.json'} does not say which tokens begin and end a text")
    pad_id = pretrained.end_ids[0] if pretrained.pad_id is None else pretrained.pad_id
    return Marks(pad_id, pretrained.begin_id, pretrained.end_ids[0])


def _ban(model: Transformer, ids: tuple[int, ...]) -> None:
    """Give tokens that must never be written the logit -inf: Marian would otherwise write padding at times."""
    if not ids:
        return
    bias = torch.zeros(len(model.output.weight)) if model.output.bias is None else model.output.bias.detach().clone()
    bias[list(ids)] = -torch.inf
    model.output.bias = nn.Parameter(bias)
