"""The input of an export: a trained Transformer, its configuration and its tokenizers."""

from copy import deepcopy
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from regard.call.positions import sinusoidal
from regard.errors import ArgumentError
from regard.models.config import TransformerConfig
from regard.models.transformer import Transformer
from regard.nn import LearnedPositions, MultiHeadAttention
from regard.tasks.exports.plain import PlainModel
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.foreign_folders import is_huggingface
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.tokenizers import Tokenizer
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.made_model import make_model
from regard.tasks.translation.translator import Translator

LONGEST = 1024
"""The number of rows in a table of sinusoidal positions, for formats with a table."""


class ExportedRun(NamedTuple):
    """A translation run's best model."""

    model: Transformer
    config: TransformerConfig
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    plain: PlainModel | None = None
    """The loaded model, which may change later; None for one that is asked by the export alone."""

    @property
    def max_length(self) -> int:
        """The number of tokens in a table of positions."""
        return self.config.max_length if self.config.positions == "learned" else LONGEST

    def positions(self, module: nn.Module) -> Tensor:
        if isinstance(module, LearnedPositions):
            return module.weight.detach()
        return sinusoidal(torch.arange(self.max_length), self.config.dim)

    @property
    def has_one_tokenizer(self) -> bool:
        return self.source_tokenizer.fingerprint() == self.target_tokenizer.fingerprint()


def transformer_of(folder: Path) -> TransformerConfig:
    """The configuration of a run's Transformer."""
    if is_huggingface(folder):
        raise ArgumentError(f"{folder} is a Hugging Face folder already; only runs of `regard train` are exported")
    config = RunFolder(folder).read_config(TRANSLATION, TranslationConfig)
    if config.model != "transformer":
        raise ArgumentError(f"{folder} is a run of the model {config.model}; only the Transformer can be exported")
    return config.transformer


def exported(translator: Translator, config: TransformerConfig) -> ExportedRun:
    """The model of a loaded run, with its configuration and its tokenizers."""
    model, tokenizers = translator.model, (translator.source_tokenizer, translator.target_tokenizer)
    assert isinstance(model, Transformer)
    source, target = (tokenizer for tokenizer in tokenizers if isinstance(tokenizer, Tokenizer))
    with torch.device("meta"):
        made = make_model(config, source_vocab_size=len(source), target_vocab_size=len(target))
    plain = PlainModel.of(model, made)
    model = model if translator.device.type == "cpu" else deepcopy(model).cpu()
    return ExportedRun(_scaled_by_width(model, config), config, source, target, plain)


def _scaled_by_width(model: Transformer, config: TransformerConfig) -> Transformer:
    """A model of the same answers whose embeddings are multiplied by sqrt(D), the only factor in the formats.

    Where c is the factor of the model given, c E = sqrt(D) E' for E' = c E / sqrt(D). An output layer that shares the
    matrix sees the last norm divided by as much: its logits stay.
    """
    wanted = config.dim**0.5
    by = model.target_embedding.scale / wanted
    if by == 1:
        return model
    model = deepcopy(model)  # the one given may go on translating
    for embedding in {model.source_embedding, model.target_embedding}:
        embedding.weight.data.mul_(by)
        embedding.scale = wanted
    if config.tied_output:
        norms = [module for module in model.decoder.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm)]
        last = model.decoder_norm if config.norm_position == "pre" else norms[-1]
        for parameter in last.parameters():
            parameter.data.div_(by)
    return model


def refuse(format: str, config: TransformerConfig, **reads: tuple[str | None, ...]) -> None:
    """Raise an error if a format cannot express a configuration."""
    if config.num_kv_heads not in (None, config.num_heads):
        raise ArgumentError(f"{format} cannot express num_kv_heads={config.num_kv_heads}: there each head has its own")
    for name, values in reads.items():
        value = getattr(config, name)
        if value not in values:
            raise ArgumentError(f"{format} cannot express {name}={value}; it can {', '.join(map(str, values))}")


def split_attention(attention: nn.Module) -> dict[str, nn.Linear]:
    """Query, key, value and output projections as separate linear layers."""
    assert isinstance(attention, MultiHeadAttention)
    assert attention.in_bias is not None
    weights, biases = attention.in_weights[0].split(attention.sizes), attention.in_bias.split(attention.sizes)
    layers = {}
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        layer = nn.Linear(*reversed(weight.shape))
        layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        layers[name] = layer
    return layers | {"output": attention.out}
