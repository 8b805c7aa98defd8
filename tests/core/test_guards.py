"""Forward-mode derivatives, vmap and torch.func, against the reference and against finite differences."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from torch.autograd import forward_ad

import regard
from regard.call.normalizations import Normalization
from regard.errors import BackendError
from regard.kernels import tiled
from tests.core.contracts import by_hand
from tests.core.random_calls import Case, cases
from tests.maps.dense_maps import NORMALIZATIONS

# torch's forward mode loads torch.jit.script, which torch warns of.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script:DeprecationWarning")


@pytest.mark.parametrize("backend", ["tiled", "reference", None])
@settings(max_examples=25)
@given(case=cases(scores=("dot", "additive", "gaussian", "custom")))
def test_tangents_of_output_and_weights_are_the_formulas(backend: Any, case: Case) -> None:
    tensors = tuple(t.detach() for t in case.tensors())
    tangents = tuple(torch.randn_like(t) for t in tensors)

    def ours(q: Tensor, k: Tensor, v: Tensor) -> Any:
        output, weights = regard.attention(q, k, v, **case.options(), backend=backend, return_weights=True)
        return output, weights.dense()

    jvp: Any = torch.func.jvp  # typed as if it always gave back a third thing
    (output, weights), found = jvp(ours, tensors, tangents)
    (expected, probabilities), theirs = jvp(
        lambda q, k, v: by_hand(replace(case, query=q, key=k, value=v)), tensors, tangents
    )
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-9)
    torch.testing.assert_close(weights, probabilities, rtol=0, atol=1e-9)
    for one, other in zip(found, theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("normalization", NORMALIZATIONS.values(), ids=str)
def test_gradcheck_in_forward_mode(normalization: Normalization, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over several tiles, with a learned score, output and row state; backward while tangents are about, too."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 32)
    monkeypatch.setattr(tiled, "WIDE_ELEMENTS", 32)
    inputs = [torch.randn(1, 2, n, 2, dtype=torch.float64, requires_grad=True) for n in (4, 5, 5)]
    vector = torch.randn(2, dtype=torch.float64, requires_grad=True)

    def read(q: Tensor, k: Tensor, v: Tensor, vector: Tensor) -> tuple[Tensor, Tensor]:
        options: dict[str, Any] = {
            "score": regard.Additive(vector),
            "normalization": normalization,
            "mask": regard.causal(-1),
        }
        output, weights = regard.attention(q, k, v, **options, backend="tiled", return_weights=True)
        return output, weights[..., 1:, :].dense()

    assert torch.autograd.gradcheck(read, (*inputs, vector), check_forward_ad=True, fast_mode=True)


def test_forward_mode_holds_one_tile_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 5: the numbers in the largest tensor made are those of a tile."""
    monkeypatch.setattr(tiled, "TILE_ELEMENTS", 1 << 10)
    monkeypatch.setattr(tiled, "WIDE_ELEMENTS", 1 << 10)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
        ) -> Any:
            nonlocal largest
            answer = func(*args, **(kwargs or {}))
            if isinstance(answer, Tensor):
                largest = max(largest, answer.numel())
            return answer

    x = torch.randn(256, 4)
    with forward_ad.dual_level(), Watch():
        dual = forward_ad.make_dual(x, torch.randn_like(x))
        output = regard.attention(dual, dual, dual)
        assert forward_ad.unpack_dual(output).tangent is not None
    assert largest < 256 * 256 // 16


def test_fused_has_no_forward_mode_and_says_so() -> None:
    x = torch.randn(3, 4)
    with pytest.raises(BackendError, match=r"no forward-mode derivative; backend=None would take 'tiled'"):
        torch.func.jvp(lambda v: regard.attention(x, x, v, backend="fused"), (x,), (x,))
    assert regard.explain(x, x, x).backend == "fused"


def samples() -> tuple[Tensor, ...]:
    return tuple(torch.randn(3, 2, 4, n, 8, dtype=torch.float64) for n in (5, 6, 6))


@pytest.mark.parametrize("is_recording", [True, False])
def test_vmap_is_the_loop(is_recording: bool) -> None:
    inputs, lengths = samples(), torch.tensor([[1, 6], [0, 3], [6, 2]])

    def one(*call: Tensor) -> Tensor:
        q, k, v, n = call
        return regard.attention(q, k, v, mask=regard.causal() & regard.padding(torch.arange(6) < n[:, None]))

    with torch.set_grad_enabled(is_recording):
        found = torch.vmap(one)(*inputs, lengths)
        expected = torch.stack([one(*(t[i] for t in inputs), lengths[i]) for i in range(3)])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)


def test_a_gradient_for_each_sample_is_the_loops() -> None:
    inputs = samples()

    def loss(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attention(q, k, v, mask=regard.causal()).square().sum()

    found = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*inputs)
    for i in range(3):
        parts = [t[i].clone().requires_grad_() for t in inputs]
        for one, other in zip(found, torch.autograd.grad(loss(*parts), parts), strict=True):
            torch.testing.assert_close(one[i], other, rtol=0, atol=1e-10)


def test_jacobians_forwards_and_backwards_agree() -> None:
    x = torch.randn(4, 3, dtype=torch.float64)

    def attend(q: Tensor) -> Tensor:
        return regard.attention(q, q, q, mask=regard.causal())

    torch.testing.assert_close(torch.func.jacfwd(attend)(x), torch.func.jacrev(attend)(x), rtol=0, atol=1e-12)


@pytest.mark.parametrize("backend", ["fused", "tiled"])
def test_a_named_backend_says_what_stands_against_torch_func(backend: Any) -> None:
    x = torch.randn(2, 3, 4)
    with pytest.raises(BackendError, match="backend=None would take 'reference'"):
        torch.func.grad(lambda q: regard.attention(q, q, q, backend=backend).sum())(x)
    with pytest.raises(BackendError, match="vmap"):
        torch.vmap(lambda q: regard.attention(q, q, q, backend=backend))(x)
