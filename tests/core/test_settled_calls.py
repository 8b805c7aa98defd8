"""A call whose kind was seen before gives the bits that it gives without this, and its own numbers count."""

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import regard
from regard import settled_calls
from regard.errors import NonFiniteError, OverwrittenError, ShapeError, TooLargeError
from regard.functional import Attended
from regard.maps.call_source import source_of_call
from tests.core.random_calls import DTYPES, Case, cases


@contextmanager
def the_long_way() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled_calls, "call_kind", lambda *_: None)
        yield


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[settled_calls.Settled]:
    """The calls that took the short way."""
    found: list[settled_calls.Settled] = []

    def noted(real: Callable[..., tuple[Tensor, Tensor]]) -> Callable[..., tuple[Tensor, Tensor]]:
        def run(self: settled_calls.Settled, *arguments: Any) -> tuple[Tensor, Tensor]:
            found.append(self)
            return real(self, *arguments)

        return run

    for name in ("run", "run_with_gradients"):
        monkeypatch.setattr(settled_calls.Settled, name, noted(getattr(settled_calls.Settled, name)))
    monkeypatch.setattr(settled_calls, "SEEN", {})
    return found


def both_ways(*tensors: Tensor, **options: Any) -> tuple[Attended, Attended]:
    """The answer of the short way, if there is one, after a first call; and the answer of the long way."""
    with torch.no_grad():
        regard.attention(*tensors, **options)
        short = regard.attention(*tensors, return_weights=True, **options)
        with the_long_way():
            return short, regard.attention(*tensors, return_weights=True, **options)


def _state(attended: Attended) -> Tensor:
    return source_of_call(attended.weights.source, "a test").state


def assert_same(short: Attended, long: Attended) -> None:
    assert torch.equal(short.output, long.output)
    assert short.output.stride() == long.output.stride()
    assert torch.equal(short.weights.dense(), long.weights.dense())
    assert torch.equal(short.weights.received(), long.weights.received())
    assert torch.equal(_state(short), _state(long))
    assert str(short.weights) == str(long.weights)
    assert short.weights.shape == long.weights.shape
    assert short.weights.dtype == long.weights.dtype


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(case=cases(), data=st.data())
def test_it_changes_no_bit(dtype: torch.dtype, case: Case, data: st.DataObject) -> None:
    case = case.to(dtype)
    assert_same(*both_ways(*case.tensors(), **case.options()))


MASKS: dict[str, Any] = {
    "none": lambda: None,
    "causal": regard.causal,
    "causal(0)": lambda: regard.causal(0),
    "causal(-1)": lambda: regard.causal(-1),
    "lengths": lambda: regard.lengths(torch.tensor([3, 9])),
    "all keys": lambda: regard.lengths(torch.tensor([9, 9])),
    "all keys but one": lambda: regard.lengths(torch.tensor([9, 8])),
    "no key": lambda: regard.lengths(torch.tensor([0, 4])),
    "both": lambda: regard.causal() & regard.lengths(torch.tensor([9, 2])),
    "twice": lambda: regard.lengths(torch.tensor([3, 9])) & regard.lengths(torch.tensor([5, 5])),
    "per query": lambda: regard.lengths(torch.arange(18).view(2, 9), per_query=True),
    "padding": lambda: regard.padding(torch.rand(2, 9) < 0.5),
}
SHORT = {"none", "causal", "causal(0)", "lengths", "all keys", "all keys but one", "no key", "both"}


def test_masks_of_every_kind_after_one_another(runs: list[settled_calls.Settled]) -> None:
    """Each in the wake of all others, so that what one of them decided could be taken for another."""
    q, k, v = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 9, 8), torch.randn(2, 2, 9, 8)
    for name, make in [*MASKS.items(), *MASKS.items()]:
        runs.clear()
        assert_same(*both_ways(q, k, v, mask=make()))
        assert bool(runs) == (name in SHORT), name


def test_numbers_of_a_mask_are_read_in_each_call(runs: list[settled_calls.Settled]) -> None:
    q, n = torch.randn(2, 2, 6, 8), torch.tensor([6, 6])
    mask = regard.lengths(n)
    with torch.no_grad():
        for valid in ([6, 6], [2, 6], [0, 1], [6, 6], [9, -1]):
            n[:] = torch.tensor(valid)
            output = regard.attention(q, q, q, mask=mask)
            dense = (torch.arange(6) < n[:, None])[:, None, None]
            expected = torch.nn.functional.scaled_dot_product_attention(q, q, q, attn_mask=dense)
            torch.testing.assert_close(output, expected)
    assert len(runs) == 4


