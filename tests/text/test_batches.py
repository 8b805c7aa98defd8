"""Batches: every pair once, within the budget, the same for any number of ranks, little padding."""

from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from regard.errors import ArgumentError
from regard.tasks.text import batches as sections_module
from regard.tasks.text.batches import collate, plan_batches, sections
from regard.tasks.text.blocks import BlockPlan
from regard.tasks.text.tokenizers import BOS, EOS, PAD
from regard.tasks.translation.corpus import TokenBatches
from tests.text.test_store import peak_bytes

length = st.one_of(st.integers(0, 30), st.sampled_from([0, 30]))
lengths = st.lists(st.tuples(length, length), min_size=1, max_size=200)
sentence = st.lists(st.integers(4, 99), max_size=7)


def planned(pairs: list[tuple[int, int]], **changes: int) -> list[np.ndarray]:
    source, target = np.array(pairs, np.int32).T
    return plan_batches(source, target, **({"max_tokens": 128, "seed": 3, "epoch": 0} | changes))


@given(lengths, st.integers(62, 500), st.integers(0, 5))
@example([(30, 30)] * 2 + [(1, 1)] * 20, 128, 0)  # few long pairs, then a last batch of many short ones
@example([(5, 1)] * 10 + [(2, 30)] * 2, 80, 0)  # a last batch with longer targets than the one before
def test_every_pair_is_in_one_batch_and_no_batch_exceeds_the_budget(
    pairs: list[tuple[int, int]], max_tokens: int, epoch: int
) -> None:
    batches = planned(pairs, max_tokens=max_tokens, epoch=epoch)
    assert sorted(np.concatenate(batches)) == list(range(len(pairs)))
    source, target = np.array(pairs).T + 1
    for batch in batches:
        assert len(batch) * (source[batch].max() + target[batch].max()) <= max_tokens


@given(lengths, st.integers(2, 4), st.integers(0, 3))
def test_ranks_share_the_batches_of_one_rank(pairs: list[tuple[int, int]], world_size: int, epoch: int) -> None:
    budget = 62 * world_size * 2  # room for enough pairs of the longest, in the last two batches too
    pairs = pairs * world_size
    whole = planned(pairs, epoch=epoch, max_tokens=budget)
    shares = [
        planned(pairs, epoch=epoch, max_tokens=budget, rank=rank, world_size=world_size) for rank in range(world_size)
    ]
    assert {len(share) for share in shares} == {len(whole)}
    for k, batch in enumerate(whole):
        assert sorted(np.concatenate([share[k] for share in shares])) == sorted(batch)
        sizes = [len(share[k]) for share in shares]
        assert 0 < max(sizes) <= min(sizes) + 1


def many(count: int, seed: int = 0) -> list[tuple[int, int]]:
    generator = np.random.default_rng(seed)
    source = np.exp(generator.normal(2.5, 0.5, count))
    return list(
        zip((source + 1).astype(int), (source * generator.uniform(0.7, 1.5, count) + 1).astype(int), strict=True)
    )


def test_a_plan_is_a_function_of_its_arguments() -> None:
    pairs = many(2_000)
    again = [batch.tolist() for batch in planned(pairs, max_tokens=512)]
    np.random.seed(1)
    torch.manual_seed(1)
    assert [batch.tolist() for batch in planned(pairs, max_tokens=512)] == again
    for change in ({"seed": 4}, {"epoch": 1}):
        assert [batch.tolist() for batch in planned(pairs, max_tokens=512, **change)] != again


def test_batches_come_in_random_order_and_pairs_meet_others_in_each_epoch() -> None:
    pairs = many(5_000)
    first, second = (planned(pairs, max_tokens=512, epoch=epoch) for epoch in (0, 1))
    mean_lengths = [np.mean([pairs[i][0] for i in batch]) for batch in first]
    assert abs(np.corrcoef(mean_lengths, np.arange(len(first)))[0, 1]) < 0.3
    company = [{frozenset((a, b)) for batch in plan for a in batch for b in batch if a < b} for plan in (first, second)]
    assert len(company[0] & company[1]) < 0.6 * len(company[0])


