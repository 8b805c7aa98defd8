"""The compiled kernel of short sequences: the formula in float64, torch's kernel, and what it leaves to that."""

import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard import causal, lengths
from regard.kernels import short_sequences
from regard.kernels.additive_masks import NOTHING_ADDED, AdditiveMask
from regard.kernels.fused_kernels import CpuFlash, OneBlock
from regard.kernels.short_attention_work import BACKWARD, FORWARD
from regard.kernels.short_sequences import ShortSequences
from regard.nn import MultiHeadAttention

pytest.importorskip("numba", reason="the compiled kernel needs numba")

DTYPES = [torch.float32, torch.bfloat16]
EXACT = {torch.float32: 3e-6, torch.bfloat16: 2e-2}
"""What the answers may differ from those in float64, of numbers of about 1."""


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(short_sequences, "LEAST", 1)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The kinds of work that compiled code was given."""
    seen: list[int] = []
    run = short_sequences._run

    def spied(kind: int, *given: Any, **tensors: Any) -> None:
        seen.append(kind)
        run(kind, *given, **tensors)

    monkeypatch.setattr(short_sequences, "_run", spied)
    return seen


@dataclass
class Case:
    """Tensors of one call, and the mask of its kernel."""

    query: Tensor
    key: Tensor
    value: Tensor
    grad: Tensor
    additive: Tensor | None
    is_causal: bool
    scale: float

    @property
    def heads(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    def answers(self, kernel: CpuFlash) -> tuple[Tensor, ...]:
        """Output, lse, and the gradients of query, key and value."""
        block = OneBlock(kernel, self.scale, self.is_causal, AdditiveMask(self.additive, None))
        output, lse, extras = kernel.forward(*self.heads, block)
        lse_ = lse.masked_fill(lse == -torch.inf, torch.inf)
        return output, lse, *kernel.backward(self.grad, (*self.heads, output, lse_), extras, block)

    def exact(self) -> tuple[Tensor, ...]:
        """The same in float64, by the formula and torch's own gradients; rows without a key have zeros."""
        query, key, value = (t.detach().double().requires_grad_() for t in self.heads)
        scores = query @ key.mT * self.scale
        if self.additive is not None:
            scores = scores + self.additive.double()
        if self.is_causal:
            scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
        lse = scores.logsumexp(-1)
        weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[..., None]).exp()
        output = weights @ value
        grads = torch.autograd.grad(output, (query, key, value), self.grad.double())
        return output.detach(), lse.detach(), *(grad.nan_to_num() for grad in grads)


def case(
    batch: int, heads: int, queries: int, keys: int, width: int, dtype: torch.dtype, *, is_causal: bool = False,
    lowest: int | None = None, seed: int = 0, packed: bool = True,
) -> Case:  # fmt: skip
    """Random tensors as views of one product, as self-attention has them; `lowest` keys at least are not padding."""
    made = torch.Generator().manual_seed(seed)

    def parts(length: int, count: int) -> tuple[Tensor, ...]:
        numbers = torch.randn(batch, length, count, heads, width, generator=made).to(dtype)
        views = tuple(part.transpose(1, 2) for part in numbers.unbind(2))
        return views if packed else tuple(view.contiguous() for view in views)

    (query, grad), (key, value) = parts(queries, 2), parts(keys, 2)
    additive = None
    if lowest is not None:
        counts = torch.randint(lowest, keys + 1, (batch, 1, 1, 1), generator=made)
        additive = torch.where(torch.arange(keys) < counts, 0.25, -torch.inf).to(dtype)
    return Case(query, key, value, grad, additive, is_causal, width**-0.5)


def close(found: tuple[Tensor, ...], expected: tuple[Tensor, ...], dtype: torch.dtype) -> None:
    for name, one, other in zip(("output", "lse", "query", "key", "value"), found, expected, strict=True):
        torch.testing.assert_close(one.double(), other.double(), rtol=EXACT[dtype], atol=EXACT[dtype], msg=name)


