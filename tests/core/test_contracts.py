"""The contracts, as properties over random calls, for every backend that runs them."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import regard
from regard.errors import BackendError
from tests.core.random_calls import DTYPES, EVERYDAY, MAP_TOLERANCE, TOLERANCE, Case, cases, scores_by_hand


def attend(case: Case, backend: str, **options: Any) -> Any:
    """Run a case, or nothing where the backend says that it cannot."""
    try:
        return regard.attention(*case.tensors(), **case.options(), backend=backend, return_weights=True, **options)
    except BackendError:
        return None


def by_hand(case: Case) -> tuple[Tensor, Tensor]:
    """Output and weights in float64, written out once more, from the mask written out by hand."""
    q, k, v = (t.double() for t in case.tensors())
    if q.dim() >= 4:
        group = q.shape[-3] // k.shape[-3]
        k, v = k.repeat_interleave(group, -3), v.repeat_interleave(group, -3)
    scores = scores_by_hand(case.score, q, k)
    if case.bias is not None:
        scores = scores + case.bias.double()
    exponentials = torch.where(case.allowed, scores, -torch.inf).exp()
    total = exponentials.sum(-1, keepdim=True)
    weights = exponentials / torch.where(total == 0, 1.0, total)
    return weights @ v, weights


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_output_and_weights_are_the_formula(backend: str, dtype: torch.dtype, case: Case) -> None:
    case = case.to(dtype)
    if (attended := attend(case, backend)) is None:
        return
    output, weights = by_hand(case)
    assert attended.output.dtype == dtype
    assert attended.output.shape == output.shape
    assert attended.weights.shape == weights.shape
    bound = max(1.0, float(output.detach().abs().max()))
    torch.testing.assert_close(attended.output.double(), output, rtol=0, atol=TOLERANCE[dtype] * bound)
    # The projections of an additive score round to the input's dtype, as any linear layer does.
    rounded = dtype == torch.bfloat16 and isinstance(case.score, regard.Additive)
    tolerance = TOLERANCE[dtype] if rounded else MAP_TOLERANCE[dtype]
    torch.testing.assert_close(attended.weights.dense().double(), weights, rtol=0, atol=tolerance)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_weights_times_value_is_the_output(backend: str, dtype: torch.dtype, case: Case) -> None:
    """Contract 1."""
    case = case.to(dtype)
    if (attended := attend(case, backend)) is None:
        return
    value = case.value.to(attended.weights.dtype)
    if value.dim() >= 4:
        value = value.repeat_interleave(case.query.shape[-3] // value.shape[-3], -3)
    product = attended.weights.dense() @ value
    bound = max(1.0, float(product.detach().abs().max()))
    torch.testing.assert_close(attended.output.to(product.dtype), product, rtol=0, atol=TOLERANCE[dtype] * bound)


@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_asking_for_the_weights_changes_nothing(backend: str, case: Case) -> None:
    """Contract 2: the same bits, the same gradients, the same random state."""
    case = case.to(torch.float32)
    try:
        torch.manual_seed(7)
        plain = regard.attention(*case.tensors(), **case.options(), backend=backend)
    except BackendError:
        return
    state = torch.get_rng_state()
    gradients = torch.autograd.grad(plain.sum(), case.tensors())
    torch.manual_seed(7)
    asked = regard.attention(*case.tensors(), **case.options(), backend=backend, return_weights=True)
    assert torch.equal(plain, asked.output)
    assert torch.equal(state, torch.get_rng_state())
    for one, other in zip(gradients, torch.autograd.grad(asked.output.sum(), case.tensors()), strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dropout", [0.0, 0.5])
def test_dropout_consumes_the_same_random_numbers_with_and_without_weights(dropout: float) -> None:
    q, k, v = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4), torch.randn(2, 3, 7, 4)
    torch.manual_seed(1)
    plain = regard.attention(q, k, v, dropout=dropout)
    after = torch.get_rng_state()
    torch.manual_seed(1)
    output, weights = regard.attention(q, k, v, dropout=dropout, return_weights=True)
    assert torch.equal(plain, output)
    assert torch.equal(after, torch.get_rng_state())
    torch.testing.assert_close(weights.dense().sum(-1), torch.ones(2, 3, 5))  # before dropout


def test_the_fused_kernel_is_the_one_that_torch_runs() -> None:
    """Contract 2: the bits of F.scaled_dot_product_attention, forward and, but for half precision, backward."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        q, k, v = (torch.randn(2, 3, 129, 16, dtype=dtype, requires_grad=True) for _ in range(3))
        keep = torch.rand(2, 129) < 0.7
        for options, ours in (
            ({}, {}),
            ({"is_causal": True}, {"mask": regard.causal()}),
            ({"attn_mask": keep[:, None, None]}, {"mask": regard.padding(keep)}),
        ):
            theirs = F.scaled_dot_product_attention(q, k, v, **options)
            output, _ = regard.attention(q, k, v, backend="fused", return_weights=True, **ours)
            assert torch.equal(theirs, output)
            grad = torch.randn_like(output)
            theirs, ours = (torch.autograd.grad(x, (q, k, v), grad) for x in (theirs, output))
            for one, other in zip(theirs, ours, strict=True):
                if dtype.itemsize > 2:
                    assert torch.equal(one, other)
                else:  # short blocks go back in float32
                    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_rows_sum_to_one_or_are_exactly_zero(backend: str, dtype: torch.dtype, case: Case) -> None:
    """Contract 3, with finite gradients."""
    case = case.to(dtype)
    if (attended := attend(case, backend)) is None:
        return
    weights, live = attended.weights.dense(), case.allowed.any(-1)
    sums = weights.sum(-1)
    torch.testing.assert_close(sums[live].double(), torch.ones(int(live.sum())).double(), rtol=0, atol=2e-4)
    assert (weights[~live] == 0).all()
    assert (weights.masked_select(~case.allowed) == 0).all()
    assert (attended.output[~live] == 0).all()
    loss = attended.output.float().sum() + weights.float().square().sum()
    for gradient in torch.autograd.grad(loss, case.tensors()):
        assert gradient.isfinite().all()