def test_what_goes_the_long_way(runs: list[settled_calls.Settled]) -> None:
    q = torch.randn(1, 2, 6, 8)

    def is_short(*tensors: Tensor, **options: Any) -> bool:
        for _ in range(2):
            runs.clear()
            regard.attention(*tensors, **options)
        return bool(runs)

    assert is_short(q, q, q)
    assert is_short(q, q, q, score=regard.ScaledDot(0.3))
    assert not is_short(q, q, q, score=regard.ScaledDot(-0.3))
    assert not is_short(q, q, q[..., :4])
    assert not is_short(q, q, q, dropout=0.1)
    assert not is_short(q, q, q, backend="tiled")
    assert not is_short(q, q, q, bias=torch.zeros(6, 6))
    assert not is_short(q, q, q, normalization=regard.SoftmaxWithSink())
    assert not is_short(q.mT.contiguous().mT, q, q)
    assert is_short(q.clone().requires_grad_(), q, q)
    assert not is_short(q.clone().requires_grad_(), q, q, return_weights=True)
    assert not is_short(q[0], q[0], q[0])
    with torch.autocast("cpu", torch.bfloat16):
        assert regard.attention(q, q, q).dtype == torch.bfloat16
    with regard.checking(), pytest.raises(NonFiniteError):
        regard.attention(q * torch.nan, q, q)


def test_calls_of_no_sequence(runs: list[settled_calls.Settled]) -> None:
    q, k = torch.randn(0, 2, 3, 4), torch.randn(0, 1, 5, 4)
    for mask in (None, regard.causal(0), regard.lengths(torch.zeros(0, dtype=torch.long))):
        short, long = both_ways(q, k, k, mask=mask)
        assert short.output.shape == (0, 2, 3, 4)
        assert_same(short, long)
    assert not runs


def test_a_gradient_after_calls_without_one() -> None:
    q = torch.randn(1, 2, 6, 8)
    with torch.no_grad():
        regard.attention(q, q, q), regard.attention(q, q, q)
    leaf = q.clone().requires_grad_()
    (grad,) = torch.autograd.grad(regard.attention(leaf, leaf, leaf).sum(), leaf)
    assert grad.abs().sum() > 0


def output_and_gradients(*tensors: Tensor, **options: Any) -> list[Tensor]:
    leaves = [t.detach().clone().requires_grad_() for t in tensors]
    output = regard.attention(*leaves, **options)
    # Weights of no regular pattern, so that no gradient is that of a sum, which is 0.
    grad = torch.arange(output.numel(), dtype=torch.float64).sin().view_as(output).to(output.dtype)
    return [output, *torch.autograd.grad(output, leaves, grad)]


