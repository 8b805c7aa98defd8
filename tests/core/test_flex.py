"""The backend that compiles FlexAttention: its answers on the CPU, what it refuses, and the maps of its calls."""

import shutil
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import create_block_mask

import regard
from regard.call.shapes import Sizes
from regard.functional import make_call
from regard.kernels import BACKENDS, choose_backend, flex, row_state

needs_compiler = pytest.mark.skipif(not flex._has_compiler(), reason="torch.compile needs a C++ compiler")
# inductor and torch.func.jvp use torch.jit: torch warns of its own doing.
pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script(_method)?` is deprecated:DeprecationWarning"),
    pytest.mark.skipif(not flex.HANDS_BACK_LSE, reason="FlexAttention hands back its log-sum-exp from torch 2.9 on"),
]
SHORT = (6, 7)
LENGTHS = torch.tensor([0, 5])
PADDED = regard.causal() & regard.lengths(LENGTHS)


def tensors(queries: int, keys: int, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """Two sequences, grouped heads, values of another width, queries laid out as a projection leaves them."""
    q = torch.randn(2, queries, 4, 8).transpose(1, 2)
    return tuple(t.to(dtype) for t in (q, torch.randn(2, 2, keys, 8), torch.randn(2, 2, keys, 5)))


def excluding(queries: int, keys: int) -> Tensor:
    bias = torch.randn(1, 4, queries, keys)
    bias[:, :, 2] = -torch.inf
    bias[:, 0, :, 3] = -torch.inf
    return bias


CASES: dict[str, tuple[tuple[int, int], dict[str, Any]]] = {
    "plain": (SHORT, {}),
    "causal, lengths": (SHORT, {"mask": PADDED}),
    # Blocks of 128 that are empty, full and partly so.
    "window": ((300, 411), {"mask": regard.window(150)}),
    "blocks": ((200, 300), {"mask": regard.blocks(torch.tensor([[1, 0, 1], [0, 0, 0]]).bool(), 128)}),
    "a bool tensor": (SHORT, {"mask": torch.arange(84).reshape(2, 1, 6, 7) % 3 > 0}),
    "ALiBi": (SHORT, {"mask": regard.causal(), "bias": regard.ALiBi(4)}),
    "capped, a bias": (SHORT, {"score": regard.SoftCapped(regard.Dot(), 1.5), "bias": excluding(6, 7)}),
    "a sink": (
        SHORT,
        {"mask": PADDED, "normalization": regard.SoftmaxWithSink(0.5)},
    ),
}


@needs_compiler
@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_it_answers_as_the_reference(name: str) -> None:
    lengths, options = CASES[name]
    inputs = tensors(*lengths)
    output, weights = regard.attention(*inputs, backend="flex", return_weights=True, **options)
    expected, theirs = regard.attention(*inputs, backend="reference", return_weights=True, **options)
    torch.testing.assert_close(output, expected, rtol=0, atol=5e-6)
    torch.testing.assert_close(weights.dense(), theirs.dense(), rtol=0, atol=5e-6)
    torch.testing.assert_close(weights.entropy(), theirs.entropy(), rtol=0, atol=2e-5)
    values = inputs[2].repeat_interleave(2, 1)
    torch.testing.assert_close(weights @ values, output, rtol=0, atol=5e-6)
    dead = (theirs.dense() == 0).all(-1)
    assert dead.any() == (name in ("causal, lengths", "blocks", "capped, a bias", "a sink"))
    assert (output[dead] == 0).all()
    assert (weights.source.state[dead] == (0.5 if name == "a sink" else -torch.inf)).all()


@needs_compiler
@pytest.mark.slow
def test_half_precision() -> None:
    inputs = tensors(*SHORT, dtype=torch.bfloat16)
    output = regard.attention(*inputs, backend="flex")
    assert output.dtype == torch.bfloat16
    expected = regard.attention(*(t.float() for t in inputs), backend="reference")
    torch.testing.assert_close(output.float(), expected, rtol=0, atol=3e-2)


@needs_compiler
@pytest.mark.slow
def test_the_map_computes_its_state_when_it_is_first_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Contract 2, and one kernel for one kind of call: other lengths, and parameters, compile nothing anew."""
    inputs = tensors(*SHORT)
    with torch.no_grad():
        output = regard.attention(*inputs, mask=PADDED, backend="flex")
    reads: list[object] = []
    monkeypatch.setattr(
        "regard.maps.sources.call_factors.row_state", lambda call: (reads.append(call), row_state(call))[1]
    )
    torch._dynamo.utils.counters.clear()
    parameters = [t.clone(memory_format=torch.preserve_format).requires_grad_() for t in inputs]
    with torch.no_grad():
        again, weights = regard.attention(*parameters, mask=PADDED, backend="flex", return_weights=True)
        regard.attention(*inputs, mask=regard.causal() & regard.lengths(torch.tensor([3, 7])), backend="flex")
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 0
    assert torch.equal(output, again)
    assert not again.requires_grad
    detached = weights.detach()
    assert "AttentionMap(2, 4, 6, 7)" in repr(weights)
    assert not reads
    weights.dense()
    weights.row(2)
    assert len(reads) == 1
    source: Any = weights.source
    assert source.backend.name == "fused"
    assert torch.equal(detached.dense(), weights.dense())


@needs_compiler
@pytest.mark.slow
def test_what_torch_cannot_compile_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.call.masks.basic.MOST_COPIED", 0)  # Fewer pairs are a tensor, which it compiles.

    def positive(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return key >= int(LENGTHS.sum() * 0 + query.float().mean().item() * 0)

    with pytest.raises(regard.errors.BackendError, match="torch has not compiled it"):
        regard.attention(*tensors(*SHORT), mask=regard.predicate(positive), backend="flex")


@needs_compiler
def test_explain_says_where_the_state_comes_from_and_that_it_is_taken_by_name() -> None:
    inputs = tensors(*SHORT)
    named = regard.explain(*inputs, backend="flex")
    assert (named.backend, named.extra_bytes) == ("flex", 0)
    assert named.reason == (
        "named by the caller; its kernel returns no row state: a map computes it by a scores-only pass when it is "
        "first read"
    )
    assert regard.explain(*inputs).refused["flex"] == BACKENDS["flex"].only_by_name
    assert regard.explain(*inputs, score=regard.SoftCapped(regard.Dot(), 2.0)).backend == "tiled"


def test_it_is_never_chosen_even_where_it_is_asked_first(monkeypatch: pytest.MonkeyPatch) -> None:
    call, _ = make_call(
        *tensors(*SHORT), score=regard.Dot(), normalization=regard.Softmax(), mask=None, bias=None, dropout=0.0
    )
    monkeypatch.setattr("regard.kernels.BACKENDS", {"flex": BACKENDS["flex"], **BACKENDS})
    assert choose_backend(call, None).name == "fused"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "additive": ({"score": regard.Additive(torch.ones(8))}, "scaled dot products, soft-capped or not; the score here"),
    "capped": ({"score": regard.SoftCapped(regard.Laplacian(), 2.0)}, "scaled dot products, soft-capped or not"),
    "sparsemax": ({"normalization": regard.Sparsemax()}, "normalises by softmax, not by sparsemax"),
    "dropout": ({"dropout": 0.1}, "FlexAttention has no dropout"),
    "Shaw": ({"bias": regard.Shaw(torch.zeros(3, 8))}, "the bias reads the vectors"),
    "a learned bias": ({"bias": torch.zeros(6, 7, requires_grad=True)}, "on the CPU FlexAttention has no gradient"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_it_says_why_not(name: str) -> None:
    options, why = REFUSED[name]
    with pytest.raises(regard.errors.BackendError, match=why):
        regard.attention(*tensors(*SHORT), backend="flex", **options)


@pytest.mark.parametrize("which", range(3))
def test_it_refuses_gradients_on_the_cpu(which: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.kernels.flex._has_compiler", lambda: True)  # or it refuses for want of one
    inputs = tensors(*SHORT)
    inputs[which].requires_grad_()
    with pytest.raises(regard.errors.BackendError, match="no gradient, and something here requires one"):
        regard.attention(*inputs, backend="flex")


def test_it_refuses_transforms_double_precision_and_a_machine_without_a_compiler(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    q, k, v = tensors(*SHORT)

    def attend(query: Tensor) -> Tensor:
        return regard.attention(query, k, v, backend="flex")

    with pytest.raises(regard.errors.BackendError, match=r"no torch\.float64 on cpu"):
        regard.attention(q.double(), k.double(), v.double(), backend="flex")
    with pytest.raises(regard.errors.BackendError, match="no forward-mode derivative"):
        torch.func.jvp(attend, (q,), (q,))
    with pytest.raises(regard.errors.BackendError, match=r"torch\.vmap and torch\.func have no rule"):
        torch.func.vmap(attend)(q[None])
    monkeypatch.setattr("regard.tensors.guards.is_compiling", lambda: True)
    with pytest.raises(regard.errors.BackendError, match="not traced into another graph"):
        attend(q)
    monkeypatch.undo()
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(regard.errors.BackendError, match="needs a C\\+\\+ compiler"):
        attend(q)


@pytest.mark.parametrize(
    "mask",
    [
        regard.causal(),
        regard.window(150),
        regard.lengths(torch.tensor([0, 290])) & regard.causal(),
        regard.blocks(torch.tensor([[1, 0, 1], [0, 0, 0]]).bool(), 128),
        regard.predicate(lambda b, h, q, k: (h == 1) & (k < 256)),
    ],
    ids=str,
)
def test_the_block_mask_is_torchs_own(mask: regard.Mask) -> None:
    sizes = Sizes((2,), 3, 3, 200, 300, True)
    bound = mask.bind(sizes, torch.device("cpu"))
    found = mask.block_mask(sizes)

    def mask_mod(b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        return bound.allowed(b, h, q, k)

    theirs = create_block_mask(mask_mod, found.shape[0], found.shape[1], 200, 300, device="cpu")
    assert found.shape == theirs.shape
    for counts, indices in (("kv_num_blocks", "kv_indices"), ("full_kv_num_blocks", "full_kv_indices")):
        assert torch.equal(getattr(found, counts), getattr(theirs, counts))
        assert torch.equal(getattr(found, indices), getattr(theirs, indices))


def test_importing_compiles_nothing() -> None:
    code = "import regard, sys; print('torch._inductor.compile_fx' in sys.modules, 'torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False False\n"
