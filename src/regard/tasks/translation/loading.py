"""Read a translation model with its tokenizers from a folder, or an ensemble from several."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from torch import nn

from regard.errors import ArgumentError
from regard.models.ensemble import Ensemble
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.foreign_folders import is_huggingface
from regard.tasks.runs.made_models import filled
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.tokenizers import Tokenizer
from regard.tasks.training.distributed.devices import find_device
from regard.tasks.translation.alignments import taught_head
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import load_tokenizers
from regard.tasks.translation.made_model import make_model
from regard.tasks.translation.pretrained import load_pretrained
from regard.tasks.translation.translation_model import TranslationModel

M = TypeVar("M", bound=TranslationModel)
N = TypeVar("N", bound=nn.Module)


def load_one(make: type[M], folder: Path, *, device: str, checkpoint: Literal["best", "last"]) -> M:
    """Read a run folder, or a folder in Hugging Face's format; see `Translator.load`."""
    if is_huggingface(folder):
        parts = load_pretrained(folder)
        return make(_frozen(parts.model, device), parts.source_tokenizer, parts.target_tokenizer)
    run = RunFolder(folder)
    config = run.read_config(TRANSLATION, TranslationConfig)
    source_tokenizer, target_tokenizer = load_tokenizers(config, run)
    vocabularies = {"source_vocab_size": len(source_tokenizer), "target_vocab_size": len(target_tokenizer)}
    tensors, make_it = run.checkpoints.load_model(checkpoint), partial(make_model, config.sizes, **vocabularies)
    model = _frozen(filled(make_it, config.sizes, tensors, source=run.path / checkpoint), device)
    longest, alignment = config.max_length, taught_head(config)
    return make(model, source_tokenizer, target_tokenizer, longest=longest, alignment=alignment)


def ensemble_of(make: type[M], places: Sequence[Path | str], found: Sequence[M]) -> M:
    """An ensemble of models that were loaded from these places."""
    first = found[0]
    for place, other in zip(places, found, strict=True):
        for ours, theirs in ((first.source_tokenizer, other.source_tokenizer),
                             (first.target_tokenizer, other.target_tokenizer)):  # fmt: skip
            if not isinstance(ours, Tokenizer) or not isinstance(theirs, Tokenizer):
                raise ArgumentError("an ensemble is of runs of `regard train`, not of folders in Hugging Face's format")
            if ours.fingerprint() != theirs.fingerprint():
                raise ArgumentError(
                    f"the runs of an ensemble need the same tokenizers, and those of {place} are others than those of "
                    f"{places[0]}: train it with --warm-start {places[0]}, or on the same data with the same settings"
                )
    longest = min((one.longest for one in found if one.longest is not None), default=None)
    model = Ensemble([one.model for one in found])
    return make(model, first.source_tokenizer, first.target_tokenizer, longest=longest)


def _frozen(model: N, device: str) -> N:
    return model.to(find_device(device)).requires_grad_(False)
