"""A language model for CTranslate2, as its decoder-only Transformer."""

from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.call.positions import sinusoidal
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig
from regard.models.decoder_only import DecoderOnly
from regard.nn import LearnedPositions
from regard.tasks.exports.ctranslate2 import (
    fill_layer,
    fill_norm,
    kinds_of,
    library,
    save_spec,
    vocabulary_of,
)
from regard.tasks.exports.trained import PlainModel, plain_model, refuse_downloaded
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.names import LANGUAGE_MODEL
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.tokenizers import Tokenizer


class ExportedText(NamedTuple):
    """A language model run's best model."""

    model: DecoderOnly
    config: DecoderOnlyConfig
    tokenizer: Tokenizer
    block_length: int
    """The most tokens the model reads at once, and so the rows of a table of sinusoidal positions."""
    plain: PlainModel | None = None
    """The loaded model, which may change later; None for one that is asked by the export alone."""

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        return (self.tokenizer,)

    @property
    def max_length(self) -> int:
        return self.block_length


def text_config_of(folder: Path) -> LanguageModelConfig:
    """The configuration of a language model's run."""
    refuse_downloaded(folder)
    config = RunFolder(folder).read_config(LANGUAGE_MODEL, LanguageModelConfig)
    _refuse(config.model)
    return config


def exported_text(language_model: LanguageModel, config: LanguageModelConfig) -> ExportedText:
    """The model of a loaded run, with its configuration and its tokenizer."""
    _refuse(config.model)
    tokenizer = language_model.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    plain, model = plain_model(language_model.model, partial(DecoderOnly, config.model, vocab_size=len(tokenizer)))
    return ExportedText(model, config.model, tokenizer, config.block_length, plain)


def _refuse(config: DecoderOnlyConfig) -> None:
    """Refuse the parts for which the spec has no word."""
    without = DecoderOnlyConfig()
    for name in ("layers", "rotary_fraction", "no_positions_every", "qk_norm", "gate", "sink"):
        if (value := getattr(config, name)) != getattr(without, name):
            raise ArgumentError(f"CTranslate2 cannot express {name}={value!r}: --engine regard writes with this model")


def text_to_ctranslate2(trained: ExportedText, out: Path) -> None:
    """Write model.bin, config.json and the vocabulary."""
    config = trained.config
    spec = library().specs.TransformerDecoderModelSpec.from_config(
        config.num_layers,
        config.num_heads,
        **kinds_of(config),
        rotary_dim=0 if config.positions == "rotary" else None,  # 0 turns the whole head
        rotary_interleave=False,
        num_heads_kv=config.num_kv_heads,
    )
    _fill(trained, spec.decoder)
    spec.register_vocabulary(vocabulary_of(trained.tokenizer))
    save_spec(spec, trained.model, out)


def _fill(trained: ExportedText, decoder: Any) -> None:
    model, config = trained.model, trained.config
    # The output layer has its own weight: the factor of the embeddings can be multiplied into these.
    decoder.scale_embeddings = False
    decoder.embeddings.weight = (model.embedding.weight * model.embedding.scale).numpy()
    decoder.projection.weight = model.output.weight.numpy()
    if isinstance(model.positions, LearnedPositions):
        decoder.position_encodings.encodings = model.positions.weight.numpy()
    elif config.positions == "sinusoidal":
        decoder.position_encodings.encodings = sinusoidal(torch.arange(trained.block_length), config.dim).numpy()
    if config.norm_position == "pre":
        fill_norm(decoder.layer_norm, model.final_norm)
    for theirs, ours in zip(decoder.layer, model.each_layer(), strict=True):
        fill_layer(theirs, ours)
