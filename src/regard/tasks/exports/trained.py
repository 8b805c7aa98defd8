"""The input of an export: a trained model that is no more than its configuration and its weights."""

from copy import deepcopy
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.files.model_folder import is_huggingface
from regard.models.config import TransformerConfig
from regard.models.transformer import Transformer
from regard.nn import LearnedPositions, MultiHeadAttention
from regard.nn.embeddings import sinusoidal
from regard.tasks.config import TRANSLATION
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.tokenizers import Tokenizer
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.translation_model import build_model
from regard.tasks.translation.translator import Translator
from regard.tensors.torch_private import counted_version, has_hooks_of_all, is_bare

NUMBERS = 8
"""How many elements of each weight are compared: a fused optimizer writes without counting it."""


class PlainModel:
    """A model that was no more than its configuration and its weights when it was exported, and may change since."""

    def __init__(self, model: nn.Module, made: nn.Module) -> None:
        if reason := why_not_plain(model, made):
            raise ArgumentError(f"an export would be another model than the one that was loaded: {reason}")
        self._model, self._made, self._weights = model, made, _weights(model)

    def why_changed(self) -> str | None:
        """How the model differs from the exported one by now; None if it does not."""
        if (reason := why_not_plain(self._model, self._made)) is None:
            reason = None if _weights(self._model) == self._weights else "its weights were written or replaced"
        return reason and f"has an older model than the one that is asked: {reason}"


def _weights(model: nn.Module) -> list[object]:
    found: list[object] = []
    for one in chain(model.parameters(), model.buffers()):
        few = one.detach().flatten()[:: max(1, one.numel() // NUMBERS)][:NUMBERS]
        found.append((id(one), one.data_ptr(), counted_version(one), few.tolist()))
    return found


def why_not_plain(model: nn.Module, made: nn.Module) -> str | None:
    """Why a model may compute something else than its weights in a model of its configuration; None if it cannot.

    Adapters, parametrisations and subclasses of layers are modules of other types; a changed setting is another value.
    The weights of the model made may be on the device "meta".

    >>> why_not_plain(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()))
    >>> why_not_plain(nn.Sequential(nn.LayerNorm(2, eps=0.1)), nn.Sequential(nn.LayerNorm(2)))
    'its module 0 has other settings than its configuration: eps'
    """
    if has_hooks_of_all():
        return "there are hooks on all modules"
    ours, theirs = dict(model.named_modules()), dict(made.named_modules())
    for name in sorted(ours.keys() ^ theirs.keys()):
        return f"its module {name} is not as its configuration makes it"
    for name, module in ours.items():
        kind, said = type(module), f"its module {name}" if name else "it"
        if kind is not type(theirs[name]):
            return f"{said} is a {kind.__name__} where its configuration has a {type(theirs[name]).__name__}"
        if not is_bare(module, kind, kind.forward):
            return f"{said} has hooks, or another forward than its class"
        if changed := _changed(module, theirs[name]):
            return f"{said} has other settings than its configuration: {', '.join(changed)}"
    return None


def _changed(module: nn.Module, other: nn.Module) -> list[str]:
    ours, theirs = _settings(module), _settings(other)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _settings(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and not isinstance(value, Tensor)
    }


LONGEST = 1024
"""The number of rows in a table of sinusoidal positions, for formats with a table."""


class ExportedRun(NamedTuple):
    model: Transformer
    config: TransformerConfig
    source_tokenizer: Tokenizer
    target_tokenizer: Tokenizer
    plain: PlainModel | None = None
    """The loaded model, which may change later; None for one that is asked by the export alone."""

    @property
    def tokenizers(self) -> tuple[Tokenizer, ...]:
        return self.source_tokenizer, self.target_tokenizer

    @property
    def max_length(self) -> int:
        return self.config.max_length if self.config.positions == "learned" else LONGEST

    def positions(self, module: nn.Module) -> Tensor:
        if isinstance(module, LearnedPositions):
            return module.weight.detach()
        return sinusoidal(torch.arange(self.max_length), self.config.dim)


def transformer_of(folder: Path) -> TransformerConfig:
    if is_huggingface(folder):
        raise ArgumentError(f"{folder} is a Hugging Face folder already; only runs of `regard train` are exported")
    config = RunFolder(folder).read_config(TRANSLATION, TranslationConfig)
    if config.model != "transformer":
        raise ArgumentError(f"{folder} is a run of the model {config.model}; only the Transformer can be exported")
    return config.transformer


def exported(translator: Translator, config: TransformerConfig) -> ExportedRun:
    model, tokenizers = translator.model, (translator.source_tokenizer, translator.target_tokenizer)
    assert isinstance(model, Transformer)
    source, target = (tokenizer for tokenizer in tokenizers if isinstance(tokenizer, Tokenizer))
    vocabularies = {"source_vocab_size": len(source), "target_vocab_size": len(target)}
    with torch.device("meta"):
        plain = PlainModel(model, build_model(config, **vocabularies))
    on_cpu = model if translator.device.type == "cpu" else deepcopy(model).cpu()
    return ExportedRun(_scaled_by_width(on_cpu, config), config, source, target, plain)


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
    if config.num_kv_heads not in (None, config.num_heads):
        raise ArgumentError(f"{format} cannot express num_kv_heads={config.num_kv_heads}: there each head has its own")
    for name, values in reads.items():
        value = getattr(config, name)
        if value not in values:
            raise ArgumentError(f"{format} cannot express {name}={value}; it can {', '.join(map(str, values))}")


def split_attention(attention: nn.Module) -> dict[str, nn.Linear]:
    assert isinstance(attention, MultiHeadAttention)
    assert attention.in_bias is not None
    weights, biases = attention.in_weights[0].split(attention.sizes), attention.in_bias.split(attention.sizes)
    layers = {}
    for name, weight, bias in zip(("query", "key", "value"), weights, biases, strict=True):
        layer = nn.Linear(*reversed(weight.shape))
        layer.weight, layer.bias = nn.Parameter(weight.detach()), nn.Parameter(bias.detach())
        layers[name] = layer
    return layers | {"output": attention.out}
