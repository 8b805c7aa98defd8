"""Memory of answers that nobody holds any more is taken again, and that of all others is left alone."""

import copy
import gc
import os
import pickle
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.utils.dlpack
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.tensors import reused_memory
from regard.tensors.reused_memory import LEAST, MOST, PAGE
from regard.tensors.reused_memory import reused_memory as taken_memory

COUNT = LEAST // 4
NAMES = ("received", "entropy", "top_keys", "pooled_mean", "pooled_max")


@pytest.fixture(autouse=True)
def nothing_is_free() -> Iterator[None]:
    gc.collect()
    reused_memory._free.clear()
    yield
    reused_memory._free.clear()


def free_bytes() -> int:
    return sum(block.size for block in reused_memory._free)


def test_what_was_freed_is_taken_again() -> None:
    first = taken_memory((4, COUNT), torch.float32)
    place = first.data_ptr()
    del first
    assert free_bytes() == 16 * COUNT
    again = taken_memory((2, COUNT), torch.float64)
    assert again.data_ptr() == place
    assert again.shape == (2, COUNT)
    assert again.dtype == torch.float64
    assert free_bytes() == 0


@pytest.mark.parametrize(
    "hold",
    [
        lambda t: t[3:5],
        lambda t: t.view(torch.int32),
        lambda t: t.numpy()[::2],
        lambda t: t.untyped_storage(),
        lambda t: torch.utils.dlpack.from_dlpack(t)[1:],
        lambda t: np.asarray(t)[-1:],
        lambda t: (t.requires_grad_() * 2).sum(),  # the graph holds what it needs for the gradient, and its leaf
    ],
)
def test_whatever_holds_the_memory_keeps_it(hold: object) -> None:
    answer = taken_memory((COUNT,), torch.float32)
    assert callable(hold)
    held = hold(answer)
    del answer
    gc.collect()
    assert free_bytes() == 0
    del held
    gc.collect()
    assert free_bytes() == LEAST


@given(st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=40))
@settings(max_examples=50, deadline=None)
def test_no_two_answers_that_are_held_share_memory(steps: list[tuple[int, bool]]) -> None:
    held: list[tuple[int, Tensor]] = []
    for number, (size, frees) in enumerate(steps):
        if frees and held:
            del held[number % len(held)]
        else:
            one = taken_memory((COUNT + 1000 * size,), torch.float32)
            held.append((number, one.fill_(number)))
        assert all((one == wanted).all() for wanted, one in held)
        assert free_bytes() <= MOST


def test_copies_and_files_are_apart() -> None:
    answer = taken_memory((COUNT,), torch.float32).fill_(3)
    copies = [copy.deepcopy(answer), pickle.loads(pickle.dumps(answer)), answer.clone()]
    answer.zero_()
    assert all((one == 3).all() for one in copies)


def test_so_much_is_kept_and_the_oldest_goes_first() -> None:
    half = [taken_memory((MOST // 2,), torch.uint8) for _ in range(2)]
    young = taken_memory((LEAST,), torch.uint8)
    places = [one.data_ptr() for one in half]
    del half[0]
    del half[0]
    assert free_bytes() == MOST
    del young
    assert free_bytes() == MOST // 2 + LEAST
    assert [block.lent().ctypes.data for block in tuple(reused_memory._free)][:1] == places[1:]


def test_what_is_larger_than_all_that_is_kept_is_not_kept() -> None:
    taken_memory((MOST + PAGE,), torch.uint8)
    assert free_bytes() == 0


def test_small_memory_is_torchs_own() -> None:
    taken_memory((LEAST - 1,), torch.uint8)
    assert free_bytes() == 0


def test_memory_begins_at_a_line_of_the_cache() -> None:
    assert all(taken_memory((COUNT + n,), torch.float32).data_ptr() % 64 == 0 for n in range(5))


def test_threads_take_no_block_twice() -> None:
    def take_and_look(number: int) -> bool:
        for _ in range(100):
            one = taken_memory((COUNT,), torch.float32).fill_(number)
            if not (one == number).all():
                return False
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(take_and_look, range(8)))


@pytest.mark.parametrize("count", [10, 2 * COUNT])
def test_answers_may_be_written_to(count: int) -> None:
    """In place, also where a gradient is recorded, though they were made where none is."""
    with torch.no_grad():
        answer = taken_memory((2, count), torch.float32).fill_(1)
        other = taken_memory((2, count), torch.float32, away_from=answer).fill_(1)
    assert (other.data_ptr() - answer.data_ptr()) % PAGE == PAGE // 2
    factor = torch.nn.Parameter(torch.tensor(3.0))
    for one in (answer, other):
        one.mul_(factor)
        one[:1].mul_(factor)
        assert one.sum().item() == 12 * count
    (answer.sum() + other.sum()).backward()
    assert factor.grad is not None


def test_a_file_of_an_answer_holds_nothing_else() -> None:
    taken_memory((COUNT + 1,), torch.float32).fill_(7)
    answer = taken_memory((COUNT + 1,), torch.float32).zero_()
    assert answer.untyped_storage().nbytes() == 4 * (COUNT + 1)


def test_modes_do_not_matter() -> None:
    with torch.inference_mode():
        taken_memory((COUNT,), torch.float32)
    answer = taken_memory((COUNT,), torch.float32)
    assert not answer.is_inference()
    answer.add_(1).requires_grad_().sum().backward()
    torch.set_default_dtype(torch.float64)
    torch.set_default_device("meta")
    try:
        assert taken_memory((COUNT,), torch.float32).device.type == "cpu"
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_default_device(None)


def test_statistics_that_are_held_stay_as_they_are() -> None:
    """And those on memory that was taken again are what they would be on new memory."""
    pytest.importorskip("numba")
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 8, 512, 16, generator=generator) for _ in range(3))
    full, causal = (regard.attention(q, k, v, mask=mask, return_weights=True)[1] for mask in (None, regard.causal()))
    fresh = causal.summary(*NAMES)
    kept = copy.deepcopy(fresh)
    again = causal.summary(*NAMES)
    for name in NAMES:
        assert_same(fresh[name], kept[name])
        assert_same(again[name], kept[name])
    places = {block.lent().ctypes.data for block in tuple(reused_memory._free)}
    del again
    assert len(reused_memory._free) > len(places)
    # What a map without a mask leaves on the memory is not seen by one that answers only for half of it.
    full.summary(*NAMES)
    taken = causal.summary(*NAMES)
    for name in NAMES:
        assert_same(taken[name], kept[name])


def assert_same(one: object, other: object) -> None:
    if isinstance(one, Tensor):
        assert isinstance(other, Tensor)
        assert torch.equal(one, other)
    else:
        assert isinstance(one, tuple)
        assert isinstance(other, tuple)
        for a, b in zip(one, other, strict=True):
            assert_same(a, b)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no fork")
def test_a_forked_process_has_its_own_numbers() -> None:
    ours = taken_memory((COUNT,), torch.float32).fill_(1.0)
    child = os.fork()
    if not child:
        ours.numpy().fill(7.0)
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert ours.numpy().max() == 1.0