@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_gradients_are_those_of_the_formula(backend: str, case: Case) -> None:
    """Of the output and, through the map, of the weights; in float64."""
    case = case.to(torch.float64)
    if (attended := attend(case, backend)) is None:
        return
    output, weights = by_hand(case)
    d_output, d_weights = torch.randn_like(output), torch.randn_like(weights)
    loss = (attended.output * d_output).sum() + (attended.weights.dense() * d_weights).sum()
    ours = torch.autograd.grad(loss, case.tensors())
    theirs = torch.autograd.grad((output * d_output).sum() + (weights * d_weights).sum(), case.tensors())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_the_order_of_keys_does_not_matter(backend: str, case: Case) -> None:
    case = case.to(torch.float64)
    order = torch.randperm(case.key.shape[-2])
    mask = case.allowed
    moved = Case(
        case.query, case.key[..., order, :], case.value[..., order, :], mask[..., order], mask[..., order],
        None if case.bias is None else case.bias.expand(mask.shape)[..., order], case.score,
    )  # fmt: skip
    one, other = attend(case, backend), attend(moved, backend)
    if one is None or other is None:
        return
    torch.testing.assert_close(one.output, other.output, rtol=0, atol=1e-10)


@pytest.mark.parametrize("backend", EVERYDAY)
def test_gradcheck(backend: str) -> None:
    q, k, v = (torch.randn(2, 3, n, 4, dtype=torch.float64, requires_grad=True) for n in (3, 5, 5))
    k, v = k[:, :1].detach().requires_grad_(), v[:, :1].detach().requires_grad_()
    mask = regard.causal(1) & regard.lengths(torch.tensor([0, 4]))

    def attend_and_read(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = regard.attention(q, k, v, mask=mask, backend=backend, return_weights=True)
        return output, weights[..., 1:, :]

    assert torch.autograd.gradcheck(attend_and_read, (q, k, v))


@pytest.mark.parametrize("backend", ["reference", "tiled"])
def test_gradgradcheck(backend: str) -> None:
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))
    mask = regard.causal(-1)
    assert torch.autograd.gradgradcheck(lambda *t: regard.attention(*t, mask=mask, backend=backend), (q, k, v))


def test_fused_refuses_a_second_derivative_by_name() -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output = regard.attention(q, q, q, backend="fused")
    with pytest.raises(BackendError, match="no second derivative"):
        torch.autograd.grad(output.sum(), q, create_graph=True)


@pytest.mark.parametrize("backend", EVERYDAY)
def test_the_state_of_a_row_with_no_key_is_minus_infinity(backend: str) -> None:
    """Contract 3: the kernels have conventions of their own (0.0 on CPU); the map must not see them."""
    q = torch.randn(2, 3, 5, 4)
    mask = regard.causal(0) & regard.padding(torch.tensor([[False, True, True, True, True], [False] * 5]))
    weights = regard.attention(q, q, q, mask=mask, backend=backend, return_weights=True).weights
    dead = weights._state == -torch.inf
    assert torch.equal(dead, torch.tensor([[True] + [False] * 4, [True] * 5])[:, None].expand(2, 3, 5))


def test_short_blocks_in_half_precision_go_back_no_less_exactly_than_torch() -> None:
    q, k, v = (torch.randn(2, 3, 31, 16, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    grad = torch.randn(2, 3, 31, 16, dtype=torch.bfloat16)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    expected = torch.autograd.grad(F.scaled_dot_product_attention(*exact), exact, grad.double())
    theirs = torch.autograd.grad(F.scaled_dot_product_attention(q, k, v), (q, k, v), grad)
    ours = torch.autograd.grad(regard.attention(q, k, v, backend="fused"), (q, k, v), grad)
    for one, other, right in zip(ours, theirs, expected, strict=True):
        assert (one.double() - right).norm() <= 1.01 * (other.double() - right).norm()
