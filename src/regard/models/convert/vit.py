"""ViT (Dosovitskiy et al. 2020, arXiv:2010.11929) and DINOv2 (Oquab et al. 2023, arXiv:2304.07193): images."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import nn

from regard.errors import RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.bert import NoHead
from regard.models.convert.folder import Settings
from regard.models.convert.weights import Weights
from regard.models.encoder_only import EncoderOnly
from regard.models.parts import Maker, OneStackParts, StackParts
from regard.models.patches import BICUBIC, Patches, Resample
from regard.nn import FeedForward, GatedFeedForward, LayerScale, MultiHeadAttention, NoPositions, PreNorm, SandwichNorm
from regard.nn.residual import Residual

PROJECTIONS = ("attention.query", "attention.key", "attention.value", "output.dense")


@dataclass(frozen=True, slots=True)
class VisionFamily:
    """A family: its names, and the parts in which it differs from ViT."""

    base: str
    names: tuple[tuple[str, str], ...]
    """A layer's norms, and networks: theirs, and ours."""
    hidden: Callable[[Settings], int]
    """The width of the feed-forward networks."""
    residual: Callable[..., Residual] = PreNorm
    resample: Resample = BICUBIC
    eps: float = 1e-12
    registers: int = 0
    """Where the configuration does not say."""
    left_out: tuple[str, ...] = ("embeddings.mask_token", "pooler.*")


_DINO = (
    ("norm1", "residuals.0.norm"), ("layer_scale1", "residuals.0.after"), ("norm2", "residuals.1.norm"),
    ("layer_scale2", "residuals.1.after"), ("mlp.fc1", "feed_forward.up"), ("mlp.fc2", "feed_forward.down"),
    ("mlp.weights_in", "feed_forward.gate_and_up"), ("mlp.weights_out", "feed_forward.down"),
)  # fmt: skip


def _dino(base: str, resample: Resample, registers: int) -> VisionFamily:
    return VisionFamily(
        base, _DINO, lambda settings: int(settings.get("hidden_size", int) * settings.get("mlp_ratio", float, 4.0)),
        partial(SandwichNorm, after=LayerScale), resample, 1e-6, registers, ("embeddings.mask_token", "classifier.*"),
    )  # fmt: skip


VIT = VisionFamily(
    "vit.",
    (
        ("layernorm_before", "residuals.0.norm"), ("layernorm_after", "residuals.1.norm"),
        ("intermediate.dense", "feed_forward.up"), ("output.dense", "feed_forward.down"),
    ),
    lambda settings: settings.get("intermediate_size", int, 3072),
)  # fmt: skip
DINOV2 = _dino("dinov2.", BICUBIC, 0)
DINOV2_REGISTERS = _dino("dinov2_with_registers.", partial(BICUBIC, antialias=True), 4)


def vision(family: VisionFamily, settings: Settings, weights: Weights) -> EncoderOnly:
    """A model of one of these families: its vectors, and the classes of a ViT at its first token."""
    weights.strip_prefix(family.base)
    weights.rename(".lambda1", ".weight")
    weights.drop(*family.left_out)
    _move(family, settings, weights)
    has_head = "classifier.weight" in weights
    dim, heads = settings.get("hidden_size", int), settings.get("num_attention_heads", int)
    if has_head:
        weights.move("classifier", "output")
    else:
        weights.ours["output.weight"] = torch.zeros(1, dim)
    norm = partial(nn.LayerNorm, eps=settings.get("layer_norm_eps", float, family.eps))
    size, patch = _pair(settings, "image_size", 224), _pair(settings, "patch_size", 16)
    dropout, layers = settings.get("hidden_dropout_prob", float, 0.0), settings.get("num_hidden_layers", int)
    attention_dropout = settings.get("attention_probs_dropout_prob", float, 0.0)
    parts = OneStackParts(
        dim=dim,
        inputs=partial(
            Patches,
            dim,
            channels=settings.get("num_channels", int, 3),
            patch=patch,
            grid=(size[0] // max(patch[0], 1), size[1] // max(patch[1], 1)),
            registers=len(weights.ours["embedding.registers"]),
            resample=family.resample,
        ),
        stack=StackParts(
            attention=[partial(MultiHeadAttention, dim, heads, dropout=attention_dropout)] * layers,
            feed_forward=[_feed_forward(family, settings, dim)] * layers,
            residual=partial(family.residual, dim, dropout=dropout, norm=norm),
            positions=NoPositions,
            final_norm=partial(norm, dim),
        ),
        dropout=dropout,
        head=nn.Identity if has_head else NoHead,
        tied_output=False,
        output_bias=has_head,
    )
    return weights.build(lambda: EncoderOnly(parts, vocab_size=len(weights.ours["output.weight"])))


def _feed_forward(family: VisionFamily, settings: Settings, dim: int) -> Maker:
    hidden = family.hidden(settings)
    if settings.get("use_swiglu_ffn", bool, False):
        return partial(GatedFeedForward, dim, (hidden * 2 // 3 + 7) // 8 * 8, bias=True)
    return partial(FeedForward, dim, hidden, activation=settings.one_of("hidden_act", ACTIVATIONS, "gelu"))


def _pair(settings: Settings, name: str, default: int) -> tuple[int, int]:
    """The height and width of a setting that is one number or two."""
    found = settings.values.get(name, default)
    pair = found if isinstance(found, list) else [found, found]
    if len(pair) != 2 or not all(type(one) is int for one in pair):
        raise RunFolderError(f"{settings.source}: {name} must be a whole number or two, got {found!r:.80}")
    return pair[0], pair[1]


def _move(family: VisionFamily, settings: Settings, weights: Weights) -> None:
    dim = settings.get("hidden_size", int)
    weights.move("embeddings.patch_embeddings.projection", "embedding.projection")
    weights.ours["embedding.first"] = weights.take("embeddings.cls_token")[0]
    weights.ours["embedding.positions"] = weights.take("embeddings.position_embeddings")[0]
    has_registers = settings.get("num_register_tokens", int, family.registers) > 0
    weights.ours["embedding.registers"] = (
        weights.take("embeddings.register_tokens")[0] if has_registers else torch.zeros(0, dim)
    )
    weights.move("layernorm", "final_norm")
    is_gated = settings.get("use_swiglu_ffn", bool, False)
    for number in range(settings.get("num_hidden_layers", int)):
        theirs, ours = f"encoder.layer.{number}", f"layers.{number}"
        packed = f"{ours}.self_attention"
        weights.attention(f"{theirs}.attention", packed, PROJECTIONS)
        if not settings.get("qkv_bias", bool, True):
            weights.ours[f"{packed}.in_bias"] = torch.zeros(len(weights.ours[f"{packed}.in_weights.0"]))
        for name, place in family.names:
            if "mlp." not in name or ("weights" in name) == is_gated:
                weights.move(f"{theirs}.{name}", f"{ours}.{place}")
