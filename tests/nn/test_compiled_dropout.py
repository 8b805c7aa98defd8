"""Dropout by compiled code: what the formulas give, bits that are random, and the way back."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from regard.nn import Dropout, dropout_decisions
from regard.nn.dropout_decisions import LEVELS, DrawnBits, PlacedBits, decide, of_masked_relu

pytest.importorskip("numba", reason="compiled dropout needs numba")

SIZES = [1, 255, 256, 257, (1 << 14) + 3]
"""Within a part, at its edges, and beyond the share of a thread."""
DTYPES = [torch.float32, torch.bfloat16]


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dropout_decisions, "SMALL", 0)


def keys(seed: int = 0, dropped: int = LEVELS * 3 // 10) -> PlacedBits:
    torch.manual_seed(seed)
    return PlacedBits.draw(dropped)


def factors(bits: PlacedBits, count: int) -> Tensor:
    return bits.masked(torch.ones(count), torch.float32)


def numbers(count: int, dtype: torch.dtype, seed: int = 5) -> Tensor:
    """Random numbers; among them what is not finite, and both zeros."""
    made = torch.randn(count, generator=torch.Generator().manual_seed(seed)) * 10
    odd = torch.tensor([float("nan"), float("inf"), -float("inf"), -0.0, 0.0, 1e-41, 2e38])
    made[: min(count, 7)] = odd[: min(count, 7)]
    return made.to(dtype)


def gradient(output: Tensor, x: Tensor, up: Tensor) -> Tensor:
    return torch.autograd.grad(output, x, up, retain_graph=True)[0]


def same(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("count", SIZES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", DTYPES)
def test_each_kind_of_work_is_its_formula(count: int, dtype: torch.dtype, other: torch.dtype) -> None:
    """In float32 bit for bit; bfloat16 is rounded once."""
    bits, y, x = keys(), numbers(count, dtype), numbers(count, other, seed=6).flip(0)
    kept = factors(bits, count)
    wide = y.float()
    same(bits.masked(y, other), (wide * kept).to(other))
    same(bits.masked_relu(y), (wide.clamp_min(0) * kept).to(dtype))
    product = wide.double() * kept.double()
    both = torch.promote_types(dtype, other)
    found = bits.masked_sum(x, y)
    assert found.dtype == both
    # A processor may round the product and the sum together.
    torch.testing.assert_close(
        found.double(), x.double() + product, rtol=1e-6 if both == torch.float32 else 4e-3, atol=1e-5, equal_nan=True
    )
    grad = numbers(count, dtype, seed=7)
    with torch.no_grad():
        same(of_masked_relu(grad, y, 1.25), torch.ops.aten.threshold_backward(grad, y, 0) * 1.25)


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("dtype", DTYPES)
def test_as_many_are_dropped_as_asked(p: float, dtype: torch.dtype) -> None:
    dropped = Dropout(p)(torch.ones(400_000, dtype=dtype))
    share = (dropped == 0).double().view(-1, 16).mean(0)
    assert ((share - p).abs() < 4.5 * (p * (1 - p) / 25_000) ** 0.5).all()
    torch.testing.assert_close(
        dropped[dropped != 0].double().unique(), torch.tensor([1 / (1 - p)]).double(), rtol=4e-3, atol=0
    )


def test_neighbours_and_calls_are_independent() -> None:
    """Correlations of half a million decisions, at the distances at which shares and parts follow one another too."""
    torch.manual_seed(2)
    calls = [(Dropout(0.5)(torch.ones(1 << 19)) == 0).double() - 0.5 for _ in range(3)]
    least = 5 * 0.25 / (1 << 19) ** 0.5
    for distance in (*range(1, 20), 32, 64, 256, 1024, 1 << 14):
        assert abs(float((calls[0][:-distance] * calls[0][distance:]).mean())) < least, distance
        assert abs(float((calls[0][:-distance] * calls[1][distance:]).mean())) < least, distance
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert abs(float((calls[first] * calls[second]).mean())) < least


@pytest.mark.parametrize("which", ["key", "second_key"])
@pytest.mark.parametrize("bit", [0, 7, 31])
def test_one_bit_of_a_key_changes_half_of_the_decisions(which: str, bit: int) -> None:
    bits = keys(dropped=LEVELS // 2)
    other = PlacedBits(**{**vars(bits), which: getattr(bits, which) ^ (1 << bit)})
    changed = (factors(bits, 100_000) != factors(other, 100_000)).double().mean()
    assert abs(float(changed) - 0.5) < 0.01


def test_threads_change_nothing() -> None:
    y, threads = numbers(1 << 17, torch.float32), torch.get_num_threads()
    found = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            found.append(keys().masked(y, torch.bfloat16))
        finally:
            torch.set_num_threads(threads)
    same(found[0], found[1])
    same(found[0], found[2])


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_gradient_goes_where_the_value_went(dtype: torch.dtype) -> None:
    dropout = Dropout(0.3)
    x, y = torch.randn(7, 50), torch.randn(7, 50).to(dtype)
    for tensor in (x, y):
        tensor.requires_grad_()
    for output, less in ((dropout(y), 0.0), (dropout.relu(y), 0.0), (dropout.add(x, y), x)):
        up = torch.randn_like(output)
        (grad,) = torch.autograd.grad(output, y, up)
        went = (output - less) != 0
        assert grad.dtype == dtype
        torch.testing.assert_close(grad.float(), torch.where(went, up.float() / 0.7, 0.0), rtol=1e-2, atol=1e-3)
    (grad,) = torch.autograd.grad(dropout.add(x, y).sum(), x)
    assert torch.equal(grad, torch.ones(7, 50))


def test_a_gradient_can_be_differentiated() -> None:
    x, y = (torch.randn(6, 20, requires_grad=True) for _ in range(2))

    def second(add: Any, relu: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(3)
        answer = add(x, y).square() * relu(y).square()
        first = torch.autograd.grad(answer.sum(), (x, y), create_graph=True)
        found: tuple[Tensor, ...] = torch.autograd.grad(
            torch.stack([part.square().sum() for part in first]).sum(), (x, y)
        )
        return found

    dropout, kept = Dropout(0.3), []
    torch.manual_seed(3)
    for _ in range(2):
        kept.append(dropout(torch.ones(6, 20)))
    ours = second(dropout.add, dropout.relu)
    theirs = second(lambda x, y: x + y * kept[0], lambda y: y.relu() * kept[1])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-3)


def test_it_follows_the_generator_and_checkpointing_makes_the_same_bits_again() -> None:
    x, dropout = torch.randn(40, 9, requires_grad=True), Dropout(0.5)
    torch.manual_seed(1)
    first, second = dropout(x), dropout(x)
    torch.manual_seed(1)
    assert torch.equal(first, dropout(x))
    assert not torch.equal(first, second)

    def gradient(run: Any) -> Tensor:
        torch.manual_seed(4)
        (found,) = torch.autograd.grad(run(lambda x: dropout.add(x, dropout.relu(dropout(x))), x).square().sum(), x)
        return found

    plain = gradient(lambda function, x: function(x))
    assert torch.equal(gradient(lambda function, x: checkpoint(function, x, use_reentrant=False)), plain)


def test_shapes_that_are_not_contiguous_or_not_equal() -> None:
    dropout = Dropout(0.5)
    output = dropout(torch.ones(60, 8).T)
    assert output.shape == (8, 60)
    assert set(output.unique().tolist()) == {0.0, 2.0}
    added = dropout.add(torch.ones(60, 1), torch.ones(60, 8))
    assert set(added.unique().tolist()) == {1.0, 3.0}
    assert dropout(torch.empty(0, 3)).shape == (0, 3)


def test_what_is_spread_over_rows_is_dropped_in_one_way() -> None:
    x, y = torch.zeros(4, 600), torch.ones(1, 600, dtype=torch.bfloat16, requires_grad=True)
    output = Dropout(0.5).add(x, y)
    (grad,) = torch.autograd.grad(output.sum(), y)
    assert set(output.unique().tolist()) == {0.0, 2.0}
    assert torch.equal(grad, 4 * output[:1])


def test_torchs_operations_make_the_same_bits() -> None:
    """Where numbers are not there yet, or stand elsewhere: the bits are those of the compiled code."""
    bits = keys()
    plain = factors(bits, 5_000) != 0
    assert torch.equal(bits._kept(torch.ones(5_000)) != 0, plain)
    y = torch.full((600,), 3.0)
    for odd in (torch._neg_view(y), torch.complex(y, y).conj().imag, torch._efficientzerotensor(600)):
        real = odd.clone()
        assert torch.equal(bits.masked(odd, torch.float32), bits.masked(real, torch.float32))
        assert torch.equal(bits.masked_relu(odd), bits.masked_relu(real))
    assert float(bits._kept(y.bfloat16()).unique().max()) == 1.0


def test_ways_back_under_modes_and_in_batches() -> None:
    x = torch.ones(700, requires_grad=True)
    dropout = Dropout(0.5)
    for output in (dropout(x), dropout.relu(x), dropout.add(torch.zeros(700), x)):
        went = output.detach()
        batch = torch.eye(2, 1)[:, 0, None] * torch.ones(2, 700) + 1
        (grads,) = torch.autograd.grad(output, x, batch, is_grads_batched=True, retain_graph=True)
        assert torch.equal(grads, batch * went)
        graph = make_fx(partial(gradient, output, x))(batch[0])
        assert torch.equal(graph(batch[1]), batch[1] * went)
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            (fake,) = torch.autograd.grad(output, x, mode.from_tensor(torch.ones(700)))
        assert fake.shape == x.shape


def test_who_is_left_to_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    y = torch.randn(300)
    assert isinstance(decide(y, 0.5), PlacedBits)
    assert isinstance(decide(y.double(), 0.5), DrawnBits)
    assert isinstance(decide(y.half(), 0.5), DrawnBits)
    monkeypatch.setattr(dropout_decisions, "SMALL", 301)
    assert isinstance(decide(y, 0.5), DrawnBits)
    monkeypatch.setattr(dropout_decisions, "SMALL", 0)
    monkeypatch.setattr(dropout_decisions, "is_installed", lambda: False)
    assert isinstance(decide(y, 0.5), DrawnBits)


def test_other_defaults_of_torch_change_nothing() -> None:
    bits, y = keys(), torch.randn(500)
    expected = bits.masked_sum(y[:, None], y[:, None].expand(500, 2)), bits.masked(y, torch.float32)
    dtype = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.device("meta"):
            found = bits.masked_sum(y[:, None], y[:, None].expand(500, 2)), bits.masked(y, torch.float32)
            assert Dropout(0.5)(y).device.type == "cpu"
    finally:
        torch.set_default_dtype(dtype)
    for one, other in zip(found, expected, strict=True):
        same(one, other)


def test_a_dtype_without_loops_gets_the_same_decisions() -> None:
    """A gradient may come in another dtype than the numbers had."""
    bits, y = keys(), torch.randn(500, dtype=torch.float64)
    kept = factors(bits, 500).double()
    torch.testing.assert_close(bits.masked(y, torch.float64), y * kept)
    torch.testing.assert_close(bits.masked_relu(y), y.relu() * kept)
    torch.testing.assert_close(bits.masked_sum(y, y), y + y * kept)
