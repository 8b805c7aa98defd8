"""GPT-2 (Radford et al. 2019, "Language models are unsupervised multitask learners").

It is pre-norm with learned positions and GELU by tanh. Its linear layers are stored as (input, output).
"""

from functools import partial

from torch import nn

from regard.call.scores.base import Dot, ScaledDot
from regard.errors import RunFolderError
from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import TIED, Settings
from regard.models.convert.weights import Weights
from regard.models.decoder_only import DecoderOnly
from regard.models.parts import OneStackParts, StackParts
from regard.nn import FeedForward, LearnedPositions, MultiHeadAttention, PreNorm


def gpt2(settings: Settings, weights: Weights) -> DecoderOnly:
    """A GPT-2 model."""
    for name in ("scale_attn_by_inverse_layer_idx", "add_cross_attention"):
        if settings.get(name, bool, False):
            raise RunFolderError(f"{settings.source}: regard reads no GPT-2 with {name}")
    weights.strip_prefix("transformer.")
    weights.drop("h.*.attn.bias", "h.*.attn.masked_bias")  # these are causal masks, not weights
    tied = _move(settings, weights)
    dim = settings.get("n_embd", int)
    dropout = settings.get("resid_pdrop", float, 0.1)
    norm = partial(nn.LayerNorm, eps=settings.get("layer_norm_epsilon", float, 1e-5))
    stack = StackParts(
        attention=[
            partial(
                MultiHeadAttention,
                dim,
                settings.get("n_head", int),
                dropout=settings.get("attn_pdrop", float, 0.1),
                score=ScaledDot() if settings.get("scale_attn_weights", bool, True) else Dot(),
            )
        ]
        * settings.get("n_layer", int),
        feed_forward=[
            partial(
                FeedForward,
                dim,
                settings.get("n_inner", int, 4 * dim),
                activation=settings.one_of("activation_function", ACTIVATIONS, "gelu_new"),
            )
        ]
        * settings.get("n_layer", int),
        residual=partial(PreNorm, dim, dropout=dropout, norm=norm),
        positions=partial(LearnedPositions, settings.get("n_positions", int, 1024), dim),
        final_norm=partial(norm, dim),
    )
    parts = OneStackParts(
        dim=dim, stack=stack, embedding_scale=1.0, dropout=settings.get("embd_pdrop", float, 0.1), tied_output=tied
    )
    return weights.build(lambda: DecoderOnly(parts, vocab_size=settings.get("vocab_size", int)))


def _move(settings: Settings, weights: Weights) -> bool:
    tied = weights.tables("embedding", "wte.weight", tied=settings.get(TIED, bool, True))
    weights.move("wpe", "positions")
    weights.move("ln_f", "final_norm")
    for number in range(settings.get("n_layer", int)):
        theirs, ours = f"h.{number}", f"layers.{number}"
        weights.ours[f"{ours}.self_attention.in_weights.0"] = weights.take(f"{theirs}.attn.c_attn.weight").T
        weights.ours[f"{ours}.self_attention.in_bias"] = weights.take(f"{theirs}.attn.c_attn.bias")
        for name, place in (
            ("attn.c_proj", "self_attention.out"),
            ("mlp.c_fc", "feed_forward.up"),
            ("mlp.c_proj", "feed_forward.down"),
        ):
            weights.ours[f"{ours}.{place}.weight"] = weights.take(f"{theirs}.{name}.weight").T
            weights.ours[f"{ours}.{place}.bias"] = weights.take(f"{theirs}.{name}.bias")
        weights.move(f"{theirs}.ln_1", f"{ours}.residuals.0.norm")
        weights.move(f"{theirs}.ln_2", f"{ours}.residuals.1.norm")
    return tied
