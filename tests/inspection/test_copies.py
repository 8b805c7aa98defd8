"""Copies of what a model may overwrite: the numbers and their order in memory, on memory that is there already."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

import regard
from regard.inspection.capture import snapshot
from regard.inspection.capture.snapshot import WRITTEN_AS, copied
from regard.maps import reused_memory
from regard.maps.reused_memory import LEAST

QKV = torch.randn(2, 600, 3 * 4 * 32)
LARGE = {
    "plain": QKV,
    "heads of a part": QKV[..., :128].view(2, 600, 4, 32).transpose(1, 2),
    "turned": QKV.permute(2, 0, 1),
    "every second": QKV[:, ::2],
    "expanded": QKV[:1].expand(3, 600, 384),
}


@pytest.fixture(autouse=True)
def nothing_is_free() -> Iterator[None]:
    gc.collect()
    reused_memory._free.clear()
    yield
    reused_memory._free.clear()


@pytest.mark.parametrize("tensor", LARGE.values(), ids=LARGE)
@pytest.mark.parametrize("dtype", [*WRITTEN_AS, torch.complex64])
def test_a_copy_has_the_numbers(tensor: Tensor, dtype: torch.dtype) -> None:
    tensor = tensor.to(dtype)
    found = copied(tensor)
    assert torch.equal(found, tensor)
    assert found.dtype == dtype
    assert found.data_ptr() != tensor.data_ptr()
    assert found.untyped_storage().nbytes() >= tensor.numel() * tensor.element_size()
    with torch.inference_mode():
        made = tensor.clone()
        assert not copied(made).is_inference()
    assert torch.equal(copied(made), tensor)


@pytest.mark.parametrize("name", ["plain", "heads of a part", "turned"])
def test_it_has_the_order_in_memory_that_is_fastest_to_copy(name: str) -> None:
    tensor = LARGE[name]
    ours, theirs = (sorted(range(tensor.dim()), key=one.stride) for one in (copied(tensor), tensor))
    assert ours == theirs


def test_the_next_copy_takes_memory_that_is_free_and_no_other() -> None:
    first, place = copied(QKV), 0
    second = copied(QKV + 1)
    assert torch.equal(first, QKV)
    place = first.data_ptr()
    part = first[1]
    del first
    gc.collect()
    assert copied(QKV + 2).data_ptr() != place  # somebody holds a part of it
    del part
    gc.collect()
    third = copied(QKV + 3)
    assert third.data_ptr() == place
    assert torch.equal(second, QKV + 1)


def test_small_ones_and_what_a_mode_asks_about_are_clones() -> None:
    class Counting(TorchDispatchMode):
        clones = 0

        def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.clones += func is torch.ops.aten.clone.default
            return func(*args, **(kwargs or {}))

    assert copied(torch.ones(LEAST // 4 - 1)).untyped_storage().nbytes() == LEAST - 4
    with Counting() as mode:
        assert torch.equal(copied(QKV), QKV)
    assert mode.clones == 1
    with torch._subclasses.FakeTensorMode():
        assert type(copied(torch.empty(LEAST))).__name__ == "FakeTensor"


def test_maps_of_one_pass_are_not_those_of_the_next() -> None:
    layer = torch.nn.MultiheadAttention(64, 2, batch_first=True).eval()
    x, y = torch.randn(2, 1, 600, 64)
    with torch.no_grad():
        with regard.watch(layer, copy=True) as first:
            layer(x, x, x)
        expected = first.maps[0].dense()
        with regard.watch(layer, copy=True) as second:
            layer(y, y, y)
    assert torch.equal(first.maps[0].dense(), expected)
    assert not torch.equal(second.maps[0].dense(), expected)


def test_fixtures_are_large_enough() -> None:
    assert all(t.numel() * t.element_size() >= LEAST for t in LARGE.values())
    assert snapshot.LARGE == LEAST
