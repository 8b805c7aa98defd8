"""Hypotheses that change places: pointed at by compiled code, copied for the operations of torch."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.models.compiled_step import CompiledStep, LateStep
from regard.models.fixed_state import FixedState, in_rows_of_their_own
from regard.models.inference import FIRST_ROOM, FixedTransformer, ManySentences, of_many, prepare
from regard.storage.choices import Choices
from tests.models.test_compiled_step import BOS, KINDS, VOCAB, every_kind, untrained
from tests.models.test_steps_of_many import LENGTHS, SOURCES

Step = tuple[list[int], bool]
"""The hypotheses that go on, and whether compiled code takes the next step."""


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that can be is the compiled one."""
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])


def logits_of(ready: ManySentences, steps: list[Step]) -> tuple[list[Tensor], list[Tensor], FixedState]:
    """The logits and the alignments of each step, and the last state."""
    real, found, attended = LateStep.chosen_for, list[Tensor](), list[Tensor]()
    generator = torch.Generator().manual_seed(4)
    state, count = ready.start(SOURCES, LENGTHS), len(SOURCES)
    for index, is_compiled in steps:

        def chosen(self: LateStep, *arguments: Any, is_compiled: bool = is_compiled) -> CompiledStep | None:
            return real(self, *arguments) if is_compiled else None

        some = torch.tensor([one % count for one in index])
        state, count = ready.reorder(state, some), len(index)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(LateStep, "chosen_for", chosen)
            logits, alignment, state = ready.step(state, torch.randint(4, VOCAB, (count,), generator=generator))
        found.append(logits)
        attended.append(alignment.dense())
    return found, attended, state


def by_operations(steps: list[Step]) -> list[Step]:
    return [(index, False) for index, _ in steps]


some_steps = st.lists(st.tuples(st.lists(st.integers(0, 40), min_size=1, max_size=14), st.booleans()), max_size=9)


@settings(max_examples=25)
@given(some_steps)
def test_whoever_does_a_step_finds_what_was_written(steps: list[Step]) -> None:
    """Hypotheses are left out, repeated and exchanged, more of them and fewer, while who does the steps changes."""
    ready = of_many(prepare(untrained({})))
    ours, our_weights, _ = logits_of(ready, steps)
    theirs, their_weights, state = logits_of(ready, by_operations(steps))
    assert state.places is None
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(our_weights, their_weights, atol=1e-5, rtol=1e-4)


@every_kind
def test_caches_that_grow(kind: Any) -> None:
    """A beam of two for each source, whose hypotheses change places at every step and whose sources end."""
    beam = [source for source in range(9) for _ in range(2)]
    steps: list[Step] = [(beam, True)]
    for number in range(FIRST_ROOM + 3):
        left = 18 - 2 * (number // 6)
        steps.append(([place - place % 2 + (number + place) % 3 % 2 for place in range(left)], True))
    ready = of_many(prepare(untrained(kind)))
    ours, _, state = logits_of(ready, steps)
    theirs, _, _ = logits_of(ready, by_operations(steps))
    torch.testing.assert_close(ours, theirs, atol=5e-5, rtol=1e-3)
    assert state.places is not None
    assert 2 <= len(state.cache[0]) < 18, "only when the caches grew was something copied"


def test_what_was_written_is_not_moved() -> None:
    ready = of_many(prepare(untrained({})))
    _, _, state = logits_of(ready, [([*range(9)], True)] * 2)
    after = ready.reorder(state, torch.tensor([4, 4, 1]))
    assert [one.data_ptr() for one in after.cache] == [one.data_ptr() for one in state.cache]
    assert after.memory is state.memory
    assert after.places is not None
    assert after.places.tolist() == [[4, 4], [4, 4], [1, 1]]
    dense = in_rows_of_their_own(after)
    assert dense.places is None
    assert dense.memory.count == 3  # The sources have unlike numbers of hypotheses: each of these has a row.


def test_numbers_of_another_kind() -> None:
    """Compiled code reads them as int64."""
    ready = of_many(prepare(untrained({})))
    found = []
    for dtype in (torch.int64, torch.int32):
        _, _, state = logits_of(ready, [([*range(9)], True)])
        state = ready.reorder(state, torch.tensor([8, 2, 2, 5], dtype=dtype))
        found.append(ready.step(state, torch.full((4,), 30))[0])
    assert torch.equal(*found)


def test_a_long_sentence_leaves_the_others_behind() -> None:
    """A cache that grows has rows for those that go on, and the sources of these alone."""
    ready = of_many(prepare(untrained({})))
    _, _, state = logits_of(ready, [([*range(9)], True)] + [([4], True)] * FIRST_ROOM)
    assert [tuple(one.shape[:2]) for one in state.cache] == [(1, 2 * FIRST_ROOM)] * 2
    assert state.memory.count == 1


def test_a_trial_of_operations_is_not_of_their_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    copies: list[bool] = []

    def tried(_self: Choices, _kind: str, ways: dict[str, Any], x: Tensor) -> str:
        for _ in range(3):
            for way in ways.values():
                way()(x)
        return "compiled"

    ready = of_many(prepare(untrained({})))
    _, _, state = logits_of(ready, [([*range(9)], True)] * 2)
    monkeypatch.setattr(Choices, "fastest", tried)

    def noted(state: FixedState) -> FixedState:
        copies.append(state.places is None)
        return in_rows_of_their_own(state)

    monkeypatch.setattr("regard.models.inference.in_rows_of_their_own", noted)
    ready.step(ready.reorder(state, torch.tensor([3, 3])), torch.full((2,), 30))
    assert copies == [False, True, True, True], "it copies once, and finds the copy side by side each time"


def test_one_sentence_is_pointed_at_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.models.inference.FIRST_STEPS", 0)
    ready: FixedTransformer = prepare(untrained(KINDS["pre"]))
    state = ready.reorder(ready.start(SOURCES[:1], LENGTHS[:1]), torch.zeros(3, dtype=torch.long))
    assert state.compiled is not None
    _, _, state = ready.step(state, torch.full((3,), BOS))
    assert ready.reorder(state, torch.tensor([2, 2, 0])).places is not None
