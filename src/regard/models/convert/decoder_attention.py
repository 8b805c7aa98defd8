"""The self-attention of Hugging Face's decoders: heads as in Llama, or latents as in DeepSeek-V2."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch

from regard.call.masks.base import Mask
from regard.call.rotary.rotary import Rotary
from regard.call.scores.base import ScaledDot, Score, SoftCapped
from regard.errors import RunFolderError
from regard.models.convert.folder import Settings
from regard.models.convert.rope import latent_scale
from regard.models.convert.weights import Weights
from regard.models.parts import MakeAttention
from regard.nn import AcrossHeads, LatentAttention, MultiHeadAttention
from regard.nn.head_norms import HeadNorm

PROJECTIONS = ("q_proj", "k_proj", "v_proj", "o_proj")


@dataclass(frozen=True, slots=True)
class Place:
    """The parts of a layer's attention that differ from layer to layer."""

    layer: str
    window: Mask | None
    rotary: Rotary | None


def gemma_score(settings: Settings) -> Score:
    """A scale of its own."""
    return ScaledDot(settings.get("query_pre_attn_scalar", float, 256.0) ** -0.5)


def capped_gemma_score(settings: Settings) -> Score:
    """A scale of its own, and a cap, which the attention of Gemma 3 does not read in transformers."""
    cap = settings.optional("attn_logit_softcapping", float)
    return gemma_score(settings) if cap is None else SoftCapped(gemma_score(settings), cap)


def each_head(norm: HeadNorm) -> HeadNorm:
    """The norm of each head by itself, as `AcrossHeads` is that of all."""
    return norm


@dataclass(frozen=True, slots=True)
class MultiHeadReader:
    """Multi-head attention."""

    score: Callable[[Settings], Score] = lambda settings: ScaledDot()
    qk_norm: Callable[[HeadNorm], HeadNorm | AcrossHeads] | None = None

    def rotated_width(self, settings: Settings) -> int:
        """The width that rotary positions get."""
        dim, heads = settings.get("hidden_size", int), settings.get("num_attention_heads", int)
        return settings.get("head_dim", int, dim // heads)

    def read(self, settings: Settings, weights: Weights, place: Place, norm: HeadNorm) -> MakeAttention:
        """Move the weights of a layer, and return the maker of its attention."""
        theirs, ours = f"{place.layer}.self_attn", f"{place.layer}.self_attention"
        if f"{theirs}.qkv_proj.weight" in weights:
            weights.ours[f"{ours}.in_weights.0"] = weights.take(f"{theirs}.qkv_proj.weight")
            weights.move(f"{theirs}.o_proj", f"{ours}.out")
        else:
            weights.attention(theirs, ours, PROJECTIONS)
        has_bias, has_sink = f"{ours}.in_bias" in weights.ours, f"{theirs}.sinks" in weights
        if has_bias and f"{ours}.out.bias" not in weights.ours:
            weights.ours[f"{ours}.out.bias"] = torch.zeros(len(weights.ours[f"{ours}.out.weight"]))
        if has_sink:
            weights.ours[f"{ours}.sink"] = weights.take(f"{theirs}.sinks")
        if self.qk_norm is not None:
            inner = ".norm" if self.qk_norm is AcrossHeads else ""
            weights.move(f"{theirs}.q_norm", f"{ours}.query_norm{inner}")
            weights.move(f"{theirs}.k_norm", f"{ours}.key_norm{inner}")
        heads = settings.get("num_attention_heads", int)
        return partial(
            MultiHeadAttention,
            settings.get("hidden_size", int),
            heads,
            num_kv_heads=settings.get("num_key_value_heads", int, heads),
            head_dim=self.rotated_width(settings),
            bias=has_bias,
            dropout=settings.get("attention_dropout", float, 0.0),
            score=self.score(settings),
            qk_norm=None if self.qk_norm is None else self.qk_norm(norm),
            sink=has_sink,
            window=place.window,
            rotary=place.rotary,
        )


@dataclass(frozen=True, slots=True)
class LatentReader:
    """Multi-head latent attention."""

    def rotated_width(self, settings: Settings) -> int:
        """The width that rotary positions get."""
        return settings.get("qk_rope_head_dim", int)

    def read(self, settings: Settings, weights: Weights, place: Place, norm: HeadNorm) -> MakeAttention:
        """Move the weights of a layer, and return the maker of its attention."""
        assert place.rotary is not None
        theirs, ours = f"{place.layer}.self_attn", f"{place.layer}.self_attention"
        head_dim, value_dim = settings.get("qk_nope_head_dim", int), settings.get("v_head_dim", int)
        latent_dim, query_dim = settings.get("kv_lora_rank", int), settings.optional("q_lora_rank", int)
        if query_dim is None:
            weights.move(f"{theirs}.q_proj", f"{ours}.query")
        else:
            for number, name in enumerate(("q_a_proj", "q_a_layernorm", "q_b_proj")):
                weights.move(f"{theirs}.{name}", f"{ours}.query.{number}")
        weights.move(f"{theirs}.kv_a_proj_with_mqa", f"{ours}.latent")
        weights.move(f"{theirs}.kv_a_layernorm", f"{ours}.latent_norm")
        both = weights.take(f"{theirs}.kv_b_proj.weight")
        if both.dim() != 2 or len(both) % (head_dim + value_dim):
            raise RunFolderError(f"{weights.source} does not fit its config.json: kv_b_proj is {tuple(both.shape)}")
        heads = both.unflatten(0, (-1, head_dim + value_dim))
        weights.ours[f"{ours}.key"], weights.ours[f"{ours}.value"] = heads.split((head_dim, value_dim), 1)
        weights.move(f"{theirs}.o_proj", f"{ours}.out")
        return partial(
            LatentAttention,
            settings.get("hidden_size", int),
            settings.get("num_attention_heads", int),
            latent_dim=latent_dim,
            head_dim=head_dim,
            value_dim=value_dim,
            rotary=place.rotary,
            query_latent_dim=query_dim,
            scale=(head_dim + place.rotary.dim) ** -0.5 * latent_scale(settings),
            norm=norm,
            bias=settings.get("attention_bias", bool, False),
        )
