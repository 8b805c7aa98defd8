"""A folder for CTranslate2 (Klein et al. 2020, OpenNMT's engine), which runs with int8 and threads on CPUs."""

from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from regard.errors import needs
from regard.models.config import TransformerConfig
from regard.models.stack import SelfAttentionLayer
from regard.models.transformer import DecoderLayer
from regard.nn import GatedFeedForward
from regard.tasks.exports.huggingface import write_tokenizers
from regard.tasks.exports.trained import ExportedRun, refuse, split_attention
from regard.tasks.text.tokenizers import BOS, EOS, SPECIAL_TOKENS, UNK, Tokenizer


def to_ctranslate2(trained: ExportedRun, out: Path) -> None:
    config = trained.config
    refuse_for_ctranslate2(config)
    layers = config.encoder_layers, config.decoder_layers
    kinds = library().specs
    spec = kinds.TransformerSpec.from_config(
        layers,
        config.num_heads,
        pre_norm=config.norm_position == "pre",
        activation=kinds.common_spec.Activation[ACTIVATIONS[config.activation]],
        ffn_glu=config.activation == "swiglu",
        rms_norm=config.norm == "rms",
    )
    _fill(trained, spec)
    spec.register_source_vocabulary(vocabulary_of(trained.source_tokenizer))
    spec.register_target_vocabulary(vocabulary_of(trained.target_tokenizer))
    spec.config.decoder_start_token, spec.config.add_source_eos = SPECIAL_TOKENS[BOS], True
    spec.config.unk_token, spec.config.bos_token = SPECIAL_TOKENS[UNK], SPECIAL_TOKENS[BOS]
    spec.config.eos_token = SPECIAL_TOKENS[EOS]
    spec.config.layer_norm_epsilon = _epsilon_of(trained.model)
    spec.validate()
    spec.optimize()
    spec.save(str(out))
    write_tokenizers(trained, out)


def refuse_for_ctranslate2(config: TransformerConfig) -> None:
    refuse("ctranslate2", config, activation=("relu", "gelu", "swiglu"), positions=("sinusoidal", "learned"))


def library() -> ModuleType:
    with needs("ctranslate2", extra="train"):
        import ctranslate2
    return ctranslate2


def _fill(trained: ExportedRun, spec: Any) -> None:
    model, config = trained.model, trained.config
    spec.encoder.embeddings[0].weight = model.source_embedding.weight.numpy()
    spec.decoder.embeddings.weight = model.target_embedding.weight.numpy()
    spec.decoder.projection.weight = model.output.weight.numpy()
    sides = (
        (spec.encoder, model.encoder, model.source_positions, model.encoder_norm),
        (spec.decoder, model.decoder, model.target_positions, model.decoder_norm),
    )
    for side, layers, positions, final_norm in sides:
        table = trained.positions(positions)
        side.position_encodings.encodings = table.numpy()
        side.scale_embeddings = True
        if config.norm_position == "pre":
            _fill_norm(side.layer_norm, final_norm)
        for theirs, ours in zip(side.layer, layers, strict=True):
            assert isinstance(ours, SelfAttentionLayer | DecoderLayer)
            _fill_layer(theirs, ours)


def vocabulary_of(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.piece(number) for number in range(len(tokenizer))]


ACTIVATIONS = {"relu": "RELU", "gelu": "GELU", "swiglu": "SWISH"}
"""CTranslate2's names of our activations; swiglu is its gated network with SWISH."""


def _fill_layer(theirs: Any, ours: SelfAttentionLayer | DecoderLayer) -> None:
    parts = split_attention(ours.self_attention)
    _fill_linear(theirs.self_attention.linear[0], parts["query"], parts["key"], parts["value"])
    _fill_linear(theirs.self_attention.linear[1], parts["output"])
    norms = [theirs.self_attention.layer_norm]
    if isinstance(ours, DecoderLayer):
        parts = split_attention(ours.cross_attention)
        _fill_linear(theirs.attention.linear[0], parts["query"])
        _fill_linear(theirs.attention.linear[1], parts["key"], parts["value"])
        _fill_linear(theirs.attention.linear[2], parts["output"])
        norms.append(theirs.attention.layer_norm)
    network = ours.feed_forward
    if isinstance(network, GatedFeedForward):
        gate, up = network.gate_and_up.weight.chunk(2)
        theirs.ffn.linear_0.weight, theirs.ffn.linear_0_noact.weight = gate.numpy(), up.numpy()
    else:
        _fill_linear(theirs.ffn.linear_0, network.get_submodule("up"))
    _fill_linear(theirs.ffn.linear_1, network.get_submodule("down"))
    for norm, residual in zip([*norms, theirs.ffn.layer_norm], ours.residuals, strict=True):
        _fill_norm(norm, residual.get_submodule("norm"))


def _fill_linear(spec: Any, *linears: nn.Module) -> None:
    """Write layers with the same input as one layer: their rows stand one below the other."""
    parameters = [dict(linear.named_parameters()) for linear in linears]
    spec.weight = torch.cat([each["weight"] for each in parameters]).detach().numpy()
    if "bias" in parameters[0]:
        spec.bias = torch.cat([each["bias"] for each in parameters]).detach().numpy()


def _fill_norm(spec: Any, norm: nn.Module) -> None:
    spec.gamma = norm.get_parameter("weight").numpy()
    if isinstance(norm, nn.LayerNorm):
        spec.beta = norm.bias.numpy()


def _epsilon_of(model: nn.Module) -> float:
    norm = next(module for module in model.modules() if isinstance(module, nn.LayerNorm | nn.RMSNorm))
    return torch.finfo(torch.float32).eps if norm.eps is None else norm.eps
