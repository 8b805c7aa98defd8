"""Sines and cosines of positions that are kept for the next call: the same numbers, wherever they come from."""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from regard.call.rotary import rotary as rotary_file
from regard.call.rotary.rotary import Half, Interleaved, Layout, Rotary
from regard.call.rotary.scalings import DynamicNTK, PositionInterpolation, Scaling, plain_frequencies
from regard.nn import SinusoidalPositions, embeddings
from regard.nn.embeddings import sinusoidal
from regard.tensors.guards import KeptPlace, may_be_kept

DTYPES = [torch.float32, torch.float64, torch.bfloat16]


def forget() -> None:
    rotary_file._kept.cache_clear()
    embeddings._table.cache_clear()


@given(
    offset=st.one_of(st.integers(0, 40), st.integers(131_060, 131_080)),
    length=st.integers(0, 20),
    half=st.booleans(),
    dtype=st.sampled_from(DTYPES),
)
def test_kept_sinusoids_are_those_that_are_computed(offset: int, length: int, half: bool, dtype: torch.dtype) -> None:
    x = torch.randn(2, length, 6, dtype=dtype)
    layout = Half() if half else Interleaved()
    waves = sinusoidal(torch.arange(offset, offset + length), 6, dtype=dtype)
    expected = x + layout.join(*Interleaved().split(waves))
    assert torch.equal(SinusoidalPositions(6, layout)(x, offset=offset), expected)


@given(
    offset=st.integers(-5, 40),
    length=st.integers(1, 20),
    dtype=st.sampled_from(DTYPES),
    scaling=st.sampled_from([None, PositionInterpolation(2.0), DynamicNTK(factor=2.0, original_length=8)]),
    whole=st.sampled_from([None, 12, 70]),
)
def test_kept_angles_are_those_that_are_computed(
    offset: int, length: int, dtype: torch.dtype, scaling: Scaling | None, whole: int | None
) -> None:
    x, rotary = torch.randn(2, 3, length, 8, dtype=dtype), Rotary(8, scaling=scaling)
    cos, sin = rotary.cos_sin(torch.arange(offset, offset + length), offset + length if whole is None else whole)
    assert torch.equal(rotary.rotate(x, offset, length=whole), rotary.turn(x, cos, sin))


def test_the_layers_of_a_model_share_what_is_computed() -> None:
    forget()
    x = torch.randn(1, 2, 5, 8)
    for _ in range(3):
        Rotary(8).rotate(x, 2), Rotary(8, base=7.0).rotate(x, 2)
    assert (rotary_file._kept.cache_info().misses, rotary_file._kept.cache_info().hits) == (2, 4)
    for offset in range(7):
        SinusoidalPositions(8)(x, offset=offset)  # 5 to 11 positions: tables of 8 and of 16.
    assert embeddings._table.cache_info().misses == 2


def test_what_inference_computed_serves_training() -> None:
    forget()
    x = torch.randn(1, 2, 5, 8)
    with torch.inference_mode():
        Rotary(8).rotate(x), SinusoidalPositions(8)(x)
    assert not embeddings._table(8, 8, Interleaved(), torch.float32).is_inference()
    q = x.clone().requires_grad_()
    SinusoidalPositions(8)(Rotary(8).rotate(q)).square().sum().backward()
    assert q.grad is not None
    assert q.grad.isfinite().all()


def test_what_training_computed_holds_no_graph() -> None:
    forget()
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    Rotary(8).rotate(x).sum().backward()
    place = KeptPlace(torch.device("cpu"), 0)
    assert not any(kept.requires_grad for kept in rotary_file._kept(10_000.0, 8, None, 0, 5, 5, torch.float32, place))


def test_long_sequences_are_not_kept() -> None:
    forget()
    long, wide = torch.zeros(1, 4_097, 2), torch.zeros(1, 1_025, 1_024)
    assert Rotary(2).rotate(long).shape == long.shape
    assert SinusoidalPositions(1_024)(wide).shape == wide.shape
    assert rotary_file._kept.cache_info().misses == embeddings._table.cache_info().misses == 0


