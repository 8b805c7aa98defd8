"""Token embeddings and positions against their formulas."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.models import TransformerConfig
from regard.nn import LearnedPositions, SinusoidalPositions, TokenEmbedding
from regard.nn.embeddings import sinusoidal


def test_sinusoid_is_the_papers() -> None:
    dim = 10
    table = sinusoidal(torch.tensor([[0, 1, 7], [100, 1023, 99_991]]), dim)
    assert table.shape == (2, 3, dim)
    for p, row in zip((0, 1, 7, 100, 1023, 99_991), table.flatten(0, 1), strict=True):
        for i in range(dim // 2):
            angle = p / 10_000 ** (2 * i / dim)
            assert row[2 * i].item() == pytest.approx(math.sin(angle), abs=1e-6)
            assert row[2 * i + 1].item() == pytest.approx(math.cos(angle), abs=1e-6)


@given(position=st.integers(0, 5000), shift=st.integers(-50, 50), base=st.sampled_from([10_000.0, 50.0]))
def test_a_shift_is_a_rotation(position: int, shift: int, base: float) -> None:
    """PE(p + k) is PE(p) with each pair turned by k times its frequency, whatever p (section 3.5)."""
    dim = 14
    before, after = sinusoidal(torch.tensor([position, position + shift]), dim, base=base).unflatten(-1, (-1, 2))
    angles = torch.tensor([shift / base ** (2 * i / dim) for i in range(dim // 2)], dtype=torch.float64)
    cos, sin = angles.cos().float(), angles.sin().float()
    turned = torch.stack([cos * before[:, 0] + sin * before[:, 1], cos * before[:, 1] - sin * before[:, 0]], -1)
    torch.testing.assert_close(turned, after, rtol=0, atol=1e-6)


@pytest.mark.parametrize("dim", [-2, 0, 1, 7])
def test_sinusoid_needs_an_even_width(dim: int) -> None:
    with pytest.raises(ArgumentError, match=f"even dim of at least 2, got {dim}"):
        sinusoidal(torch.arange(3), dim)
    with pytest.raises(ArgumentError, match=f"even dim of at least 2, got {dim}"):
        SinusoidalPositions(dim)


@pytest.mark.parametrize("offset", [0, 5])
def test_sinusoidal_positions_are_added_at_their_offset(offset: int) -> None:
    x = torch.randn(2, 3, 6)
    expected = x + sinusoidal(torch.arange(offset, offset + 3), 6)
    assert torch.equal(SinusoidalPositions(6)(x, offset=offset), expected)


def test_positions_keep_the_dtype() -> None:
    for dtype in (torch.float64, torch.bfloat16):
        assert SinusoidalPositions(6)(torch.zeros(1, 3, 6, dtype=dtype)).dtype == dtype
    exact = SinusoidalPositions(6)(torch.zeros(1, 3, 6, dtype=torch.float64))[0, 2, 0].item()
    assert exact == pytest.approx(math.sin(2), abs=1e-14)


def test_learned_positions_are_rows_of_the_table() -> None:
    positions = LearnedPositions(7, 4)
    x = torch.randn(2, 3, 4)
    assert torch.equal(positions(x), x + positions.weight[:3])
    assert torch.equal(positions(x, offset=4), x + positions.weight[4:7])
    assert positions(torch.zeros(2, 7, 4)).shape == (2, 7, 4)


@pytest.mark.parametrize(("length", "offset"), [(8, 0), (1, 7), (3, 5)])
def test_learned_positions_have_an_end(length: int, offset: int) -> None:
    with pytest.raises(ArgumentError, match=f"up to 7 tokens.*reaches {length + offset}"):
        LearnedPositions(7, 4)(torch.zeros(1, length, 4), offset=offset)


def test_token_embedding_scales_by_the_root_of_the_width() -> None:
    embedding = TokenEmbedding(11, 9)
    tokens = torch.tensor([[3, 0], [10, 3]])
    assert torch.equal(embedding(tokens), 3.0 * embedding.weight[tokens])


@pytest.mark.parametrize("gain", [1.0, 3.0, 0.5])
def test_token_embedding_has_entries_of_unit_variance(gain: float) -> None:
    embedding = TokenEmbedding(997, 31, gain=gain)
    assert embedding(torch.arange(997)).std().item() == pytest.approx(1.0, abs=0.02)
    assert embedding.weight.std().item() == pytest.approx(31**-0.5 / gain, rel=0.02)


@pytest.mark.parametrize("gain", [0.0, -1.0, float("nan"), float("inf")])
def test_a_gain_that_nothing_can_begin_with_is_refused(gain: float) -> None:
    with pytest.raises(ArgumentError, match=f"gain must be above 0, got {gain}"):
        TokenEmbedding(11, 9, gain=gain)
    with pytest.raises(ArgumentError, match=f"embedding_gain must be above 0, got {gain}"):
        TransformerConfig(embedding_gain=gain)


def test_the_padding_token_is_zero_and_learns_nothing() -> None:
    embedding = TokenEmbedding(11, 5, pad_id=2)
    tokens = torch.tensor([[1, 2, 2]])
    assert torch.equal(embedding(tokens)[0, 1:], torch.zeros(2, 5))
    embedding(tokens).sum().backward()
    assert torch.equal(embedding.weight.grad[2], torch.zeros(5))
    assert embedding.weight.grad[1].abs().min() > 0
