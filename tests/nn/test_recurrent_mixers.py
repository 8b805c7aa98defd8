"""Gated delta net, Mamba-2 and lightning attention: against transformers' modules, in pieces, and with padding."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.models import DecoderOnly, DecoderOnlyConfig, EncoderOnlyConfig
from regard.nn import GatedDeltaNet, LightningAttention, Mamba2, RecurrentState
from regard.nn.recurrent_mixers import RecurrentMixer

DIM, LENGTH = 16, 70
LAYERS: dict[str, Any] = {
    "gated_delta": lambda: GatedDeltaNet(DIM, 2, num_value_heads=4, key_dim=6, value_dim=5),
    "mamba2": lambda: Mamba2(DIM, 4, state_dim=6, groups=2),
    "lightning": lambda: LightningAttention(DIM, 4, layer=1, num_layers=3),
}


@pytest.fixture(params=LAYERS)
def layer(request: pytest.FixtureRequest) -> RecurrentMixer:
    made: RecurrentMixer = LAYERS[request.param]().double()
    return made


def inputs(batch: int = 2, length: int = LENGTH) -> Tensor:
    return torch.randn(batch, length, DIM, dtype=torch.float64)


def test_the_map_times_the_values_is_the_output(layer: RecurrentMixer) -> None:
    x = inputs()
    output, weights = layer(x, return_weights=True)
    mixed, rest = layer.inputs(x).split(layer.sizes, -1)
    made = layer.heads(mixed if layer.conv is None else layer.conv(mixed, None)[0], rest)
    exact = weights.dense() @ made.value
    torch.testing.assert_close(layer.read_out(exact, made), output)
    assert torch.equal(layer(x), output)
    assert bool((weights.dense().triu(1) == 0).all())


def test_a_state_goes_on_where_it_ended(layer: RecurrentMixer) -> None:
    x, outputs, cache = inputs(), [], None
    for part in x.split([1, 1, 2, 60, 1, 5], 1):
        output, cache = layer.extend(part, cache)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), layer(x))
    assert cache is not None
    assert cache.length == LENGTH
    swapped = cache.reorder(torch.tensor([1, 0]))
    exact = layer(torch.cat([x, x[:, :1]], 1))[:, -1:]
    torch.testing.assert_close(layer.extend(x[:, :1].flip(0), swapped)[0].flip(0), exact)


@pytest.mark.parametrize("side", ["right", "left"])
def test_padding_leaves_the_state_alone(layer: RecurrentMixer, side: str) -> None:
    x, valid = inputs(3, 9), torch.tensor([9, 2, 0])
    place = torch.arange(9)
    keep = place < valid[:, None] if side == "right" else place >= 9 - valid[:, None]
    last, cache = layer.extend(x, None, mask=regard.causal() & regard.padding(keep))
    follows = inputs(3, 2)
    output, _ = layer.extend(follows, cache)
    for row, count in enumerate(valid.tolist()):
        alone = torch.cat([x[row, keep[row]], follows[row]])[None]
        exact = layer(alone)[0]
        torch.testing.assert_close(output[row], exact[-2:])
        torch.testing.assert_close(last[row, keep[row]], exact[:count])


def test_gradients_reach_every_parameter(layer: RecurrentMixer) -> None:
    layer(inputs()).square().sum().backward()
    for name, parameter in layer.named_parameters():
        assert parameter.grad is not None
        assert parameter.grad.abs().sum() > 0, name


def test_autocast_and_more_batch_dimensions() -> None:
    for make in LAYERS.values():
        layer = make()
        x = torch.randn(2, 3, 5, DIM)
        torch.testing.assert_close(layer(x)[1, 2], layer(x[1, 2][None])[0])
        with torch.autocast("cpu", torch.bfloat16):
            half = layer(x)
        torch.testing.assert_close(half.float(), layer(x), atol=0.1, rtol=0.1)


def test_bad_arguments() -> None:
    attend = LAYERS["gated_delta"]()
    x = torch.randn(1, 5, DIM)
    with pytest.raises(ArgumentError, match="its mask may be causal and hide padding, got"):
        attend(x, mask=regard.causal() & regard.window(2))
    for make in (
        lambda: GatedDeltaNet(8, 3, num_value_heads=4),
        lambda: Mamba2(8, 3),
        lambda: Mamba2(8, 4, groups=3),
        lambda: LightningAttention(8, 3),
        lambda: LightningAttention(8, 2, layer=2, num_layers=2),
        lambda: GatedDeltaNet(8, 2, conv_size=0),
    ):
        with pytest.raises(ArgumentError):
            make()


def _theirs(module: str, name: str, config: str, **settings: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    modelling = pytest.importorskip(f"transformers.models.{module}.modeling_{module}")
    torch.manual_seed(0)
    made: nn.Module = getattr(modelling, name)(getattr(transformers, config)(**settings), layer_idx=0)
    for parameter in made.parameters():
        if parameter.dim() > 1:
            nn.init.normal_(parameter, std=0.3)
    return made.eval()


def _close(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, float(theirs.detach().abs().max())))


def _copy(ours: nn.Module, theirs: dict[str, Tensor]) -> None:
    assert {name: tuple(x.shape) for name, x in ours.state_dict().items()} == {
        name: tuple(x.shape) for name, x in theirs.items()
    }
    ours.load_state_dict(theirs)


@torch.no_grad()
def test_the_gated_delta_net_of_qwen3_next() -> None:
    heads, values, width = 2, 4, 6
    theirs: Any = _theirs(
        "qwen3_next", "Qwen3NextGatedDeltaNet", "Qwen3NextConfig", hidden_size=DIM, linear_num_key_heads=heads,
        linear_num_value_heads=values, linear_key_head_dim=width, linear_value_head_dim=width, num_hidden_layers=1,
    )  # fmt: skip
    ours = GatedDeltaNet(DIM, heads, num_value_heads=values, key_dim=width, value_dim=width)
    group = values // heads
    parts = theirs.in_proj_qkvz.weight.unflatten(0, (heads, -1)).split([width, width, group * width, group * width], 1)
    b, a = theirs.in_proj_ba.weight.unflatten(0, (heads, -1)).split(group, 1)
    rows = [part.flatten(0, 1) for part in (*parts, a, b)]
    _copy(ours, {
        "inputs.weight": torch.cat(rows), "conv.weight": theirs.conv1d.weight, "log_rate": theirs.A_log,
        "step_bias": theirs.dt_bias, "norm.weight": theirs.norm.weight, "out.weight": theirs.out_proj.weight,
    })  # fmt: skip
    x = torch.randn(2, LENGTH, DIM)
    _close(ours(x), theirs(x))


@torch.no_grad()
def test_mamba2_of_transformers() -> None:
    theirs: Any = _theirs(
        "mamba2", "Mamba2Mixer", "Mamba2Config", hidden_size=DIM, num_heads=4, head_dim=8, state_size=6, n_groups=2,
        expand=2, num_hidden_layers=1, chunk_size=32,
    )  # fmt: skip
    ours = Mamba2(DIM, 4, state_dim=6, groups=2)
    gate, mixed, step = theirs.in_proj.weight.split([2 * DIM, 2 * DIM + 24, 4])
    rows = torch.cat([mixed, gate, step])
    theirs.norm.weight[DIM:] = theirs.norm.weight[:DIM]  # (One gain for each group here.)
    _copy(ours, {
        "inputs.weight": rows, "conv.weight": theirs.conv1d.weight, "conv.bias": theirs.conv1d.bias,
        "log_rate": theirs.A_log, "step_bias": theirs.dt_bias, "skip": theirs.D,
        "norm.weight": theirs.norm.weight[:DIM], "out.weight": theirs.out_proj.weight,
    })  # fmt: skip
    x = torch.randn(2, LENGTH, DIM)
    _close(ours(x), theirs(x))


@torch.no_grad()
def test_lightning_attention_of_minimax() -> None:
    theirs: Any = _theirs(
        "minimax", "MiniMaxLightningAttention", "MiniMaxConfig", hidden_size=DIM, num_attention_heads=4, head_dim=4,
        num_hidden_layers=3, block_size=32,
    )  # fmt: skip
    ours = LightningAttention(DIM, 4, layer=0, num_layers=3)
    qkv = theirs.qkv_proj.weight.unflatten(0, (4, 3, 4)).transpose(0, 1).flatten(0, 2)
    _copy(ours, {
        "inputs.weight": torch.cat([qkv, theirs.output_gate.weight]), "norm.weight": theirs.norm.weight,
        "out.weight": theirs.out_proj.weight,
    })  # fmt: skip
    x = torch.randn(2, LENGTH, DIM)
    _close(ours(x), theirs(x, (x, x), None)[0])


PATTERNS = ("gated_delta", "mamba2", "lightning", "2 gated_delta, 1 full", "mamba2, lightning, full")


@pytest.mark.parametrize("layers", PATTERNS)
@torch.no_grad()
def test_a_decoder_steps_as_it_reads(layers: str) -> None:
    """With prompts of unlike lengths, one of them empty, and beams in another order."""
    model = DecoderOnly(
        DecoderOnlyConfig(dim=DIM, num_heads=2, num_layers=3, feed_forward_dim=20, layers=layers), vocab_size=11
    )
    model = model.double().eval()
    text, valid = torch.randint(4, 11, (3, 9)), torch.tensor([9, 4, 0])
    rows = [torch.cat([row[:count], text[0, :2]]) for row, count in zip(text, valid.tolist(), strict=True)]
    exact = [model(row[None])[0, -2:] for row in rows]
    step = model.step(model.start(text, valid), text[0, :1].expand(3))
    torch.testing.assert_close(step.logits, torch.stack([one[0] for one in exact]))
    order = torch.tensor([1, 1, 0])
    again = model.step(model.reorder(step.state, order), text[0, 1:2].expand(3))
    torch.testing.assert_close(again.logits, torch.stack([exact[n][1] for n in order.tolist()]))
    maps = model.attend(text)
    assert [tuple(one.shape) for one in maps.values()] == [(3, 2, 9, 9)] * 3
    states = [cache for cache in again.state.caches if isinstance(cache, RecurrentState)]
    assert {cache.length for cache in states} == {11}


def test_an_encoder_has_no_layers_that_read_from_left_to_right() -> None:
    with pytest.raises(ArgumentError, match="gated_delta layers read from left to right, and an encoder reads both"):
        EncoderOnlyConfig(layers="3 gated_delta, 1 full")