def assert_same_gradients(*tensors: Tensor, **options: Any) -> None:
    regard.attention(*tensors, **options)
    short = output_and_gradients(*tensors, **options)
    with the_long_way():
        long = output_and_gradients(*tensors, **options)
    for one, other in zip(short, long, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@given(case=cases(), data=st.data())
def test_it_changes_no_bit_of_a_gradient(dtype: torch.dtype, case: Case, data: st.DataObject) -> None:
    case = case.to(dtype)
    assert_same_gradients(*case.tensors(), **case.options())


@pytest.mark.parametrize("length", [9, 70])
def test_gradients_under_masks_of_every_kind(length: int, runs: list[settled_calls.Settled]) -> None:
    """The longer calls have so many numbers that compiled code takes them, where it is installed."""
    q, k, v = (torch.randn(4 if length > 9 else 2, 8, length, 32) for _ in range(3))
    for name, make in [*MASKS.items(), *MASKS.items()]:
        if length > 9 and name not in ("none", "causal", "causal(0)"):
            continue
        runs.clear()
        assert_same_gradients(q, k, v, mask=make())
        assert bool(runs) == (name in SHORT), name
    if length > 9:
        lengths = torch.tensor([70, 0, 33, 70])
        assert_same_gradients(q, k, v, mask=regard.lengths(lengths))
        assert_same_gradients(q, k, v, mask=regard.lengths(lengths) & regard.causal())


def test_a_gradient_knows_the_lengths_of_its_own_call() -> None:
    q, n = torch.randn(2, 2, 6, 8, dtype=torch.float64), torch.tensor([6, 2])
    mask = regard.lengths(n)
    regard.attention(q, q, q, mask=mask)
    leaf = q.clone().requires_grad_()
    output = regard.attention(leaf, q, q, mask=mask)
    n[:] = 1
    (grad,) = torch.autograd.grad(output.square().sum(), leaf)
    again = q.clone().requires_grad_()
    expected = regard.attention(again, q, q, mask=regard.lengths(torch.tensor([6, 2])), backend="tiled")
    torch.testing.assert_close(grad, torch.autograd.grad(expected.square().sum(), again)[0])


@pytest.mark.parametrize("mask", ["none", "causal", "lengths", "both"])
def test_second_derivatives(mask: str, runs: list[settled_calls.Settled]) -> None:
    tensors = [torch.randn(2, 2, 9, 4, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    chosen = MASKS[mask]()
    regard.attention(*tensors, mask=chosen)
    runs.clear()
    assert torch.autograd.gradgradcheck(lambda *given: regard.attention(*given, mask=chosen), tensors, fast_mode=True)
    assert runs


def test_a_checkpoint_recomputes_in_the_other_way() -> None:
    """The first call of a kind goes the long way, and the same call in the backward pass the short one."""
    q = torch.randn(1, 2, 7, 8, dtype=torch.float64, requires_grad=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(settled_calls, "SEEN", {})
        output = checkpoint(lambda x: regard.attention(x, x, x), q, use_reentrant=False)
        (grad,) = torch.autograd.grad(output.square().sum(), q)
        assert settled_calls.SEEN
    (expected,) = torch.autograd.grad(regard.attention(q, q, q, backend="tiled").square().sum(), q)
    torch.testing.assert_close(grad, expected)


def test_nothing_holds_queries_and_keys_but_what_is_saved() -> None:
    """Whoever takes saved tensors away, to another memory or to a file, has taken all of them."""
    q = torch.randn(1, 2, 6, 8, dtype=torch.float64)
    regard.attention(q, q, q)
    leaf = q.clone().requires_grad_()
    doubled = leaf * 2
    gone = weakref.ref(doubled)
    packed: list[Tensor] = []

    def pack(tensor: Tensor) -> int:
        packed.append(tensor.detach().clone())
        return len(packed) - 1

    with torch.autograd.graph.saved_tensors_hooks(pack, packed.__getitem__):
        output = regard.attention(doubled, doubled, doubled)
    del doubled
    assert gone() is None
    (grad,) = torch.autograd.grad(output.square().sum(), leaf)
    expected = q.clone().requires_grad_()
    by_tiles = regard.attention(2 * expected, 2 * expected, 2 * expected, backend="tiled").square().sum()
    torch.testing.assert_close(grad, torch.autograd.grad(by_tiles, expected)[0])


def test_errors_are_those_of_a_first_call() -> None:
    q = torch.randn(2, 2, 6, 8)
    for _ in range(2):
        regard.attention(q, q, q, mask=regard.lengths(torch.tensor([1, 2])))
    for _ in range(2):
        with pytest.raises(ShapeError, match="lengths must have shape"):
            regard.attention(q, q, q, mask=regard.lengths(torch.tensor([1, 2, 3])))
        with pytest.raises(ShapeError, match="same length"):
            regard.attention(q, q, q[:, :, :3])


def test_kinds_do_not_pile_up(runs: list[settled_calls.Settled], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(settled_calls, "MOST", 3)
    for length in range(1, 9):
        regard.attention(*[torch.randn(1, 1, length, 4)] * 3)
    assert len(settled_calls.SEEN) <= 3


@torch.no_grad()
@pytest.mark.parametrize("mask", [None, regard.causal(0), regard.lengths(torch.tensor([7, 3]))], ids=str)
@pytest.mark.parametrize("groups", [4, 2])
def test_all_weights_of_a_short_call_are_those_of_a_block_and_keep_its_promises(mask: Any, groups: int) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, groups, 7, 8)
    for _ in range(2):
        weights = regard.attention(q, k, k, mask=mask, return_weights=True).weights
    dense, keys = weights.dense(), k.repeat_interleave(4 // groups, 1)
    assert torch.equal(dense, weights.block(range(5), range(7)))
    scores = (q.double() @ keys.double().mT) / 8**0.5
    if mask is not None:
        allowed = torch.ones(2, 1, 5, 7, dtype=torch.bool).tril() if "causal" in str(mask) else None
        scores = scores.masked_fill(
            ~(torch.arange(7) < mask.valid.view(2, 1, 1, 1) if allowed is None else allowed), -torch.inf
        )
    assert torch.allclose(dense.double(), scores.softmax(-1), atol=1e-6)
    cost = 2 * 4 * 5 * 7 * 4
    assert weights.dense(limit_bytes=cost).shape == (2, 4, 5, 7)
    with pytest.raises(TooLargeError, match="above the limit"):
        weights.dense(limit_bytes=cost - 1)
    k.zero_()
    with pytest.raises(OverwrittenError, match="the keys"):
        weights.dense()


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_rows_in_half_precision_sum_to_1(dtype: torch.dtype, runs: list[settled_calls.Settled]) -> None:
    """The kernel's own log-sum-exp is rounded too often for that."""
    q, k = (4 * torch.randn(2, 4, 64, 64, dtype=dtype) for _ in range(2))
    for _ in range(2):
        weights = regard.attention(q, k, k, return_weights=True).weights
    assert runs, "the call did not take the short way"
    assert torch.allclose(weights.sum(-1), torch.ones(2, 4, 64), atol=1e-5)
    exact = ((q.double() @ k.double().mT) / 8).softmax(-1)
    assert (weights.dense() - exact).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("copied", [copy.deepcopy, lambda one: pickle.loads(pickle.dumps(one))])
@pytest.mark.parametrize("mask", [None, regard.causal(0)], ids=str)
def test_a_copy_of_a_map_that_nobody_has_read_is_nobody_elses(mask: Any, copied: Callable[[Any], Any]) -> None:
    q, k = torch.randn(2, 4, 5, 8), torch.randn(2, 4, 5, 8)
    q.mul_(2.0)  # A copy begins to count anew.
    for _ in range(2):
        weights = regard.attention(q, k, k, mask=mask, return_weights=True).weights
    expected = regard.attention(q.clone(), k, k, mask=mask, return_weights=True).weights.dense()
    kept = copied(weights)
    q.zero_()
    with pytest.raises(OverwrittenError, match="the queries"):
        weights.dense()
    assert torch.equal(kept.dense(), expected)
    assert torch.equal(kept[..., 1:, :].dense(), expected[..., 1:, :])


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("heads", [(3, 3, 3), (3, 1, 1), (1, 3, 3), (1, 1, 3), (3, 1, 3), (3, 3, 1)])
@pytest.mark.parametrize("batch", list(product((1, 2), repeat=3)))
def test_one_sequence_or_head_for_several(
    batch: tuple[int, ...], heads: tuple[int, ...], grad: bool, runs: list[settled_calls.Settled]
) -> None:
    """The kernel would read beyond the end of a tensor that is spread over a larger batch."""
    query, key, value = (
        torch.randn(rows, groups, length, 8, requires_grad=grad)
        for rows, groups, length in zip(batch, heads, (5, 7, 7), strict=True)
    )
    answers: list[Any] = []
    for _ in range(3):
        try:
            output, weights = regard.attention(query, key, value, return_weights=True)
            plain = regard.attention(query, key, value)
        except ShapeError as error:
            answers.append(str(error))
            continue
        dense = (query @ key.mT / 8**0.5).softmax(-1)
        expected = dense @ value
        for ours, right in ((output, expected), (plain, expected), (weights.dense(), dense.expand(weights.shape))):
            torch.testing.assert_close(ours, right, atol=1e-5, rtol=1e-5)
        if grad:
            weigh = torch.randn_like(expected)
            leaves = query, key, value
            mine, theirs = (torch.autograd.grad(one, leaves, weigh, retain_graph=True) for one in (plain, expected))
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-5)
        answers.append(plain.shape)
    assert answers == answers[:1] * 3
    assert bool(runs) == (len(set(batch)) == 1 and heads in ((3, 3, 3), (3, 1, 1)))
