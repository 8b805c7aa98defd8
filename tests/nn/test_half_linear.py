"""Linear layers under bfloat16 autocast: torch's own numbers, by products of few different sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from regard.mechanisms import guards
from regard.nn import half_linear
from regard.nn import linear as module
from regard.nn.half_linear import common_size, filled_up
from regard.nn.linear import linear


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every product counts as large, and common sizes are multiples of 8."""
    monkeypatch.setattr(module, "WORTH_IT", 0)
    monkeypatch.setattr(half_linear, "LEAST_ROWS", 8)


def half() -> torch.autocast:
    return torch.autocast("cpu", dtype=torch.bfloat16)


def in_few_sizes(output: Tensor) -> bool:
    return "HalfLinear" in type(output.grad_fn).__name__


def tensors(*batch: int, bias: bool = True) -> list[Tensor]:
    shapes: list[tuple[int, ...]] = [(*batch, 12), (20, 12), *([(20,)] if bias else [])]
    return [torch.randn(shape, requires_grad=True) for shape in shapes]


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("batch", [(3, 5), (16,), (1,), (7, 3), (2, 3, 4), (0,)])
def test_outputs_are_torchs_bit_for_bit_and_gradients_are_not_coarser(batch: tuple[int, ...], bias: bool) -> None:
    given = tensors(*batch, bias=bias)
    with half():
        ours, theirs = linear(*given), F.linear(*given)
    assert in_few_sizes(ours)
    assert torch.equal(ours, theirs)
    up = torch.randn(ours.shape).bfloat16()
    leaves = [t.detach().bfloat16().double().requires_grad_() for t in given]
    wanted = torch.autograd.grad(F.linear(*leaves), leaves, up.double())
    for mine, torchs, right in zip(
        torch.autograd.grad(ours, given, up), torch.autograd.grad(theirs, given, up), wanted, strict=True
    ):
        assert mine.dtype == torch.float32
        if right.numel():
            error, allowed = (float((found - right).norm()) for found in (mine, torchs))
            assert error <= 1.05 * allowed + 1e-6 * float(right.norm())


@pytest.mark.parametrize("wanted", range(3))
def test_each_gradient_alone_is_that_of_all(wanted: int) -> None:
    given = tensors(11)
    with half():
        everything = torch.autograd.grad(linear(*given).sum(), given)
    for place, tensor in enumerate(given):
        tensor.requires_grad_(place == wanted)
    with half():
        (alone,) = torch.autograd.grad(linear(*given).sum(), [given[wanted]])
    assert torch.equal(alone, everything[wanted])


def test_gradients_have_the_dtypes_of_what_they_are_for() -> None:
    x, weight = torch.randn(9, 12).bfloat16().requires_grad_(), torch.randn(20, 12, requires_grad=True)
    with half():
        found = torch.autograd.grad(linear(x, weight, torch.zeros(20)).sum(), (x, weight))
    assert [one.dtype for one in found] == [torch.bfloat16, torch.float32]


def test_a_gradient_can_be_differentiated() -> None:
    given = tensors(11)

    def second(layer: Any) -> tuple[Tensor, ...]:
        with half():
            first = torch.autograd.grad(layer(*given).float().square().sum(), given, create_graph=True)
        found: tuple[Tensor, ...] = torch.autograd.grad(
            torch.stack([part.float().square().sum() for part in first]).sum(), given
        )
        return found

    for ours, theirs in zip(second(linear), second(F.linear), strict=True):
        assert (ours - theirs).norm() <= 2e-2 * theirs.norm()


def test_answers_and_weights_can_be_changed_in_place() -> None:
    x, weight = torch.randn(11, 12, requires_grad=True), torch.randn(20, 12, requires_grad=True)
    with half():
        answer, plain = linear(x, weight), F.linear(x, weight)
        found = answer.relu_()
    assert torch.equal(found, plain.relu())
    with torch.no_grad():
        weight.zero_()  # as an optimizer may, before the gradient of an earlier pass is asked
    up = torch.ones(11, 20).bfloat16()
    assert torch.equal(torch.autograd.grad(found, x, up)[0], torch.autograd.grad(plain.relu(), x, up)[0])


def test_graphs_keep_no_number_of_rows_and_weights_of_a_kind_of_their_own_are_asked() -> None:
    weight = torch.randn(20, 12)
    with half():
        graph = make_fx(lambda x, w: linear(x, w), tracing_mode="symbolic")(torch.randn(11, 12), weight)
    assert graph(torch.zeros(3, 12), weight).shape == (3, 20)

    class Own(Tensor):
        pass

    assert not module._has_few_sizes(torch.randn(11, 12), weight.as_subclass(Own))
    with half():
        assert module._has_few_sizes(torch.randn(11, 12), weight)
        assert not module._has_few_sizes(torch.randn(11, 12), weight.as_subclass(Own))
        assert not module._has_few_sizes(torch.randn(11, 12), weight[0])


def test_numbers_of_rows_are_few_and_little_is_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    """What oneDNN compiles code for: of 8,000 numbers of rows some fifty remain."""
    monkeypatch.setattr(half_linear, "LEAST_ROWS", 128)
    sizes = {rows: common_size(rows) for rows in range(1_000, 9_000)}
    assert all(rows <= size <= max(1.07 * rows, rows + 127) for rows, size in sizes.items())
    assert len(set(sizes.values())) <= 50
    assert all(common_size(size) == size for size in sizes.values())


def test_rows_of_zeros_follow_the_last_ones() -> None:
    rows = torch.ones(11, 2)
    assert filled_up(rows).dtype == torch.bfloat16
    assert filled_up(rows).sum(1).tolist() == [2.0] * 11 + [0.0] * 5
    whole = torch.ones(16, 2).bfloat16()
    assert filled_up(whole) is whole


def test_small_products_other_dtypes_and_transforms_stay_with_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    given = tensors(9)
    assert not in_few_sizes(linear(*given))
    with torch.autocast("cpu", dtype=torch.float16):
        assert not in_few_sizes(linear(*given))
    with half():
        assert in_few_sizes(linear(*given))
        assert not in_few_sizes(linear(*(t.double() for t in given)))
        x, weight = given[0].detach(), given[1].detach()
        assert torch.func.grad(lambda w: linear(x, w).float().sum())(weight).shape == (20, 12)
        assert torch.func.vmap(linear, (0, None))(x, weight).shape == (9, 20)
        with monkeypatch.context() as traced:
            traced.setattr(guards, "in_trace", lambda: True)
            assert not in_few_sizes(linear(*given))
        monkeypatch.setattr(module, "WORTH_IT", 9 * 12 * 20 + 1)
        assert not in_few_sizes(linear(*given))


def test_without_gradients_the_numbers_are_the_same() -> None:
    given = tensors(9)
    with half():
        recorded = linear(*given)
        with torch.no_grad():
            assert torch.equal(linear(*given), recorded)
        with torch.inference_mode():
            assert torch.equal(linear(*given), recorded)