def test_a_transform_or_a_mode_keeps_nothing() -> None:
    forget()
    x = torch.randn(3, 2, 5, 8)
    expected = Rotary(8).rotate(x)
    forget()
    assert torch.equal(torch.func.vmap(Rotary(8).rotate)(x), expected)
    with torch.no_grad(), torch._subclasses.FakeTensorMode() as mode:
        fake = mode.from_tensor(x)
        assert not may_be_kept(fake)
        assert SinusoidalPositions(8)(Rotary(8).rotate(fake)).shape == x.shape
    assert rotary_file._kept.cache_info().misses == embeddings._table.cache_info().misses == 0


@dataclass
class Learning(Scaling):
    factor: list[float] = field(default_factory=lambda: [1.0])

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        return self.factor[0] * torch.ones(dim // 2, dtype=torch.float64)


def test_a_scaling_without_a_hash_is_asked_each_time() -> None:
    scaling, x = Learning(), torch.tensor([[[1.0, 0.0]] * 2])
    rotary = Rotary(2, scaling=scaling)
    first = rotary.rotate(x)
    scaling.factor[0] = 0.0
    assert torch.equal(rotary.rotate(x), x)
    assert not torch.equal(first, x)


class Settings(Scaling):
    def __init__(self, factor: Tensor) -> None:
        self.factor = factor

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        return plain_frequencies(base, dim, length.device) / self.factor


class OfItsOwn(Rotary):
    def cos_sin(self, positions: Tensor, length: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        cos, sin = super().cos_sin(positions, length)
        return cos * GAIN, sin * GAIN


GAIN = torch.ones((), dtype=torch.float64)


@pytest.mark.parametrize("kind", [Settings, PositionInterpolation, OfItsOwn])
def test_settings_that_learn_are_asked_each_time(kind: Any) -> None:
    factor, x = torch.full((), 2.0, dtype=torch.float64), torch.randn(1, 2, 5, 8)
    rotary = OfItsOwn(8) if kind is OfItsOwn else Rotary(8, scaling=kind(factor))
    factor = GAIN if kind is OfItsOwn else factor
    with torch.no_grad():  # Looked at first, and trained then.
        first = rotary.rotate(x)
    try:
        factor.requires_grad_()
        for _ in range(2):
            gradient = torch.autograd.grad(rotary.rotate(x).square()[..., :2].sum(), factor)[0]
            assert gradient != 0
        with torch.no_grad():
            factor.mul_(2.0)
            assert not torch.equal(rotary.rotate(x), first)
    finally:
        factor.detach_()
        GAIN.fill_(1.0)


@dataclass
class Mirrored(Layout):
    turned: bool = False

    def split(self, x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = Half().split(x)
        return (second, first) if self.turned else (first, second)

    def join(self, first: Tensor, second: Tensor) -> Tensor:
        return Half().join(*((second, first) if self.turned else (first, second)))


def test_a_layout_of_the_user_is_asked_each_time() -> None:
    layout, x = Mirrored(), torch.zeros(1, 3, 4)
    first = SinusoidalPositions(4, layout)(x)
    assert torch.equal(first, SinusoidalPositions(4, Half())(x))
    layout.turned = True
    assert torch.equal(SinusoidalPositions(4, layout)(x), first.roll(2, -1))


@pytest.mark.parametrize("module", ["rotary", "sinusoidal"])
def test_another_default_device_is_not_kept(module: str) -> None:
    forget()
    x = torch.randn(1, 2, 5, 8)
    turn = Rotary(8).rotate if module == "rotary" else SinusoidalPositions(8)
    with torch.device("meta"):
        first = turn(x)
    assert torch.equal(first, turn(x))


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
@pytest.mark.parametrize("module", ["rotary", "sinusoidal"])
def test_a_traced_module_serves_other_lengths(module: str) -> None:
    class Positions(torch.nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Rotary(8).rotate(x) if module == "rotary" else SinusoidalPositions(8)(x)

    forget()
    positions, longer = Positions(), torch.randn(1, 2, 9, 8)
    traced = torch.jit.trace(positions, torch.randn(1, 2, 5, 8))
    assert torch.equal(traced(longer), positions(longer))


@pytest.mark.parametrize("module", ["rotary", "sinusoidal"])
def test_what_is_kept_does_not_follow_its_result(module: str) -> None:
    x = torch.randn(1, 2, 5, 8)

    def run() -> Tensor:
        return Rotary(8).rotate(x) if module == "rotary" else SinusoidalPositions(8)(x)

    first = run()
    expected = first.clone()
    first.zero_()
    assert torch.equal(run(), expected)