@given(
    batch=st.integers(1, 3), heads=st.integers(1, 3), queries=st.integers(1, 40), keys=st.integers(1, 40),
    width=st.sampled_from([16, 32, 48, 64, 80, 128]), dtype=st.sampled_from(DTYPES), masked=st.booleans(),
    is_causal=st.booleans(), packed=st.booleans(), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_it_is_the_formula(
    batch: int, heads: int, queries: int, keys: int, width: int, dtype: torch.dtype, masked: bool, is_causal: bool,
    packed: bool, seed: int,
) -> None:  # fmt: skip
    keys = queries if is_causal else keys
    this = case(
        batch, heads, queries, keys, width, dtype, is_causal=is_causal, lowest=0 if masked else None, seed=seed,
        packed=packed,
    )  # fmt: skip
    close(this.answers(ShortSequences()), this.exact(), dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("length", [1, 15, 16, 17, 64, 127, 128])
def test_lengths_at_the_edges_of_vectors(length: int, dtype: torch.dtype, calls: list[int]) -> None:
    this = case(2, 2, length, length, 64, dtype, is_causal=True)
    close(this.answers(ShortSequences()), this.exact(), dtype)
    assert calls == [FORWARD, BACKWARD]


@pytest.mark.parametrize("dtype", DTYPES)
def test_no_less_exact_than_torchs_kernel(dtype: torch.dtype) -> None:
    this = case(40, 4, 23, 19, 64, dtype, lowest=3)
    errors = [
        torch.stack([(a.double() - b).abs().mean() for a, b in zip(this.answers(kernel), this.exact(), strict=True)])
        for kernel in (ShortSequences(), CpuFlash())
    ]
    assert (errors[0] <= 1.25 * errors[1] + 1e-9).all(), errors


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_without_a_key(dtype: torch.dtype) -> None:
    this = case(2, 2, 5, 9, 16, dtype)
    this.additive = torch.zeros(2, 1, 1, 9, dtype=dtype)
    this.additive[1] = -torch.inf
    output, lse, *grads = this.answers(ShortSequences())
    assert (lse[1] == -torch.inf).all()
    assert lse[0].isfinite().all()
    for answer in (output, *grads):
        assert not answer[1].any()
        assert answer[0].any()


def test_scores_far_apart_and_far_from_zero() -> None:
    """Weights of keys far below the largest are 0, and no exponential overflows."""
    for factor in (30.0, 1e4, 1e18):
        this = case(2, 2, 7, 21, 32, torch.float32)
        this.query = this.query * factor
        output, lse, *_ = this.answers(ShortSequences())
        exact = this.exact()
        assert output.isfinite().all()
        torch.testing.assert_close(lse.double(), exact[1], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(output.double(), exact[0], rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("where", ["query", "key", "value"])
@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_sequence(where: str, number: float, dtype: torch.dtype) -> None:
    """What it touches is no number any more, also where torch's kernel hides that; other sequences are as they were."""
    this, clean = (case(3, 2, 9, 11, 32, dtype) for _ in range(2))
    getattr(this, where)[1, 1, 3, 5] = number
    found, expected = this.answers(ShortSequences()), this.answers(CpuFlash())
    for one, other, without in zip(found, expected, clean.answers(ShortSequences()), strict=True):
        assert torch.equal(one[[0, 2]], without[[0, 2]])
        assert torch.equal(one[1, 0], without[1, 0])
        assert not (one[1, 1].isfinite() & ~other[1, 1].isfinite()).any()
    assert not found[0][1, 1].isfinite().all()


def test_the_number_of_threads_changes_nothing() -> None:
    this, threads = case(37, 3, 15, 15, 32, torch.float32, is_causal=True), torch.get_num_threads()
    try:
        found = []
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            found.append(this.answers(ShortSequences()))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for one in found[1:] for a, b in zip(found[0], one, strict=True))


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"width": 24}, "the width is no multiple of a vector"),
        ({"width": 144}, "the heads are too wide"),
        ({"keys": 129}, "there are too many keys"),
        ({"dtype": torch.float64}, "another dtype"),
        ({"dtype": torch.float16}, "another dtype"),
    ],
)
def test_what_is_left_to_torchs_kernel(change: dict[str, Any], why: str, calls: list[int]) -> None:
    sizes: dict[str, Any] = {"batch": 2, "heads": 2, "queries": 8, "keys": 8, "width": 32, "dtype": torch.float32}
    this = case(**{**sizes, **change})
    tensors = [t.clone().requires_grad_() for t in this.heads]
    regard.attention(*tensors, backend="fused").sum().backward()
    assert not calls, why


