"""The k largest of long rows, found by way of chunks, against torch's own."""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.tensors import topk as fast_topk
from regard.tensors.topk import largest, largest_of_groups

LENGTHS = [1, 2, 7, 8, 60, 128, 129, 130, 255, 257, 1000, 1024, 1025, 1056, 2111, 4096]


def check(rows: Tensor, k: int) -> None:
    places = largest(rows, k)
    values = rows.gather(-1, places)
    assert torch.equal(values, rows.topk(k, -1).values)
    assert all(len(set(row)) == k for row in places.flatten(0, -2).tolist())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("k", [1, 8, 64])
def test_any_length(length: int, k: int, dtype: torch.dtype) -> None:
    k = min(k, length)
    check(torch.rand(2, 5, length, dtype=dtype), k)
    check(torch.rand(2, 40, length, dtype=dtype), k)
    check(-torch.rand(3, length, dtype=dtype), k)
    check(torch.randn(3, length, dtype=dtype).exp() * 1e-40, k)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_and_zeros(length: int) -> None:
    k = min(8, length)
    check(torch.zeros(2, length), k)
    check(torch.randint(0, 3, (70, length)).float(), k)
    check(torch.randint(0, 3, (4, length)).float(), k)
    rows = torch.zeros(1, length)
    rows[0, -1] = 1.0
    assert largest(rows, 1).item() == length - 1


def test_infinity_has_its_place() -> None:
    rows = torch.rand(70, 2000)
    rows[0, 1999] = rows[1, 7] = torch.inf
    assert largest(rows, 3)[:2, 0].tolist() == largest(rows[:2], 3)[:, 0].tolist() == [1999, 7]


@settings(max_examples=60)
@given(
    vocab=st.integers(1, 700), sources=st.integers(1, 4), rows=st.integers(1, 4), count=st.integers(1, 9),
    seed=st.integers(0, 9), dead=st.booleans(), dtype=st.sampled_from([torch.float32, torch.float64]),
    few=st.sampled_from([0, fast_topk.FEW_IN_GROUPS]),
)  # fmt: skip
def test_the_largest_of_groups_are_those_of_a_whole_sort(
    vocab: int, sources: int, rows: int, count: int, seed: int, dead: bool, dtype: torch.dtype, few: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(sources * rows, vocab, generator=generator, dtype=dtype)
    offsets = torch.randn(sources, rows, generator=generator, dtype=dtype)
    if dead:
        offsets[:, 1:] = -torch.inf
        values[values < -1] = -torch.inf
    with mock.patch.object(fast_topk, "FEW_IN_GROUPS", few):
        found, places = largest_of_groups(values, offsets, count)
    whole = (values.view(sources, rows, vocab) + offsets[..., None]).view(sources, -1)
    assert torch.equal(found, whole.sort(descending=True)[0][:, :count])
    assert torch.equal(whole.gather(1, places), found)
    assert all(len(set(row)) == len(row) for row in places.tolist())


@given(vocab=st.integers(1, 400), seed=st.integers(0, 9))
def test_of_equal_numbers_the_first_is_the_largest(vocab: int, seed: int) -> None:
    values = torch.randint(0, 3, (5, vocab), generator=torch.Generator().manual_seed(seed)).float()
    for few in (0, fast_topk.FEW):
        with mock.patch.object(fast_topk, "FEW", few):
            assert torch.equal(largest(values, 1), values.max(-1, keepdim=True)[1])
