"""The kernels of CUDA are called within their contracts, which `tests.gpu.emulated` holds on the CPU."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

import regard
from regard.errors import BackendError
from regard.functional import make_call
from regard.kernels.fused import Fused
from tests.core import contracts
from tests.core.random_calls import Case, cases
from tests.gpu.emulated import Operators, Refused, emulated_cuda

DTYPES = (torch.float32, torch.bfloat16)


KINDS: dict[str, dict[str, bool]] = {"values unseen": {}, "values seen": {"looks": True}, "cuDNN": {"cudnn": True}}


@pytest.fixture(params=list(KINDS.values()), ids=list(KINDS), scope="module")
def cuda(request: pytest.FixtureRequest) -> Iterator[Operators]:
    with emulated_cuda(**request.param) as operators:
        yield operators


def plain(called: list[str]) -> bool:
    return not {"flash", "cudnn"}.isdisjoint(called)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(max_examples=20)
@given(case=cases(scores=("dot", "scaled")))
def test_output_and_weights_are_the_formula(dtype: torch.dtype, cuda: Operators, case: Case) -> None:
    contracts.output_and_weights_are_the_formula(case.to(dtype), "fused")
    contracts.rows_sum_to_one_or_are_exactly_zero(case.to(dtype), "fused")


@settings(max_examples=20)
@given(case=cases(scores=("dot", "scaled")))
def test_gradients_are_those_of_the_formula(cuda: Operators, case: Case) -> None:
    mine, exact = case.to(torch.float32), case.to(torch.float64)
    attended = contracts.attend(mine, "fused")
    assert attended is not None
    output, weights = contracts.by_hand(exact)
    d_output, d_weights = torch.randn_like(output), torch.randn_like(weights)
    ours = torch.autograd.grad(
        (attended.output * d_output.float()).sum() + (attended.weights.dense() * d_weights.float()).sum(),
        mine.tensors(),
    )
    theirs = torch.autograd.grad((output * d_output).sum() + (weights * d_weights).sum(), exact.tensors())
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=1e-4, atol=1e-4)


def _close(shape: tuple[int, int, int, int], keys: int, mask: Any, *, groups: int = 1, **options: Any) -> None:
    q, k, v = (
        torch.randn(shape[0], heads, length, shape[3]).bfloat16().requires_grad_()
        for heads, length in ((shape[1], shape[2]), (shape[1] // groups, keys), (shape[1] // groups, keys))
    )
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    theirs = regard.attention(*exact, mask=mask, backend="reference", **options)
    ours = regard.attention(q, k, v, mask=mask, backend="fused", **options)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)
    grad = torch.randn_like(theirs)
    pairs = zip(
        torch.autograd.grad(ours, (q, k, v), grad.bfloat16()), torch.autograd.grad(theirs, exact, grad), strict=True
    )
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize(("queries", "keys"), [(40, 70), (70, 40), (64, 64)])
def test_the_causal_flag_of_unequal_lengths(queries: int, keys: int, cuda: Operators) -> None:
    """Flash would align it with the last key."""
    cuda.called.clear()
    _close((2, 2, queries, 16), keys, regard.causal(0))
    assert plain(cuda.called) == (queries == keys)


def test_documents_go_to_flash_one_by_one_with_their_part_of_the_lse(cuda: Operators) -> None:
    ids = torch.tensor([0] * 200 + [1] * 130 + [2] * 182)
    cuda.called.clear()
    _close((2, 2, 512, 16), 512, regard.documents(ids) & regard.causal())
    assert cuda.called.count("flash backward") == (3 if "flash" in cuda.called else 0)
    assert cuda.called


@pytest.mark.parametrize("width", [20, 184, 192, 200, 248, 256, 260])
@pytest.mark.parametrize("capability", [(9, 0), (8, 6), (12, 0), (7, 5)], ids=str)
def test_every_width_has_a_forward_and_a_backward(width: int, capability: tuple[int, int]) -> None:
    """Also if the gradient of the log-sum-exp adds columns to it."""
    dtype = torch.bfloat16 if capability >= (8, 0) else torch.float16
    q, k, v = (torch.randn(1, 2, 12, width).to(dtype).requires_grad_() for _ in range(3))
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    loss = {}
    with emulated_cuda(capability=capability) as operators:
        for name, tensors in (("fused", (q, k, v)), ("reference", exact)):
            output, weights = regard.attention(*tensors, mask=regard.causal(), backend=name, return_weights=True)
            loss[name] = output.double().square().sum() + weights.entropy().double().square().sum()
        ours = torch.autograd.grad(loss["fused"], (q, k, v))
        assert "efficient backward" in operators.called or "flash backward" in operators.called
    for one, other in zip(ours, torch.autograd.grad(loss["reference"], exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2 * float(other.abs().max()))


@pytest.mark.parametrize("width", [184, 192, 248, 256])
@pytest.mark.parametrize("capability", [(9, 0), (8, 6)], ids=str)
def test_the_columns_of_a_gradient_of_the_log_sum_exp(width: int, capability: tuple[int, int]) -> None:
    """They make vectors wider than flash goes back through, and the other kernel takes its place."""
    q, k = (torch.randn(1, 1, 12, width).bfloat16().requires_grad_() for _ in range(2))
    call, value = make_call(
        q, k, k, score=regard.ScaledDot(), normalization=regard.Softmax(), mask=regard.causal(), bias=None, dropout=0.0
    )
    exact = [t.detach().double().requires_grad_() for t in (q, k)]
    scores = (exact[0] @ exact[1].mT * width**-0.5).masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    with emulated_cuda(capability=capability) as operators:
        _, lse = Fused().run(call, value)
        ours = torch.autograd.grad(lse.sum(), (q, k))
    assert operators.called[0] == "flash"
    for one, other in zip(ours, torch.autograd.grad(scores.logsumexp(-1).sum(), exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=3e-2, atol=3e-2)


@pytest.mark.parametrize("width", [64, 128])
def test_the_columns_of_a_gradient_of_the_log_sum_exp_beyond_cudnn(width: int) -> None:
    """They make its widest vectors too wide for its backward, and flash's takes its place."""
    given = [torch.randn(1, 2, 12, width).bfloat16().requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in given]
    call, value = make_call(
        *given, score=regard.ScaledDot(), normalization=regard.Softmax(), mask=regard.causal(), bias=None, dropout=0.0
    )
    with emulated_cuda(cudnn=True) as operators:
        output, lse = Fused().run(call, value)
        ours = torch.autograd.grad(output.double().square().sum() + lse.double().square().sum(), given)
    assert operators.called == ["cudnn", "cudnn backward" if width < 128 else "flash backward"]
    scores = exact[0] @ exact[1].mT * width**-0.5
    scores = scores.masked_fill(torch.ones(12, 12).triu(1) > 0, -torch.inf)
    loss = (scores.softmax(-1) @ exact[2]).square().sum() + scores.logsumexp(-1).square().sum()
    for one, other in zip(ours, torch.autograd.grad(loss, exact), strict=True):
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("mask", [regard.window(20), regard.lengths(torch.tensor([90, 30]))], ids=str)
def test_half_precision_through_output_and_weights(mask: Any, cuda: Operators) -> None:
    """The memory-efficient kernel reads the output from a pointer, also with columns added for the log-sum-exp."""
    given = [torch.randn(2, 3, 90, 16).bfloat16().requires_grad_() for _ in range(3)]
    exact = [t.detach().double().requires_grad_() for t in given]
    found = []
    cuda.called.clear()
    for tensors, backend in ((given, "fused"), (exact, "reference")):
        output, weights = regard.attention(*tensors, mask=mask, backend=backend, return_weights=True)
        loss = output.double().square().sum() + weights.entropy().double().square().sum()
        found.append(torch.autograd.grad(loss, tensors))
    assert "efficient backward" in cuda.called
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2 * float(other.abs().max()))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("mask", [None, regard.lengths(torch.tensor([30, 9]))], ids=str)
def test_rows_that_begin_anywhere(mask: Any, dtype: torch.dtype, cuda: Operators) -> None:
    """Vectors, and the gradient of the output, as parts of something wider."""
    q, k, v = (torch.randn(2, 2, 30, 37).to(dtype)[..., start : start + 32].requires_grad_() for start in (0, 1, 5))
    ours = regard.attention(q, k, v, mask=mask, backend="fused")
    wide = torch.cat([ours.new_zeros(2, 2, 30, 1), ours], -1)
    exact = [t.detach().double().requires_grad_() for t in (q, k, v)]
    theirs = regard.attention(*exact, mask=mask, backend="reference")
    pairs = zip(
        torch.autograd.grad(wide.square().sum(), (q, k, v)),
        torch.autograd.grad(theirs.square().sum(), exact),
        strict=True,
    )
    for one, other in pairs:
        torch.testing.assert_close(one.double(), other, rtol=5e-2, atol=5e-2)


