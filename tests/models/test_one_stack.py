"""The models of one stack: against torch with copied weights, step by step, their maps, and the named sizes."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.call.rotary.rotary import Rotary
from regard.errors import ArgumentError, ShapeError
from regard.models import (
    DECODER_ONLY_SIZES,
    TRANSFORMER_SIZES,
    DecoderOnly,
    DecoderOnlyConfig,
    EncoderOnly,
    EncoderOnlyConfig,
    Transformer,
)
from regard.models.patches import Patches
from regard.nn import MultiHeadAttention

VOCAB, LENGTH = 17, 7
SIZES: dict[str, Any] = {"dim": 12, "num_heads": 3, "num_layers": 2, "feed_forward_dim": 19, "dropout": 0.0}


def shaken(model: nn.Module) -> Any:
    """In float64, every parameter away from its initial value, so that no bias or gain goes unseen."""
    with torch.no_grad():
        for parameter in model.double().parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return model


def decoder_only(**changes: Any) -> DecoderOnly:
    return shaken(DecoderOnly(DecoderOnlyConfig(**(SIZES | changes)), vocab_size=VOCAB))


def encoder_only(**changes: Any) -> EncoderOnly:
    return shaken(EncoderOnly(EncoderOnlyConfig(**(SIZES | changes)), vocab_size=VOCAB))


def some_text(count: int = 3) -> Tensor:
    return torch.randint(0, VOCAB, (count, LENGTH))


def copy_layer(ours: Any, theirs: Any) -> None:
    def copy_attention(mine: Any, other: nn.MultiheadAttention) -> None:
        with torch.no_grad():
            other.in_proj_weight.copy_(mine.in_weights[0])
            other.in_proj_bias.copy_(mine.in_bias)
        other.out_proj.load_state_dict(mine.out.state_dict())

    copy_attention(ours.self_attention, theirs.self_attn)
    if hasattr(ours, "cross_attention"):
        copy_attention(ours.cross_attention, theirs.multihead_attn)
    theirs.linear1.load_state_dict(ours.feed_forward.up.state_dict())
    theirs.linear2.load_state_dict(ours.feed_forward.down.state_dict())
    for number, residual in enumerate(ours.residuals, start=1):
        getattr(theirs, f"norm{number}").load_state_dict(residual.norm.state_dict())


def torchs(model: DecoderOnly | EncoderOnly) -> nn.TransformerEncoder:
    config = model.config
    is_pre = config.norm_position == "pre"
    layer = nn.TransformerEncoderLayer(
        config.dim, config.num_heads, config.feed_forward_dim, dropout=0.0, activation=config.activation,
        batch_first=True, norm_first=is_pre, dtype=torch.float64,
    )  # fmt: skip
    final = nn.LayerNorm(config.dim, dtype=torch.float64) if is_pre else None
    theirs = nn.TransformerEncoder(layer, config.num_layers, norm=final, enable_nested_tensor=False)
    for mine, other in zip(model.layers, theirs.layers, strict=True):
        copy_layer(mine, other)
    if final is not None:
        final.load_state_dict(model.final_norm.state_dict())
    return theirs.train()  # in training it takes no shortcut, and dropout is 0


@pytest.mark.parametrize("norm_position", ["pre", "post"])
@pytest.mark.parametrize("positions", ["sinusoidal", "learned"])
def test_decoder_only_equals_torch(norm_position: str, positions: str) -> None:
    model, text = decoder_only(norm_position=norm_position, positions=positions), some_text()
    ahead = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    hidden = torchs(model)(model.positions(model.embedding(text)), mask=ahead)
    torch.testing.assert_close(model(text), hidden @ model.embedding.weight.T, rtol=0, atol=1e-10)


@pytest.mark.parametrize("norm_position", ["pre", "post"])
def test_encoder_only_equals_torch(norm_position: str) -> None:
    model, text, lengths = (
        encoder_only(norm_position=norm_position, positions="learned"),
        some_text(),
        torch.tensor([7, 4, 1]),
    )
    padded = torch.arange(LENGTH) >= lengths[:, None]
    hidden = torchs(model)(model.positions(model.embedding(text)), src_key_padding_mask=padded)
    linear, norm = model.head[0], model.head[2]
    head = nn.functional.layer_norm(nn.functional.gelu(linear(hidden)), (12,), norm.weight, norm.bias)
    expected = head @ model.embedding.weight.T + model.output.bias
    torch.testing.assert_close(model(text, lengths)[~padded], expected[~padded], rtol=0, atol=1e-10)


def test_rotary_must_fit_the_heads() -> None:
    with pytest.raises(ArgumentError, match=r"heads of width 4, got Rotary\(8\)"):
        MultiHeadAttention(8, 2, rotary=Rotary(8))


def count(model: nn.Module) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def test_named_sizes_have_the_parameters_of_their_papers() -> None:
    with torch.device("meta"):
        gpt2 = DecoderOnly(DECODER_ONLY_SIZES["base"], vocab_size=50_257)
        pythia = DecoderOnly(DECODER_ONLY_SIZES["small"], vocab_size=50_304)
        assert count(gpt2) == 124_439_808  # openai-community/gpt2
        assert count(pythia) - 2 * 50_304 * 512 == 18_915_328  # the paper's table 1, without embeddings
        for size, millions in (("tiny", 2.6), ("small", 36.5)):  # their table 1: one vocabulary of about 9,700
            config = dataclasses.replace(TRANSFORMER_SIZES[size], shared_embeddings=True)
            model = Transformer(config, source_vocab_size=9_700, target_vocab_size=9_700)
            assert count(model) / 1e6 == pytest.approx(millions, abs=0.1)
        base = dataclasses.replace(TRANSFORMER_SIZES["base"], shared_embeddings=True)
        vaswani = Transformer(base, source_vocab_size=37_000, target_vocab_size=37_000)
        assert count(vaswani) / 1e6 == pytest.approx(63, abs=1)  # their table 3 says 65, with about 37,000 tokens


@pytest.mark.usefixtures("as_installed")
def test_texts_longer_than_learned_positions_or_than_they_say() -> None:
    model = decoder_only(positions="learned", max_length=6)
    assert model.max_length == 6
    with pytest.raises(ArgumentError, match="reaches 7"):
        model(some_text())
    for state in (
        model.start(some_text()[:, :6], torch.tensor([6, 6, 6])),
        model.start(some_text()[:, :6], torch.tensor([6, 2, 0])),
    ):
        with pytest.raises(ArgumentError, match="reaches 7"):
            model.step(state, torch.tensor([1, 1, 1]))
    with pytest.raises(ArgumentError, match="0 to 7 tokens"):
        model.start(some_text(), torch.tensor([8, 1, 1]))


def test_patches_are_the_formula() -> None:
    """The class with the first position, registers without one, then each patch row by row; and on another grid."""
    patches = Patches(8, channels=3, patch=(4, 3), grid=(2, 4), registers=2)
    nn.init.normal_(patches.first)
    image = torch.randn(2, 3, 8, 12)
    cut = torch.stack([image[..., r : r + 4, c : c + 3].flatten(1) for r in (0, 4) for c in (0, 3, 6, 9)], 1)
    vectors = cut @ patches.projection.weight.flatten(1).mT + patches.projection.bias + patches.positions[1:]
    ahead = torch.cat([patches.first + patches.positions[:1], patches.registers]).expand(2, -1, -1)
    torch.testing.assert_close(patches(image), torch.cat([ahead, vectors], 1))
    with torch.no_grad():
        patches.projection.weight.zero_()
    wide, tall = patches(image), patches(torch.randn(2, 3, 16, 6))  # 2 x 4 patches, and 4 x 2
    assert wide.shape == tall.shape
    assert not torch.allclose(wide, tall)
    for wrong in ((1, 1, 8, 12), (1, 3, 3, 12), (3, 12, 12)):
        with pytest.raises(ShapeError, match=r"expected images \(B, 3, at least \(4, 3\)\), got"):
            patches(torch.zeros(wrong))