@pytest.mark.parametrize("max_tokens", [1024, 2048, 4096])
def test_padding_is_under_eight_percent(max_tokens: int) -> None:
    pairs = many(30_000)
    source, target = np.array(pairs).T + 1
    plan = planned(pairs, max_tokens=max_tokens)
    places = sum(len(batch) * (source[batch].max() + target[batch].max()) for batch in plan)
    assert 1 - (source.sum() + target.sum()) / places < 0.08
    assert 0.9 * max_tokens < places / len(plan) <= max_tokens


def test_targets_do_not_jump_where_the_length_of_the_source_changes() -> None:
    """Three lengths of sources, each with targets of 1 to 40: no batch joins the shortest and the longest targets."""
    pairs = [(source, target) for source in (7, 8, 9) for target in range(1, 41)]
    batches = planned(pairs, max_tokens=400)
    spreads = [np.ptp([pairs[i][1] for i in batch]) for batch in batches]
    assert max(spreads) < 20


def test_the_last_batch_is_no_rest() -> None:
    """Twelve pairs of 20 tokens and room for eleven: six and six, not eleven and one."""
    assert sorted(map(len, planned([(9, 9)] * 12, max_tokens=220))) == [6, 6]


def test_pairs_and_ranks_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="max_tokens=20, but pair 1 has 11 source and 10 target"):
        planned([(3, 3), (10, 9)], max_tokens=20)
    with pytest.raises(ArgumentError, match=r"smallest batch has 1 pairs; raise max_tokens \(--batch-tokens\)"):
        planned([(9, 9)] * 3, max_tokens=20, world_size=2)
    with pytest.raises(ArgumentError, match="rank 2 to be one of 2"):
        planned([(9, 9)] * 3, rank=2, world_size=2)
    with pytest.raises(ArgumentError, match="got none"):
        plan_batches(np.zeros(0, np.int32), np.zeros(0, np.int32), max_tokens=9, seed=0, epoch=0)


@given(st.lists(st.tuples(sentence, sentence), min_size=1, max_size=6))
def test_a_batch_holds_its_sentences(pairs: list[tuple[list[int], list[int]]]) -> None:
    sources, targets = zip(*pairs, strict=True)
    batch = collate(sources, [np.array(target, np.uint16) for target in targets])
    assert {tensor.dtype for tensor in batch} == {torch.int64}
    assert batch.source.shape == (len(pairs), max(map(len, sources)) + 1)
    assert batch.target_input.shape == batch.target_output.shape == (len(pairs), max(map(len, targets)) + 1)
    for row, (source, target) in enumerate(pairs):
        n, m = batch.source_lengths[row], batch.target_lengths[row]
        assert batch.source[row, :n].tolist() == [*source, EOS]
        assert batch.target_output[row, :m].tolist() == [*target, EOS]
        assert batch.target_input[row, :m].tolist() == [BOS, *target]
        for padding in (batch.source[row, n:], batch.target_output[row, m:], batch.target_input[row, m:]):
            assert set(padding.tolist()) <= {PAD}
    kept = int((batch.source != PAD).sum() + (batch.target_output != PAD).sum())
    assert batch.tokens == kept


def test_batches_of_nothing_or_of_unequal_sides_are_refused() -> None:
    for sources, targets in (([], []), ([[5]], [[5], [6]])):
        with pytest.raises(ArgumentError, match=f"got {len(sources)} and {len(targets)}"):
            collate(sources, targets)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_memory_is_that_of_a_section(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sections_module, "SECTION_ROWS", 2**13)
    _, few, many = (peak_bytes(partial(next, batches(count).epoch(0, 0))) for count in (1000, 2**14, 2**19))
    assert many - few < 2**19  # a byte a pair, where a plan of all of them takes about a hundred