def test_which_calls_go_to_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """One block of as many queries as its plan is worth, of a width that it takes, where torch itself takes it."""

    def ran(length: int = 1024, width: int = 16, mask: Any = None, dtype: torch.dtype = torch.bfloat16) -> str:
        operators.called.clear()
        q = torch.zeros(1, 1, length, width, dtype=dtype)
        regard.attention(q, q, q, mask=mask, backend="fused")
        return operators.called[0]

    documents = regard.documents(torch.tensor([0] * 1025 + [1] * 1023))
    with emulated_cuda(cudnn=True) as operators:
        monkeypatch.setattr("regard.kernels.cuda_kernels.FEWEST_OF_CUDNN", 1024)
        assert ran() == ran(mask=regard.causal()) == ran(width=128) == "cudnn"
        assert ran(1023) == ran(width=136) == ran(2048, mask=documents) == "flash"
        assert ran(mask=regard.window(9)) == ran(dtype=torch.float32) == "efficient"
        torch.backends.cuda.enable_cudnn_sdp(False)
        try:
            assert ran() == "flash"
        finally:
            torch.backends.cuda.enable_cudnn_sdp(True)
        monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91_500)
        assert ran() == "flash"
    with emulated_cuda(cudnn=True, capability=(12, 0)) as operators:
        assert ran() == "flash"


