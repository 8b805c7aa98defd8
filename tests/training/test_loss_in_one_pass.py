"""The loss by compiled code: it is the formula in float64, and where it is not taken torch's operations are."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from regard.training import loss_in_one_pass as one_pass
from regard.training import output_loss
from regard.training.loss_in_one_pass import has_one_pass, loss_in_one_pass
from regard.training.output_loss import SmoothedRows, output_cross_entropy

pytest.importorskip("numba", reason="the compiled loss needs numba")

DTYPES = [torch.float32, torch.bfloat16]
SMOOTHINGS = [0.0, 0.1, 1.0]
INF, NAN = float("inf"), float("nan")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(one_pass, "SMALL", 0)


def example(rows: int, columns: int, dtype: torch.dtype, scale: float = 3.0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1000 * rows + columns)
    logits = torch.randn(rows, columns, generator=generator).mul_(scale).to(dtype)
    return logits, torch.randint(columns, (rows, 1), generator=generator)


def exact(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The loss and its gradient in float64."""
    z = logits.double().requires_grad_()
    loss = nn.functional.cross_entropy(z, targets[:, 0], label_smoothing=smoothing, reduction="sum")
    return loss.detach(), torch.autograd.grad(loss, z)[0]


def by_torch(logits: Tensor, targets: Tensor, smoothing: float) -> tuple[Tensor, Tensor]:
    """The same by torch's operations, rounded as the logits are."""
    z = logits.to(torch.float32, copy=True)
    loss = SmoothedRows(smoothing)(z, targets, True)
    return loss, z.to(logits.dtype)


def agrees(logits: Tensor, targets: Tensor, smoothing: float) -> None:
    loss, gradient = exact(logits, targets, smoothing)
    found = logits.clone()
    total = loss_in_one_pass(found, targets, smoothing, True)
    assert total.dtype == torch.float32
    torch.testing.assert_close(total.double(), loss, rtol=1e-6, atol=1e-6)
    # bfloat16 has eight bits: the nearest one is at most 2^-8 of a number away.
    nearest = 2**-8 if logits.dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(found.double(), gradient, rtol=nearest, atol=1e-6)
    assert torch.equal(loss_in_one_pass(logits.clone(), targets, smoothing, False), total)


@given(st.integers(1, 20), st.integers(1, 600), st.sampled_from(DTYPES), st.sampled_from(SMOOTHINGS))
def test_loss_and_gradient_are_those_of_the_formula(
    rows: int, columns: int, dtype: torch.dtype, smoothing: float
) -> None:
    agrees(*example(rows, columns, dtype), smoothing)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("scale", [0.0, 1.0, 30.0])
@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (5, 16), (4, 7_999), (9, 8_000)])
def test_flat_and_steep_rows(dtype: torch.dtype, smoothing: float, scale: float, shape: tuple[int, int]) -> None:
    agrees(*example(*shape, dtype, scale), smoothing)


@pytest.mark.parametrize("smoothing", SMOOTHINGS)
def test_bfloat16_is_rounded_as_by_torch(smoothing: float) -> None:
    """The two differ in float32 by its rounding, so that now and then a number falls to the other side."""
    logits, targets = example(40, 900, torch.bfloat16)
    _, expected = by_torch(logits, targets, smoothing)
    loss_in_one_pass(logits, targets, smoothing, True)
    units = (logits.view(torch.int16).int() - expected.view(torch.int16).int()).abs()
    of_zero = (logits.abs().maximum(expected.abs())) < 1e-6
    assert int(units[~of_zero].max()) <= 1
    assert float((units != 0).float().mean()) < 0.01


@pytest.mark.parametrize(("halves", "even"), [(257, 256), (259, 260)])
def test_of_two_equally_near_numbers_the_even_one(halves: int, even: int) -> None:
    """Two logits that are equal have the gradients ± (1 - e) / 2."""
    logits = torch.zeros(1, 2, dtype=torch.bfloat16)
    loss_in_one_pass(logits, torch.tensor([[1]]), 1 - halves / 512, True)
    assert logits.tolist() == [[even / 1024, -even / 1024]]


@pytest.mark.parametrize("dtype", DTYPES)
def test_threads_change_nothing(dtype: torch.dtype) -> None:
    logits, targets = example(203, 1_001, dtype)
    threads, found = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        try:
            z = logits.clone()
            found.append((loss_in_one_pass(z, targets, 0.1, True), z))
        finally:
            torch.set_num_threads(threads)
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0])
        assert torch.equal(gradient, found[0][1])


