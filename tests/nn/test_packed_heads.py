"""Heads of one product, taken apart: torch's own gradients, and no copy where they come back side by side."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.kernels import short_sequences
from regard.kernels.side_by_side import are_side_by_side, heads_together, memory_like
from regard.nn import MultiHeadAttention, packed_heads
from regard.nn.packed_heads import split_heads


@given(
    counts=st.lists(st.integers(1, 4), min_size=1, max_size=4), batch=st.integers(1, 3), length=st.integers(1, 5),
    unused=st.integers(0, 3), seed=st.integers(0, 2**31),
)  # fmt: skip
def test_gradients_are_those_of_split(counts: list[int], batch: int, length: int, unused: int, seed: int) -> None:
    made = torch.Generator().manual_seed(seed)
    heads = torch.randn(batch, length, sum(counts), 8, generator=made, requires_grad=True)
    weights = [torch.randn(batch, length, count, 8, generator=made) for count in counts]
    found = []
    for split in (split_heads, lambda heads, counts: heads.split_with_sizes(counts, dim=-2)):
        parts = split(heads, counts)
        # A part that nobody uses has a gradient of 0.
        loss = sum(((part * weight) ** 2).sum() for n, (part, weight) in enumerate(zip(parts, weights)) if n != unused)  # noqa: B905
        found.append(torch.autograd.grad(loss, heads)[0] if isinstance(loss, Tensor) else torch.zeros_like(heads))
    assert torch.equal(*found)


def test_gradients_may_come_in_batches() -> None:
    heads, grads = torch.randn(2, 5, 6, 8, requires_grad=True), torch.randn(3, 2, 5, 6, 8)
    whole = torch.cat(split_heads(heads, [2, 1, 3]), dim=-2)
    (found,) = torch.autograd.grad(whole, heads, grads, is_grads_batched=True)
    assert torch.equal(found, grads)


def test_second_derivatives() -> None:
    heads = torch.randn(2, 3, 4, 8, dtype=torch.float64, requires_grad=True)

    def cubed(heads: Tensor) -> Tensor:
        one, other = split_heads(heads, [1, 3])
        return (one * other**2).sum()

    assert torch.autograd.gradgradcheck(cubed, heads)


def parts_of(whole: Tensor, *counts: int) -> list[Tensor]:
    return list(whole.split(list(counts), dim=-2))


@pytest.mark.parametrize(
    ("parts", "expected"),
    [
        (parts_of(torch.zeros(2, 5, 6, 8), 2, 4), True),
        (parts_of(torch.zeros(2, 5, 6, 8), 2, 2, 2), True),
        (parts_of(torch.zeros(2, 5, 6, 8), 2, 2, 2)[:2], False),
        (parts_of(torch.zeros(2, 5, 6, 8), 3, 3)[::-1], False),
        (parts_of(torch.zeros(2, 5, 6, 16)[..., :8], 3, 3), False),
        ([torch.zeros(2, 5, 3, 8), torch.zeros(2, 5, 3, 8)], False),
        ([torch.zeros(2, 5, 3, 8)] * 2, False),
        ([torch.zeros(1).expand(2, 5, 3, 8)] * 2, False),
        ([torch.zeros(2, 5, 3, 8)], True),
    ],
)
def test_side_by_side(parts: list[Tensor], expected: bool) -> None:
    assert are_side_by_side(parts) == expected
    whole = heads_together(parts)
    assert (whole is not None) == expected
    if whole is not None:
        whole.copy_(torch.arange(whole.numel()).view_as(whole))
        assert torch.equal(torch.cat(parts, -2), whole)


def test_other_dtypes_in_one_memory() -> None:
    memory = torch.zeros(2, 5, 6, 8)
    one, other = parts_of(memory, 3, 3)
    assert not are_side_by_side([one, other.view(torch.int32)])


def test_memory_is_side_by_side_where_tensors_are() -> None:
    query, key, value = (part.transpose(1, 2) for part in parts_of(torch.zeros(2, 5, 9, 8), 3, 3, 3))
    apart, pair = torch.zeros(2, 4, 7, 8), [part.transpose(1, 2) for part in parts_of(torch.zeros(2, 5, 6, 8), 3, 3)]
    for given_, together in (((query, key, value), 3), ((apart, *pair), 2), ((query, apart, value), 1)):
        made = memory_like(*given_)
        assert [m.shape for m in made] == [t.shape for t in given_]
        last = [part.transpose(1, 2) for part in made]
        assert are_side_by_side(last[-together:])
        assert together == 3 or not are_side_by_side(last[-together - 1 :])


@pytest.mark.parametrize("attends", ["itself", "another"])
def test_a_module_puts_no_gradients_together(attends: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The gradient of the projection is the memory that the kernel wrote."""
    pytest.importorskip("numba", reason="the kernel of short sequences needs numba")
    monkeypatch.setattr(short_sequences, "LEAST", 1)
    written: list[Tensor] = []

    def made(*heads: Tensor) -> list[Tensor]:
        found = memory_like(*heads)
        written.extend(found[1:])
        return found

    monkeypatch.setattr(short_sequences, "memory_like", made)
    came: list[int] = []
    module, x, memory = MultiHeadAttention(32, 2), torch.randn(3, 7, 32), torch.randn(3, 5, 32)

    def seen(heads: Tensor, counts: Any) -> list[Tensor]:
        heads.register_hook(lambda grad: came.append(grad.untyped_storage().data_ptr()))
        return split_heads(heads, counts)

    monkeypatch.setattr("regard.nn.multi_head.split_heads", seen)
    output = module(x) if attends == "itself" else module(x, memory)
    output.square().sum().backward()
    key, value = written[-2:]
    assert key.untyped_storage().data_ptr() == value.untyped_storage().data_ptr()
    assert key.untyped_storage().data_ptr() in came


