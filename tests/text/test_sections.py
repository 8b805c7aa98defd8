"""Corpora that are planned in sections: every row once, from all over, the same after a stop, in bounded memory."""

import tracemalloc
from itertools import chain
from typing import Any

import numpy as np
import pytest

from regard.tasks.text import batches as sections_module
from regard.tasks.text.batches import sections
from regard.tasks.text.blocks import BlockPlan
from regard.tasks.translation.corpus import TokenBatches


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sections of some 64 rows, in runs of 4."""
    monkeypatch.setattr(sections_module, "SECTION_ROWS", 64)
    monkeypatch.setattr(sections_module, "RUN_ROWS", 4)


class Lengths:
    """A store of pairs that has no more than their numbers: the only token of pair i is i."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __len__(self) -> int:
        return self.count

    def lengths(self, rows: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        return (1 + rows * 7 % 11).astype(np.int32), (1 + rows * 5 % 13).astype(np.int32)

    def source(self, index: int) -> np.ndarray:
        return np.array([index])

    target = source


def batches(count: int, *, rank: int = 0, world_size: int = 1, max_length: int = 100) -> TokenBatches:
    store: Any = Lengths(count)
    return TokenBatches(store, max_length=max_length, max_tokens=120, seed=4, rank=rank, world_size=world_size)


def numbers(found: TokenBatches, epoch: int, start: int = 0) -> list[list[int]]:
    return [batch.source[:, 0].tolist() for batch in found.epoch(epoch, start)]


@pytest.mark.parametrize("count", [0, 1, 64, 65, 1000, 1027])
def test_every_row_is_in_one_section(small: None, count: int) -> None:
    found = list(sections(count, seed=1, epoch=2))
    assert sorted(np.concatenate(found).tolist()) == list(range(count))
    assert max(map(len, found)) <= 68
    assert count <= 64 or min(map(len, found)) >= 28  # no rest that would be too small a batch


def test_a_section_has_rows_from_all_over(small: None) -> None:
    for rows in sections(1000, seed=1, epoch=0):
        assert rows.min() < 400
        assert rows.max() > 600
        assert len(np.unique(rows // 4)) <= len(rows) // 4 + 1  # in runs of four
    first, second = ({frozenset(rows) for rows in sections(1000, seed=1, epoch=epoch)} for epoch in (0, 1))
    assert not first & second


def test_an_epoch_has_every_pair_once_in_another_order(small: None) -> None:
    first, second = (numbers(batches(1027), epoch) for epoch in (0, 1))
    for found in (first, second):
        assert sorted(number for batch in found for number in batch) == list(range(1027))
    assert first != second
    assert len(batches(1027)) == 1027


def test_going_on_in_mid_epoch_gives_the_same_batches(small: None) -> None:
    whole = numbers(batches(500), 3)
    for start in (0, 1, len(whole) // 2, len(whole) - 1, len(whole)):
        assert numbers(batches(500), 3, start) == whole[start:]


def test_ranks_share_the_batches_of_one(small: None) -> None:
    whole = numbers(batches(500), 0)
    shares = [numbers(batches(500, rank=rank, world_size=3), 0) for rank in range(3)]
    assert [sorted(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)] == [
        sorted(batch) for batch in whole
    ]


def test_pairs_that_exceed_a_limit_are_left_out(small: None) -> None:
    kept = [i for i in range(500) if max(1 + i * 7 % 11, 1 + i * 5 % 13) + 1 <= 6]
    found = batches(500, max_length=6)
    assert len(found) == len(kept)
    assert sorted(chain.from_iterable(numbers(found, 0))) == kept


def plan(count: int, rank: int = 0, world_size: int = 1) -> BlockPlan:
    text = np.arange(count * 3 + 4)
    return BlockPlan(text, length=3, overlap=1, batch_tokens=15, seed=2, rank=rank, world_size=world_size)


def blocks(found: BlockPlan, epoch: int, start: int = 0) -> list[list[int]]:
    return [[*block.tokens[:, 0].tolist(), *block.seeds.tolist()] for block in found.epoch(epoch, start)]


def test_blocks_of_text_in_sections(small: None) -> None:
    whole = blocks(plan(400), 1)
    begins = [begin for batch in whole for begin in batch[:5]]
    assert len(set(begins)) == len(begins) > 400 - 7 * 5  # a batch that is not full is left out of each section
    for start in (0, 5, 40, len(whole) - 1, len(whole)):
        assert blocks(plan(400), 1, start) == whole[start:]
    shares = [blocks(plan(400, rank, 2), 1) for rank in range(2)]
    assert [sorted(chain.from_iterable(parts)) for parts in zip(*shares, strict=True)] == [
        sorted(batch) for batch in whole
    ]
    assert blocks(plan(400), 2) != whole


def peak_bytes(count: int) -> int:
    found = batches(count)
    tracemalloc.start()
    next(found.epoch(0, 0))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    return peak


def test_memory_is_that_of_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections_module, "SECTION_ROWS", 2**13)
    peak_bytes(1000)
    few, many = peak_bytes(2**14), peak_bytes(2**19)
    assert many - few < 2**19  # a byte a pair, where a plan of all of them takes about a hundred
