"""The contracts, as properties over random calls, for every backend that runs them."""

from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import Tensor

import regard
from regard.errors import BackendError
from regard.kernels import BACKENDS, fused_kernels
from regard.kernels.fused_kernels import HALF, SHORT
from regard.tensors.torch_private import flash_cpu_backward
from tests.core import contracts
from tests.core.random_calls import DTYPES, EVERYDAY, Case, cases

DOUBLE = contracts.gradients_are_those_of_the_formula, contracts.the_order_of_keys_does_not_matter
EVERY = [(each, dtype) for each in contracts.CONTRACTS for dtype in (DTYPES[:1] if each in DOUBLE else DTYPES)]


@pytest.mark.parametrize(("contract", "dtype"), EVERY, ids=lambda one: getattr(one, "__name__", str(one)))
@pytest.mark.parametrize("backend", EVERYDAY)
@given(case=cases())
def test_every_contract(
    backend: Any, contract: contracts.Contract, dtype: torch.dtype, case: Case, device: torch.device
) -> None:
    contract(case.to(dtype, device), backend)


LAYOUTS = [(one, one, one) for one in contracts.LAYOUTS] + [
    ("overlapping", "contiguous", "contiguous"),
    ("contiguous", "overlapping", "negated"),
    ("contiguous", "transposed", "overlapping"),
    ("expanded batch", "transposed heads", "channels-last"),
    ("strided", "expanded heads", "expanded rows"),
]


@pytest.mark.parametrize("way", [name for name in BACKENDS if name != "reference"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_every_registered_way_reads_every_layout(way: str, dtype: torch.dtype) -> None:
    masks = None, regard.causal(0), regard.lengths(torch.tensor([33, 0, 1, 20, 33, 33, 5, 32]))
    ran = [contracts.a_way_reads_every_layout(way, layouts, dtype, mask) for layouts, mask in product(LAYOUTS, masks)]
    assert all(ran), f"{way!r} has refused {ran.count(False)} of {len(ran)} calls"


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
            gradients = (torch.autograd.grad(x, (q, k, v), grad) for x in (theirs, output))
            for one, other in zip(*gradients, strict=True):
                if dtype.itemsize > 2:
                    assert torch.equal(one, other)
                else:  # short blocks go back in float32
                    torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("backend", ["reference", "tiled", None])
def test_gradgradcheck(backend: Any) -> None:
    q, k, v = (torch.randn(1, 2, n, 3, dtype=torch.float64, requires_grad=True) for n in (3, 4, 4))
    mask = regard.causal(-1)
    assert torch.autograd.gradgradcheck(
        lambda *t: regard.attention(*t, mask=mask, backend=backend), (q, k, v), fast_mode=True
    )


def test_second_derivatives_of_whoever_names_no_backend() -> None:
    """The kernels have none, so the tiles give them: of the weights too, and where the values were padded."""
    q, k, v = (torch.randn(1, n, 3, d, dtype=torch.float64, requires_grad=True) for n, d in ((2, 3), (1, 3), (1, 2)))
    score, bias = regard.ScaledDot(-0.7), torch.randn(3, 3, dtype=torch.float64)

    def attend_and_read(*t: Tensor) -> tuple[Tensor, Tensor]:
        output, weights = regard.attention(*t, score=score, bias=bias, mask=regard.causal(), return_weights=True)
        return output, weights.dense()

    assert regard.explain(q, k, v, score=score, bias=bias, mask=regard.causal()).backend == "fused"
    assert torch.autograd.gradgradcheck(attend_and_read, (q, k, v), fast_mode=True)
    loss = torch.cat([t.flatten() for t in attend_and_read(q, k, v)]).square().sum()
    first, again = (torch.autograd.grad(loss, (q, k, v), create_graph=on, retain_graph=True) for on in (False, True))
    torch.testing.assert_close(again, first, rtol=1e-9, atol=1e-9)


def test_fused_refuses_a_second_derivative_by_name() -> None:
    q = torch.randn(1, 1, 3, 4, requires_grad=True)
    output = regard.attention(q, q, q, backend="fused")
    with pytest.raises(BackendError, match="no second derivative"):
        torch.autograd.grad(output.sum(), q, create_graph=True)


@pytest.mark.parametrize("backend", EVERYDAY)
def test_the_state_of_a_row_with_no_key_is_minus_infinity(backend: Any) -> None:
    """Contract 3: the kernels have conventions of their own (0.0 on CPU); the map must not see them."""
    q = torch.randn(2, 3, 5, 4)
    mask = regard.causal(0) & regard.padding(torch.tensor([[False, True, True, True, True], [False] * 5]))
    weights = regard.attention(q, q, q, mask=mask, backend=backend, return_weights=True).weights
    source: Any = weights.source
    dead = source.state == -torch.inf
    assert torch.equal(dead, torch.tensor([[True] + [False] * 4, [True] * 5])[:, None].expand(2, 3, 5))


@pytest.mark.parametrize("dtype", HALF)
@pytest.mark.parametrize("length", [SHORT, SHORT + 1])
def test_short_blocks_go_back_in_float32(dtype: torch.dtype, length: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.dtype] = []

    def watched(grad: Tensor, *given: Any, **named: Any) -> Any:
        seen.append(grad.dtype)
        return flash_cpu_backward(grad, *given, **named)

    monkeypatch.setattr(fused_kernels, "flash_cpu_backward", watched)
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, length, 16, generator=generator).to(dtype).requires_grad_() for _ in range(3))
    output = regard.attention(q, k, v, mask=regard.causal(), backend="fused")
    output.backward(torch.ones_like(output))
    assert seen == [torch.float32 if length == SHORT else dtype]
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    right = regard.attention(*exact, mask=regard.causal(), backend="reference")
    right.backward(torch.ones_like(right))
    for half, double in zip((q, k, v), exact, strict=True):
        assert half.grad.dtype == dtype
        torch.testing.assert_close(half.grad.double(), double.grad, atol=3e-2, rtol=3e-2)