@pytest.mark.parametrize("dtype", DTYPES)
def test_grouped_heads_and_biases_of_pairs_are_left_to_torchs_kernel(dtype: torch.dtype, calls: list[int]) -> None:
    this = case(2, 4, 8, 8, 32, dtype)
    query = this.query.clone().requires_grad_()
    regard.attention(query, this.key[:, :2], this.value[:, :2]).sum().backward()
    regard.attention(query, this.key, this.value, bias=torch.randn(1, 1, 8, 8, dtype=dtype)).sum().backward()
    assert not calls


def test_without_a_gradient_it_is_not_called(calls: list[int]) -> None:
    this = case(2, 4, 8, 8, 32, torch.float32)
    regard.attention(*this.heads)
    with torch.no_grad():
        regard.attention(this.query.clone().requires_grad_(), this.key, this.value)
    assert not calls


def test_without_numba_torchs_kernel_is_called(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(short_sequences, "is_installed", lambda: False)
    this = case(2, 4, 8, 8, 32, torch.float32)
    regard.attention(this.query.clone().requires_grad_(), this.key, this.value).sum().backward()
    assert not calls


def test_few_numbers_are_left_to_torchs_kernel(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr(short_sequences, "LEAST", 2 * 4 * 8 * 32 + 1)
    this = case(2, 4, 8, 8, 32, torch.float32)
    regard.attention(this.query.clone().requires_grad_(), this.key, this.value).sum().backward()
    assert not calls


@pytest.mark.parametrize(
    "mask", [None, causal(), lengths(torch.tensor([3, 8, 5])), causal() & lengths(torch.tensor([3, 8, 5]))]
)
def test_weights_and_gradients_of_a_call(mask: Any, calls: list[int]) -> None:
    """The map makes the weights that the kernel used, and the gradients are those of the tiles."""
    this = case(3, 2, 8, 8, 32, torch.float32)
    found = {}
    for backend in ("fused", "tiled"):
        tensors = [t.clone().requires_grad_() for t in this.heads]
        output, weights = regard.attention(*tensors, mask=mask, backend=backend, return_weights=True)
        dense = weights.dense()
        torch.testing.assert_close(dense @ tensors[2], output, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(dense.sum(-1), torch.ones(3, 2, 8), rtol=1e-5, atol=1e-5)
        found[backend] = output, *torch.autograd.grad(output, tensors, this.grad)
    assert calls == [FORWARD, BACKWARD]
    for one, other in zip(found["fused"], found["tiled"], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_gradients_through_the_weights(calls: list[int]) -> None:
    """What a loss asks of the weights comes back through the log-sum-exp."""
    this = case(3, 2, 8, 8, 32, torch.float32)
    found = []
    for backend in ("fused", "tiled"):
        tensors = [t.clone().requires_grad_() for t in this.heads]
        output, weights = regard.attention(*tensors, backend=backend, return_weights=True)
        loss = output.square().sum() + weights.dense().square().sum()
        found.append(torch.autograd.grad(loss, tensors))
    assert calls
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [15, 31, 32])
@pytest.mark.parametrize("heads", [1, 3])
@pytest.mark.parametrize("lowest", [0, 1])
def test_gradients_through_the_weights_of_every_width(width: int, heads: int, lowest: int, dtype: torch.dtype) -> None:
    """A column that carries the gradient of the log-sum-exp makes another width, which may be one of the kernel's."""
    vectors, found = [torch.randn(40, heads, 9, width).to(dtype) for _ in range(3)], []
    mask = lengths(torch.randint(lowest, 10, (40,)))
    for backend in ("fused", "tiled"):
        tensors = [t.clone().requires_grad_() for t in vectors]
        output, weights = regard.attention(*tensors, mask=mask, backend=backend, return_weights=True)
        loss = output.float().square().sum() + 10 * weights.dense().float().square().sum()
        found.append(torch.autograd.grad(loss, tensors))
    for one, other in zip(*found, strict=True):
        error = (one - other).float().abs().max() / other.float().abs().max()
        assert error < (2e-5 if dtype == torch.float32 else 2e-2)


def test_a_row_whose_scores_are_all_beyond_the_lowest_number_changes_no_other() -> None:
    this, clean = (case(3, 2, 9, 11, 32, torch.float32) for _ in range(2))
    for one in (this, clean):
        one.key = one.key.abs() * 1e3
    this.query[1, 1, 4] = -1e38
    kernel = ShortSequences()
    block = OneBlock(kernel, this.scale, False, NOTHING_ADDED)
    output, lse, extras = kernel.forward(*this.heads, block)
    assert lse[1, 1, 4] == -torch.inf
    grads = kernel.backward(this.grad, (*this.heads, output, lse), extras, block)
    assert all(grad.isfinite().all() for grad in grads)
    assert not output[1, 1, 4].any()
    assert not grads[0][1, 1, 4].any()
    expected = kernel.forward(*clean.heads, block)[0]
    rows = torch.arange(9) != 4
    assert torch.equal(output[:, :, rows], expected[:, :, rows])


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_saved_may_be_packed_in_another_dtype(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """`saved_tensors_hooks` may save memory so; compiled code would read other numbers, beyond the end."""
    this, found = case(3, 2, 9, 9, 32, dtype), []

    def packed(tensor: Tensor) -> Tensor:
        return tensor.bfloat16() if tensor.dtype == torch.float32 else tensor

    for longest in (short_sequences.LONGEST, 0):
        monkeypatch.setattr(short_sequences, "LONGEST", longest)
        tensors = [t.clone().requires_grad_() for t in this.heads]
        with torch.autograd.graph.saved_tensors_hooks(packed, lambda tensor: tensor):
            output = regard.attention(*tensors)
        found.append(torch.autograd.grad(output, tensors, this.grad))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=5e-2, atol=5e-2)


SCRATCH = """
import torch, regard
vectors = [torch.randn(100, 4, 48, 64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
def answers(threads):
    torch.set_num_threads(threads)
    tensors = [vector.clone().requires_grad_() for vector in vectors]
    output = regard.attention(*tensors)
    return output.detach(), *torch.autograd.grad(output.square().sum(), tensors)
expected = answers(1)
for threads in (1, 2, 2, 2, 2, 2):
    assert all(map(torch.equal, answers(threads), expected)), threads
print("fine")
"""


@pytest.mark.parametrize("setting", [{"MALLOC_ARENA_MAX": "1"}, {"MALLOC_MMAP_THRESHOLD_": "32768"}])
def test_scratch_memory_is_held_while_it_is_used(setting: dict[str, str]) -> None:
    """With one arena two threads would get the same freed memory; with the other setting it would be gone."""
    command = [sys.executable, "-c", SCRATCH]
    done = subprocess.run(command, env={**os.environ, **setting}, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, "fine\n"), done.stderr


def test_second_derivatives_come_from_the_tiles(calls: list[int]) -> None:
    this = case(1, 2, 4, 5, 16, torch.float32)
    found = []
    for backend in (None, "tiled"):
        query = this.query.clone().requires_grad_()
        output = regard.attention(query, this.key, this.value, backend=backend)
        (first,) = torch.autograd.grad(output.square().sum(), query, create_graph=True)
        found.append(torch.autograd.grad(first.square().sum(), query)[0])
    # The kernel's own backward is that of the output, which the gradient that is differentiated depends on too.
    assert calls == [FORWARD, BACKWARD]
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("transform", ["vmap", "compile", "make_fx"])
def test_under_transforms_it_is_not_called(transform: str, calls: list[int]) -> None:
    this = case(3, 2, 8, 8, 32, torch.float32)

    def loss(query: Tensor) -> Tensor:
        return regard.attention(query, this.key, this.value).square().sum()

    if transform == "vmap":
        torch.func.vmap(torch.func.grad(lambda q: regard.attention(q[None], this.key[:1], this.value[:1]).sum()))(
            this.query
        )
    elif transform == "compile":
        torch.compile(loss, backend="eager")(this.query.clone().requires_grad_()).backward()
    else:
        torch.fx.experimental.proxy_tensor.make_fx(loss)(this.query.clone().requires_grad_())
    assert not calls


def test_a_mode_sees_torchs_operators(calls: list[int]) -> None:
    """What counts or changes the operators of a model sees its attention as ever, there and back."""
    this, seen = case(2, 2, 8, 8, 32, torch.float32), list[str]()

    class Seeing(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(func.overloadpacket.__name__)
            return func(*args, **(kwargs or {}))

    with Seeing():
        regard.attention(this.query.clone().requires_grad_(), this.key, this.value).sum().backward()
    assert not calls
    kernel = "_scaled_dot_product_flash_attention_for_cpu"
    assert {kernel, f"{kernel}_backward"} <= set(seen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_weights_nor_a_watch_change_a_bit(dtype: torch.dtype, calls: list[int]) -> None:
    """Whoever trains and looks at the weights trains the same model."""
    this = case(4, 2, 13, 13, 32, dtype)

    class Attending(torch.nn.Module):
        def forward(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
            return regard.attention(query, key, value, mask=causal())

    def learnt(output: Tensor, tensors: list[Tensor]) -> tuple[Tensor, ...]:
        return output, *torch.autograd.grad(output, tensors, this.grad)

    found, model = [], Attending()
    for way in ("plain", "weights", "watched"):
        tensors = [t.clone().requires_grad_() for t in this.heads]
        if way == "plain":
            found.append(learnt(model(*tensors), tensors))
        elif way == "weights":
            found.append(learnt(regard.attention(*tensors, mask=causal(), return_weights=True).output, tensors))
        else:
            with regard.watch(model):
                found.append(learnt(model(*tensors), tensors))
    assert calls == [FORWARD, BACKWARD] * 3
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_a_module_learns_what_it_learns_without_it(
    dtype: torch.dtype | None, calls: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    torch.manual_seed(0)
    module, x = MultiHeadAttention(64, 4), torch.randn(6, 11, 64)
    found = []
    for longest in (128, 0):
        monkeypatch.setattr(short_sequences, "LONGEST", longest)
        with torch.autocast("cpu", dtype=dtype, enabled=dtype is not None):
            loss = module(x, mask=causal()).float().square().sum()
        found.append(torch.autograd.grad(loss, list(module.parameters())))
    assert len(calls) == 2
    for one, other in zip(*found, strict=True):
        scale = other.abs().max()
        torch.testing.assert_close(one / scale, other / scale, rtol=0, atol=1e-5 if dtype is None else 2e-2)


def test_a_gradient_that_is_spread_over_the_output(calls: list[int]) -> None:
    """The gradient of a sum has strides of 0, and no memory of its own."""
    this = case(2, 2, 9, 9, 32, torch.float32)
    found = []
    for backend in ("fused", "tiled"):
        tensors = [t.clone().requires_grad_() for t in this.heads]
        found.append(torch.autograd.grad(regard.attention(*tensors, backend=backend).sum(), tensors))
    assert calls == [FORWARD, BACKWARD]
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)