def test_bf16_on_an_old_gpu_is_refused_with_a_reason() -> None:
    q = torch.randn(1, 1, 4, 8).bfloat16()
    with emulated_cuda(capability=(7, 5)):
        with pytest.raises(BackendError, match=r"no fused kernel for torch\.bfloat16"):
            regard.attention(q, q, q, backend="fused")
        torch.testing.assert_close(
            regard.attention(q, q, q).double(),
            regard.attention(*[q.double()] * 3, backend="reference"),
            rtol=2e-2,
            atol=2e-2,
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
def test_a_bias_that_half_precision_cannot_hold(dtype: torch.dtype, cuda: Operators) -> None:
    """ALiBi counts to thousands; in bf16 the distances of far keys would be off by several nats."""
    q, k, v = (torch.randn(1, 2, 1500, 8).to(dtype) for _ in range(3))
    options: dict[str, Any] = {"mask": regard.causal(), "bias": regard.ALiBi(2)}
    ours = regard.attention(q, k, v, backend="fused", **options)
    theirs = regard.attention(*(t.double() for t in (q, k, v)), backend="reference", **options)
    torch.testing.assert_close(ours.double(), theirs, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize("length", [1, 8, 15, 16, 17, 31, 33])
def test_masks_of_any_length_are_aligned(length: int, cuda: Operators) -> None:
    _close((2, 2, 20, 8), length, regard.padding(torch.arange(2 * length).reshape(2, length) % 3 > 0))
    keep = torch.rand(2, 1, 20, length) < 0.7
    _close((2, 2, 20, 8), length, keep)


def test_empty_batches_and_grids_that_are_too_large_are_refused(cuda: Operators) -> None:
    """By our own word, before a kernel refuses them; tiles take their place."""
    empty = torch.randn(0, 1, 4, 8)
    assert regard.attention(empty, empty, empty).shape == (0, 1, 4, 8)
    with pytest.raises(BackendError, match="no empty batch"):
        regard.attention(empty, empty, empty, backend="fused")
    for batch, heads in ((65_536, 1), (1, 65_536)):
        many = torch.zeros(1, 1, 1, 8).expand(batch, heads, 1, 8)
        assert "at most 65,535 sequences and as many heads" in regard.explain(many, many, many).refused["fused"]
    many = many[:, :65_535]
    assert regard.explain(many, many, many).backend == "fused"


def test_joined_blocks_stay_within_the_grid(cuda: Operators, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.kernels.fused_plan.MOST_JOINED", 4)
    q = torch.randn(2, 1, 2048, 8)
    sizes: list[int] = []
    real = Operators._scaled_dot_product_efficient_attention

    def counted(self: Operators, query: Tensor, *rest: Any, **options: Any) -> Any:
        sizes.append(len(query))
        return real(self, query, *rest, **options)

    monkeypatch.setattr(Operators, "_scaled_dot_product_efficient_attention", counted)
    ours = regard.attention(q, q, q, mask=regard.window(20), backend="fused")
    torch.testing.assert_close(ours, regard.attention(q, q, q, mask=regard.window(20), backend="tiled"))
    assert max(sizes) == 4


def test_the_emulation_refuses_what_a_kernel_refuses() -> None:
    with emulated_cuda() as operators:
        q = torch.randn(1, 1, 4, 12)
        with pytest.raises(Refused, match="multiple of 8"):
            operators._scaled_dot_product_efficient_attention(q, q, q, None, True, 0.0, False, scale=1.0)
        q, bias = torch.randn(1, 1, 4, 8), torch.zeros(1, 1, 4, 4)
        with pytest.raises(Refused, match="aligned"):
            operators._scaled_dot_product_efficient_attention(q, q, q, bias, True, 0.0, False, scale=1.0)
