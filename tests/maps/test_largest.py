"""The k largest of long rows, found by way of chunks, against torch's own."""

import pytest
import torch
from torch import Tensor

from regard.mechanisms.fast_topk import largest

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
    check(-torch.rand(3, length, dtype=dtype), k)
    check(torch.randn(3, length, dtype=dtype).exp() * 1e-40, k)


@pytest.mark.parametrize("length", LENGTHS)
def test_equals_and_zeros(length: int) -> None:
    k = min(8, length)
    check(torch.zeros(2, length), k)
    check(torch.randint(0, 3, (4, length)).float(), k)
    rows = torch.zeros(1, length)
    rows[0, -1] = 1.0
    assert largest(rows, 1).item() == length - 1


def test_infinity_has_its_place() -> None:
    rows = torch.rand(2, 2000)
    rows[0, 1999] = rows[1, 7] = torch.inf
    assert largest(rows, 3)[:, 0].tolist() == [1999, 7]
