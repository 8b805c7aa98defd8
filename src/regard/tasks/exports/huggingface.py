"""A folder for Hugging Face transformers, in the model family that computes exactly as the run's model.

    norm_position="post", positions="sinusoidal"   Marian
    norm_position="pre",  positions="sinusoidal"   Pegasus
    norm_position="pre",  positions="learned"      Blenderbot

All have LayerNorm, ReLU or GELU, and a key/value head for each head. In these families the sines stand before the
cosines, here each sine stands beside its cosine. So all vectors of the model are permuted alike, which changes no
product. Two vocabularies get the same size: the smaller is filled up with tokens of no probability.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.files.atomic import write_atomically, write_json
from regard.files.untrusted import parse_json, safetensors_library
from regard.models.stack import SelfAttentionLayer
from regard.models.transformer import DecoderLayer
from regard.tasks.exports.trained import ExportedRun, refuse, split_attention
from regard.tasks.text.tokenizers import BOS, EOS, PAD, SPECIAL_TOKENS, UNK, Tokenizer

NEVER = -1e9
"""The logit of a token outside the vocabulary."""


FAMILIES = {
    ("post", "sinusoidal"): ("marian", "MarianMTModel"),
    ("pre", "sinusoidal"): ("pegasus", "PegasusForConditionalGeneration"),
    ("pre", "learned"): ("blenderbot", "BlenderbotForConditionalGeneration"),
}
"""From norm_position and positions to the model type and the architecture of the family."""


def to_huggingface(trained: ExportedRun, out: Path) -> None:
    config = _config(trained)  # it refuses a model that no family expresses
    tensors = {name: tensor.detach().float().contiguous() for name, tensor in _tensors(trained)}
    write_atomically(out / "model.safetensors", safetensors_library().torch.save(tensors, metadata={"format": "pt"}))
    tokens = {"pad_token_id": PAD, "bos_token_id": BOS, "eos_token_id": EOS, "decoder_start_token_id": BOS}
    write_json(out / "config.json", config | tokens)
    write_json(out / "generation_config.json", {**tokens, "max_length": trained.max_length, "num_beams": 5})
    write_tokenizers(trained, out)


def _family(trained: ExportedRun) -> tuple[str, str]:
    config = trained.config
    refuse("huggingface", config, norm=("layer",), activation=("relu", "gelu"), positions=("sinusoidal", "learned"))
    key = config.norm_position, config.positions
    if key not in FAMILIES:
        known = "; ".join(f"norm_position={norm} with positions={positions}" for norm, positions in FAMILIES)
        raise ArgumentError(
            f"huggingface cannot express norm_position={key[0]} with positions={key[1]}; it can {known}"
        )
    return FAMILIES[key]


def _config(trained: ExportedRun) -> dict[str, Any]:
    config, tied, (model_type, architecture) = trained.config, _is_tied(trained), _family(trained)
    sides = {
        f"{side}_{name}": value
        for side, layers in (("encoder", config.encoder_layers), ("decoder", config.decoder_layers))
        for name, value in (
            ("layers", layers),
            ("attention_heads", config.num_heads),
            ("ffn_dim", config.feed_forward_dim),
        )
    }
    return {
        "model_type": model_type,
        "architectures": [architecture],
        "is_encoder_decoder": True,
        "vocab_size": _vocab_size(trained),
        "d_model": config.dim,
        **sides,
        "activation_function": config.activation,
        "max_position_embeddings": trained.max_length,
        "scale_embedding": True,
        "dropout": config.dropout,
        "attention_dropout": config.attention_dropout,
        "activation_dropout": config.dropout,
        "tie_word_embeddings": tied,
        "share_encoder_decoder_embeddings": tied,
        "forced_eos_token_id": None,
        "dtype": "float32",
    }


def _is_tied(trained: ExportedRun) -> bool:
    """Whether one matrix serves as both embeddings and as output layer; else each matrix is written separately."""
    return trained.config.shared_embeddings and trained.config.tied_output


def _vocab_size(trained: ExportedRun) -> int:
    return max(len(trained.source_tokenizer), len(trained.target_tokenizer))


def _tensors(trained: ExportedRun) -> Iterator[tuple[str, Tensor]]:
    model, config, (model_type, _) = trained.model, trained.config, _family(trained)
    order = _order(trained)

    def rows(matrix: Tensor) -> Tensor:
        return _filled(matrix[:, order], _vocab_size(trained), 0.0)

    if _is_tied(trained):
        yield "model.shared.weight", rows(model.target_embedding.weight)
    else:
        yield "model.encoder.embed_tokens.weight", rows(model.source_embedding.weight)
        yield "model.decoder.embed_tokens.weight", rows(model.target_embedding.weight)
        yield "lm_head.weight", rows(model.output.weight)
        if model_type != "marian":  # the others have an unread table, and look for it
            yield "model.shared.weight", rows(model.source_embedding.weight)
    bias = torch.zeros(len(trained.target_tokenizer), 1)
    yield "final_logits_bias", _filled(bias, _vocab_size(trained), NEVER).T
    sides = (
        ("encoder", model.encoder, model.source_positions, model.encoder_norm),
        ("decoder", model.decoder, model.target_positions, model.decoder_norm),
    )
    for side, layers, positions, final_norm in sides:
        table = trained.positions(positions)
        yield f"model.{side}.embed_positions.weight", table[:, order]
        if config.norm_position == "pre":
            yield from _norm(f"model.{side}.layer_norm", final_norm, order)
        for number, layer in enumerate(layers):
            assert isinstance(layer, SelfAttentionLayer | DecoderLayer)
            yield from _layer(f"model.{side}.layers.{number}", layer, order)


def _order(trained: ExportedRun) -> Tensor:
    order = torch.arange(trained.config.dim)
    return torch.cat([order[::2], order[1::2]]) if trained.config.positions == "sinusoidal" else order


def _filled(matrix: Tensor, count: int, value: float) -> Tensor:
    return nn.functional.pad(matrix, (0, 0, 0, count - len(matrix)), value=value)


def _layer(name: str, layer: SelfAttentionLayer | DecoderLayer, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    attentions = {"self_attn": layer.self_attention}
    if isinstance(layer, DecoderLayer):
        attentions["encoder_attn"] = layer.cross_attention
    for theirs, attention in attentions.items():
        parts = split_attention(attention)
        for part in ("query", "key", "value"):
            yield from _reads(f"{name}.{theirs}.{part[0]}_proj", parts[part], order)
        yield from _writes(f"{name}.{theirs}.out_proj", parts["output"], order)
    yield from _reads(f"{name}.fc1", layer.feed_forward.get_submodule("up"), order)
    yield from _writes(f"{name}.fc2", layer.feed_forward.get_submodule("down"), order)
    norms = [*(f"{theirs}_layer_norm" for theirs in attentions), "final_layer_norm"]
    for theirs, residual in zip(norms, layer.residuals, strict=True):
        yield from _norm(f"{name}.{theirs}", residual.get_submodule("norm"), order)


def _reads(name: str, linear: nn.Module, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", linear.get_parameter("weight")[:, order]
    yield f"{name}.bias", linear.get_parameter("bias")


def _writes(name: str, linear: nn.Module, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield f"{name}.weight", linear.get_parameter("weight")[order]
    yield f"{name}.bias", linear.get_parameter("bias")[order]


def _norm(name: str, norm: nn.Module, order: Tensor) -> Iterator[tuple[str, Tensor]]:
    for part in ("weight", "bias"):
        yield f"{name}.{part}", norm.get_parameter(part)[order]


def write_tokenizers(trained: ExportedRun, out: Path) -> None:
    """Write tokenizer.json, which adds the end token to a text, and target_tokenizer.json if the target has its own."""
    files = {"tokenizer.json": trained.source_tokenizer}
    if len({one.fingerprint() for one in trained.tokenizers}) > 1:
        files["target_tokenizer.json"] = trained.target_tokenizer
    for name, tokenizer in files.items():
        write_json(out / name, _tokenizer(tokenizer))
    # Without unk_token: what transformers knows as special is no part of a text that it writes.
    names = dict(zip(("pad_token", "bos_token", "eos_token"), SPECIAL_TOKENS[:UNK], strict=True))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": trained.max_length, **names}
    write_json(out / "tokenizer_config.json", {**settings, "clean_up_tokenization_spaces": False})


def _tokenizer(tokenizer: Tokenizer) -> dict[str, Any]:
    """The tokenizer's JSON, with the steps of our own code: NFC before it, the end token after it, and unknown words
    written as U+FFFD."""
    content: dict[str, Any] = parse_json(tokenizer.to_json())
    for token in content["added_tokens"]:
        token["special"] = token["id"] != tokenizer.unknown_id
    steps = [{"type": "NFC"}, content["normalizer"]] if content["normalizer"] else [{"type": "NFC"}]
    content["normalizer"] = {"type": "Sequence", "normalizers": steps}
    end = SPECIAL_TOKENS[EOS]
    content["post_processor"] = {
        "type": "TemplateProcessing",
        "single": [{"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": end, "type_id": 0}}],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 0}}],
        "special_tokens": {end: {"id": end, "ids": [EOS], "tokens": [end]}},
    }
    return content
