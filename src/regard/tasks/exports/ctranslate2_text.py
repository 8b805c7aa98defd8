"""A language model for CTranslate2, as its decoder-only Transformer."""

from copy import deepcopy
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.call.positions import sinusoidal
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig
from regard.models.decoder_only import DecoderOnly
from regard.nn import LearnedPositions
from regard.tasks.exports.ctranslate2 import ACTIVATIONS, epsilon_of, fill_layer, fill_norm, library
from regard.tasks.exports.plain import PlainModel
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.names import LANGUAGE_MODEL
from regard.tasks.runs.foreign_folders import is_huggingface
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.tokenizers import BOS, EOS, SPECIAL_TOKENS, UNK, Tokenizer


class ExportedText(NamedTuple):
    """A language model run's best model."""

    model: DecoderOnly
    config: DecoderOnlyConfig
    tokenizer: Tokenizer
    block_length: int
    """The most tokens the model reads at once, and so the rows of a table of sinusoidal positions."""
    plain: PlainModel | None = None
    """The loaded model, which may change later; None for one that is asked by the export alone."""


def text_config_of(folder: Path) -> LanguageModelConfig:
    """The configuration of a language model's run."""
    if is_huggingface(folder):
        raise ArgumentError(f"CTranslate2 is for runs of regard's, and {folder} is in Hugging Face's format")
    config = RunFolder(folder).read_config(LANGUAGE_MODEL, LanguageModelConfig)
    _refuse(config.model)
    return config


def exported_text(language_model: LanguageModel, config: LanguageModelConfig) -> ExportedText:
    """The model of a loaded run, with its configuration and its tokenizer."""
    _refuse(config.model)
    tokenizer = language_model.tokenizer
    assert isinstance(tokenizer, Tokenizer)
    model = language_model.model
    with torch.device("meta"):
        made = DecoderOnly(config.model, vocab_size=len(tokenizer))
    plain = PlainModel.of(model, made)
    model = model if language_model.device.type == "cpu" else deepcopy(model).cpu()
    return ExportedText(model, config.model, tokenizer, config.block_length, plain)


def _refuse(config: DecoderOnlyConfig) -> None:
    """Refuse the parts for which `_spec` has no word."""
    without = DecoderOnlyConfig()
    for name in ("layers", "rotary_fraction", "no_positions_every", "qk_norm", "gate", "sink"):
        if (value := getattr(config, name)) != getattr(without, name):
            raise ArgumentError(f"CTranslate2 cannot express {name}={value!r}: --engine regard writes with this model")


def text_to_ctranslate2(trained: ExportedText, out: Path) -> None:
    """Write model.bin, config.json and the vocabulary."""
    spec = _spec(trained.config)
    _fill(trained, spec.decoder)
    tokenizer = trained.tokenizer
    spec.register_vocabulary([tokenizer.piece(number) for number in range(len(tokenizer))])
    spec.config.unk_token, spec.config.bos_token = SPECIAL_TOKENS[UNK], SPECIAL_TOKENS[BOS]
    spec.config.eos_token = SPECIAL_TOKENS[EOS]
    spec.config.layer_norm_epsilon = epsilon_of(trained.model)
    spec.validate()
    spec.optimize()
    spec.save(str(out))


def _spec(config: DecoderOnlyConfig) -> Any:
    specs = library().specs
    return specs.TransformerDecoderModelSpec.from_config(
        config.num_layers,
        config.num_heads,
        pre_norm=config.norm_position == "pre",
        activation=specs.common_spec.Activation[ACTIVATIONS[config.activation]],
        ffn_glu=config.activation == "swiglu",
        rms_norm=config.norm == "rms",
        rotary_dim=0 if config.positions == "rotary" else None,  # 0 turns the whole head
        rotary_interleave=False,
        num_heads_kv=config.num_kv_heads,
    )


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