ODD = {
    "inf": [INF, 0.0, 1.0],
    "two inf": [INF, INF, 1.0],
    "nothing at the target": [-INF, 0.0, 1.0],
    "nothing elsewhere": [0.0, -INF, 1.0],
    "nothing": [-INF, -INF, -INF],
    "nan": [NAN, 0.0, 1.0],
    "nan elsewhere": [0.0, 1.0, NAN],
    "nan below zero": [0.0, 1.0, -NAN],
    "nan and inf": [INF, -INF, NAN],
    "far apart": [0.0, -3e38, -88.0],
    "below zero": [-1.0, -200.0, -3.0],
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("smoothing", SMOOTHINGS)
@pytest.mark.parametrize("row", list(ODD))
def test_what_is_not_finite_stays_so(dtype: torch.dtype, smoothing: float, row: str) -> None:
    """As by torch's operations, in a row of its own and among others."""
    logits, targets = torch.tensor([ODD[row]]).to(dtype), torch.zeros(1, 1, dtype=torch.int64)
    wide = torch.cat([logits, torch.full((1, 40), -2.0, dtype=dtype)], 1)
    for z in (logits, wide):
        loss, gradient = by_torch(z, targets, smoothing)
        found = loss_in_one_pass(z, targets, smoothing, True)
        torch.testing.assert_close(found, loss, rtol=1e-6, atol=1e-6, equal_nan=True)
        torch.testing.assert_close(z, gradient, rtol=2**-7 if dtype == torch.bfloat16 else 0, atol=1e-6, equal_nan=True)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_logit_of_minus_infinity_has_no_weight_at_all(dtype: torch.dtype) -> None:
    logits = torch.tensor([[0.0, -INF, 1.0, -INF] * 9]).to(dtype)
    assert loss_in_one_pass(logits, torch.tensor([[2]]), 0.0, True).isfinite()
    assert not logits[:, 1::2].any()


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_rows_beside_stay_as_they_are(dtype: torch.dtype) -> None:
    logits, targets = example(7, 37, dtype)
    around = torch.cat([logits, logits, logits])
    loss_in_one_pass(around[7:14], targets, 0.1, True)
    assert torch.equal(around[:7], logits)
    assert torch.equal(around[14:], logits)
    assert not torch.equal(around[7:14], logits)


def test_who_is_left_to_torchs_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    logits, targets = example(6, 50, torch.float32)
    assert has_one_pass(logits, targets)
    assert has_one_pass(logits.bfloat16(), targets)
    for z in (logits.double(), logits.half(), logits.T.contiguous().T, torch._neg_view(logits), logits.to("meta")):
        assert not has_one_pass(z, targets)
    for places in (targets.int(), targets.repeat(1, 2)[:, :1], targets - 50, targets + 50):
        assert not has_one_pass(logits, places)
    with FakeTensorMode() as mode:
        assert not has_one_pass(mode.from_tensor(logits), mode.from_tensor(targets))
    seen = []
    torch.func.vmap(lambda z: (seen.append(has_one_pass(z, targets)), z)[1])(logits[None])
    assert seen == [False]
    monkeypatch.setattr(one_pass, "SMALL", 301)
    assert not has_one_pass(logits, targets)
    monkeypatch.setattr(one_pass, "SMALL", 300)
    assert has_one_pass(logits, targets)
    monkeypatch.setattr(one_pass, "is_installed", lambda: False)
    assert not has_one_pass(logits, targets)


@pytest.mark.parametrize("autocast", [False, True])
def test_the_layer_has_the_same_loss_with_and_without(monkeypatch: pytest.MonkeyPatch, autocast: bool) -> None:
    torch.manual_seed(3)
    hidden, layer = torch.randn(700, 16, requires_grad=True), nn.Linear(16, 333)
    targets, inputs = torch.randint(333, (700,)), (hidden, *layer.parameters())
    calls: list[Any] = []

    def counted(*arguments: Any) -> Tensor:
        calls.append(arguments[0].dtype)
        return loss_in_one_pass(*arguments)

    monkeypatch.setattr(output_loss, "loss_in_one_pass", counted)

    def run() -> tuple[Tensor, ...]:
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
            total, _ = output_cross_entropy(hidden, layer, targets=targets, ignore_index=0, label_smoothing=0.1)
        return total, *torch.autograd.grad(total, inputs)

    found = run()
    assert calls == [torch.bfloat16 if autocast else torch.float32] * 2  # 512 rows, and the others
    monkeypatch.setattr(one_pass, "is_installed", lambda: False)
    expected = run()
    assert len(calls) == 2
    for ours, theirs in zip(found, expected, strict=True):
        assert (ours - theirs).abs().max() <= (4e-3 if autocast else 1e-5) * theirs.abs().max()


def test_a_target_that_is_no_column_is_refused() -> None:
    hidden, layer = torch.randn(9, 4), nn.Linear(4, 50)
    for target in (50, -1):
        with pytest.raises(RuntimeError, match="out of bounds"):
            output_cross_entropy(hidden, layer, targets=torch.full((9,), target), ignore_index=0)


class HalfTheLoss(SmoothedRows):
    """A loss of a user's own, made of ours."""

    def __call__(self, logits: Tensor, targets: Tensor, wanted: bool) -> Tensor:
        loss = super().__call__(logits, targets, wanted)
        if wanted:
            logits.mul_(0.5)
        return loss / 2


def of_rows(loss: SmoothedRows) -> tuple[Tensor, Tensor]:
    """The loss of the rows of an output layer, and its gradient."""
    made = torch.Generator().manual_seed(0)
    hidden, layer = torch.randn(6, 4, generator=made).requires_grad_(), nn.Linear(4, 9)
    nn.init.normal_(layer.weight, generator=made)
    nn.init.zeros_(layer.bias)
    total = output_loss.loss_of_rows(hidden, layer, torch.randint(9, (6,), generator=made), loss)
    return total.detach(), torch.autograd.grad(total, hidden)[0]


def test_a_subclass_has_a_loss_of_its_own() -> None:
    for one, half in zip(of_rows(SmoothedRows(0.1)), of_rows(HalfTheLoss(0.1)), strict=True):
        torch.testing.assert_close(half, one / 2)


def test_a_mode_sees_torchs_operators() -> None:
    logits, targets = example(5, 40, torch.float32)
    assert has_one_pass(logits, targets)
    with TorchDispatchMode():
        assert not has_one_pass(logits, targets)
