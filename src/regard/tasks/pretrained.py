"""A folder that was downloaded, as a translator's parts."""

from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from regard.errors import RunFolderError
from regard.models.convert import Pretrained, from_huggingface
from regard.models.transformer import Transformer
from regard.text.marks import Codec, Marks
from regard.text.pretrained import pretrained_tokenizers
from regard.training.files import read_json


class Parts(NamedTuple):
    """What a translator is made of."""

    model: Transformer
    source_tokenizer: Codec
    target_tokenizer: Codec


def is_huggingface(folder: Path) -> bool:
    """Whether a folder's config.json is that of a Hugging Face model rather than of a run."""
    path = folder / "config.json"
    return path.is_file() and "model_type" in read_json(path)


def load_pretrained(folder: Path) -> Parts:
    """The model and the tokenizers of a Hugging Face folder.

    Raises:
        RunFolderError: it does not translate, cannot be read, or its parts do not fit together.
        MissingExtraError: a library that reads it is not installed.
    """
    pretrained = from_huggingface(folder)
    model = pretrained.model
    if not isinstance(model, Transformer):
        raise RunFolderError(f"{folder} holds a {pretrained.family} model, which does not translate")
    marks = _marks(pretrained, folder)
    tokenizers = pretrained_tokenizers(folder, marks, marks)
    embeddings = model.source_embedding, model.target_embedding
    for side, tokenizer, embedding in zip(("source", "target"), tokenizers, embeddings, strict=True):
        if len(tokenizer) > len(embedding.weight):
            raise RunFolderError(
                f"{folder}: the {side} tokenizer has {len(tokenizer)} tokens and the model {len(embedding.weight)}: "
                "they are not of one folder"
            )
    _ban(model, pretrained.banned_ids)
    return Parts(model, *tokenizers)


def _marks(pretrained: Pretrained, folder: Path) -> Marks:
    if pretrained.begin_id is None or not pretrained.end_ids:
        raise RunFolderError(f"{folder / 'config.json'} does not say which tokens begin and end a text")
    pad_id = pretrained.end_ids[0] if pretrained.pad_id is None else pretrained.pad_id
    return Marks(pad_id, pretrained.begin_id, pretrained.end_ids[0])


def _ban(model: Transformer, ids: tuple[int, ...]) -> None:
    """Tokens that are never to be written get the logit -inf: Marian's padding would win otherwise, at times."""
    if not ids:
        return
    bias = torch.zeros(len(model.output.weight)) if model.output.bias is None else model.output.bias.detach().clone()
    bias[list(ids)] = -torch.inf
    model.output.bias = nn.Parameter(bias)