def test_a_gradient_that_is_kept_is_not_changed() -> None:
    """`retain_grad` of the parts, and a second use of the whole, see the numbers of their own."""
    heads = torch.randn(2, 5, 6, 8, requires_grad=True)
    doubled = heads * 2
    parts = split_heads(doubled, [2, 4])
    for part in parts:
        part.retain_grad()
    (sum(part.square().sum() for part in parts) + doubled.sum()).backward()
    for part in parts:
        assert part.grad is not None
        torch.testing.assert_close(part.grad, 2 * part.detach())
    assert heads.grad is not None
    torch.testing.assert_close(heads.grad, 8 * heads.detach() + 2)


def test_under_transforms_it_is_torchs_split(monkeypatch: pytest.MonkeyPatch) -> None:
    heads = torch.randn(2, 5, 6, 8)

    def loss(heads: Tensor) -> Tensor:
        one, other = split_heads(heads, [2, 4])
        return (one.sum() * other).sum()

    expected = torch.func.grad(loss)(heads)
    again = heads.clone().requires_grad_()
    loss(again).backward()
    torch.testing.assert_close(again.grad, expected)
    assert "_Split" in type(split_heads(again, [2, 4])[0].grad_fn).__name__
    # A derivative forwards knows torch's own split only.
    monkeypatch.setattr(packed_heads, "in_forward_mode", lambda: True)
    assert "_Split" not in type(split_heads(again, [2, 4])[0].grad_fn).__name__


def test_a_watched_module_learns_the_same() -> None:
    torch.manual_seed(0)
    module, x = MultiHeadAttention(32, 2), torch.randn(3, 7, 32)
    plain = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    with regard.watch(module) as seen:
        watched = torch.autograd.grad(module(x).square().sum(), list(module.parameters()))
    assert len(seen.calls) == 1
    assert all(torch.equal(a, b) for a, b in zip(plain, watched, strict=True))
