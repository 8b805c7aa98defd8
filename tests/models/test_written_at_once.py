"""Greedy search for one sentence by one call of compiled code, against the same search step by step."""

import threading
from typing import Any

import numpy as np
import pytest
import torch

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.compiled import thread_team
from regard.errors import ArgumentError
from regard.generation.filters import Vocabulary
from regard.generation.greedy_search import greedy
from regard.generation.protocol import Hypothesis
from regard.models import compiled_layers, inference
from regard.models.compiled_step import CompiledStep
from regard.models.inference import FIRST_ROOM, FixedTransformer, ManySentences, prepare
from regard.nn.linear import Linear
from tests.models.test_compiled_step import BOS, KINDS, LENGTHS, SOURCE, VOCAB, always, untrained

__all__ = ["always"]
ENDLESS = VOCAB + 7
"""An end mark that no step finds."""
TURNED = [name for name, kind in KINDS.items() if kind.get("positions") == "rotary"]


def search(ready: Any, most: int, end: int = ENDLESS, source: Any = SOURCE, *, steps: bool = False) -> Hypothesis:
    """The search; with `steps` step by step, as alignments need it."""
    (found,) = greedy(ready, source, LENGTHS, bos_id=BOS, eos_id=end, max_steps=most, alignments=steps)
    return found


def assert_equal(found: Hypothesis, expected: Hypothesis) -> None:
    assert found.tokens == expected.tokens
    assert found.score == expected.score or expected.score != expected.score


def is_written(ready: Any, **given: Any) -> bool:
    """Whether `greedy` takes no step of the decoder."""
    asked: dict[str, Any] = {"bos_id": BOS, "eos_id": ENDLESS, "max_steps": 3} | given
    taken: list[Any] = []
    step = FixedTransformer.step

    def counted(self: Any, *rest: Any) -> Any:
        taken.append(1)
        return step(self, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FixedTransformer, "step", counted)
        greedy(ready, SOURCE, LENGTHS, **asked)
    return not taken


@pytest.mark.parametrize("name", [name for name in KINDS if name not in TURNED])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_it_is_the_search_step_by_step(name: str, dtype: torch.dtype, always: None) -> None:
    """Also where the cache grows in between, and where the text ends: at every length that it has."""
    ready = prepare(untrained(KINDS[name]), dtype)
    assert is_written(ready)
    longest = 40 if "max_length" in KINDS[name] else 2 * FIRST_ROOM + 3
    whole = search(ready, longest, steps=True)
    for most in (1, 2, FIRST_ROOM, FIRST_ROOM + 1, longest):
        assert_equal(search(ready, most), search(ready, most, steps=True))
    for end in {*whole.tokens, ENDLESS}:
        found, expected = search(ready, longest, end), search(ready, longest, end, steps=True)
        assert_equal(found, expected)
        assert (end in found.tokens) == (found.tokens[-1] == end)


def test_threads_share_a_text_and_change_no_bit(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(untrained({}, dim=64, feed_forward_dim=300))
    expected = search(ready, 50, steps=True)
    end, before = expected.tokens[17], torch.get_num_threads()
    ended = search(ready, 50, end, steps=True)
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            for _ in range(5):
                assert_equal(search(ready, 50), expected)
                assert_equal(search(ready, 50, end), ended)
        monkeypatch.setattr(thread_team, "openmp", lambda: None)
        assert_equal(search(ready, 50, end), ended)
    finally:
        torch.set_num_threads(before)


def test_a_thread_that_comes_alone_does_all(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(untrained({}))
    expected = search(ready, 20, steps=True)

    def alone(function: Any, argument: int, _threads: int) -> None:
        thread_team.run_in_threads(function, argument, 1)

    monkeypatch.setattr(compiled_layers, "run_in_threads", alone)
    assert_equal(search(ready, 20), expected)


def test_texts_of_several_threads_do_not_mix(always: None) -> None:
    ready = prepare(untrained({}, dim=64))
    sources = [torch.randint(3, 53, (1, 7), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    expected = [search(ready, 40, source=source, steps=True) for source in sources]
    found: dict[int, Hypothesis] = {}

    def write(n: int) -> None:
        for round_ in range(6):
            found[n] = search(ready, 40, source=sources[n], steps=n == 3 and round_ < 5)

    threads = [threading.Thread(target=write, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for n in range(4):
        assert_equal(found[n], expected[n])


def test_what_is_not_finite_is_as_the_steps_have_it(always: None) -> None:
    model = untrained({})
    with torch.no_grad():
        model.decoder[0].feed_forward.up.bias[3] = torch.nan
    ready = prepare(model)
    found = search(ready, 4)
    assert_equal(found, search(ready, 4, steps=True))
    assert found.score != found.score


def test_the_first_token_may_be_a_tensor(always: None) -> None:
    ready = prepare(untrained({}))
    (found,) = greedy(ready, SOURCE, LENGTHS, bos_id=torch.tensor([BOS]), eos_id=ENDLESS, max_steps=9)
    assert_equal(found, search(ready, 9, steps=True))


def test_who_is_left_to_the_steps(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(untrained({}))
    assert is_written(ready)
    assert not is_written(ready, alignments=True)
    assert not is_written(ready, constraints=[Vocabulary.of([3, 4, 5], VOCAB)])
    for name in TURNED:
        assert not is_written(prepare(untrained(KINDS[name])))
    assert not is_written(ManySentences(ready, ready._late_step))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert not is_written(ready)
    state = ready.start(SOURCE.expand(2, -1), LENGTHS.expand(2))
    assert ready.write_greedily(state, torch.tensor([BOS]), ENDLESS, 3) is None
    assert ready.write_greedily(ready.start(SOURCE, LENGTHS - 1), torch.tensor([BOS]), ENDLESS, 3) is None
    monkeypatch.setattr(inference, "FIRST_STEPS", 1000)
    assert not is_written(prepare(untrained({})))


def test_vectors_that_need_more_than_a_sum_are_left_to_the_steps(always: None) -> None:
    ready = prepare(untrained({}))
    ready._target._is_sum = False
    assert not is_written(ready)
    half = prepare(untrained({}).bfloat16(), torch.bfloat16)
    assert half._target.table is None


def test_an_interruption_leaves_the_next_step_as_it_was(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(untrained({}))
    expected = search(ready, 6, steps=True)

    def interrupted(*given: Any) -> None:
        thread_team.run_in_threads(*given)
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(compiled_layers, "run_in_threads", interrupted)
        with pytest.raises(KeyboardInterrupt):
            search(ready, 6)
    assert_equal(search(ready, 6, steps=True), expected)
    assert_equal(search(ready, 6), expected)


def test_steps_count_as_those_of_single_sentences(always: None) -> None:
    ready = prepare(untrained({}))
    before = ready._late_step.count
    search(ready, 7)
    assert ready._late_step.count == before + 7


def test_a_text_that_ends_before_the_last_position(always: None) -> None:
    """More tokens may be asked for than there are positions: only one that is needed is missed."""
    ready = prepare(untrained({"positions": "learned", "max_length": FIRST_ROOM - 5}))
    end = search(ready, 9, steps=True).tokens[8]
    assert_equal(search(ready, 100, end), search(ready, 100, end, steps=True))
    for steps in (True, False):
        with pytest.raises(ArgumentError, match="learned positions serve up to"):
            search(ready, 100, steps=steps)


def test_no_call_takes_more_steps_than_others_can_wait_for(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []
    write = CompiledStep.write

    def spied(self: Any, *given: Any, positions: Any, **more: Any) -> Any:
        asked.append(len(positions))
        return write(self, *given, positions=positions, **more)

    monkeypatch.setattr(CompiledStep, "write", spied)
    ready = prepare(untrained({}))
    assert_equal(search(ready, 300), search(ready, 300, steps=True))
    assert sum(asked) == 300
    assert max(asked) == inference.STEPS_OF_A_CALL


def test_more_logits_than_tokens_are_left_to_the_steps(always: None) -> None:
    model = untrained({"tied_output": False})
    model.output = Linear(24, VOCAB + 1000)
    assert not is_written(prepare(model), max_steps=1)


def test_steps_of_somebody_else_are_taken(always: None) -> None:
    ready = prepare(untrained({}))

    class Other(FixedTransformer):
        def step(self, state: Any, tokens: Any) -> Any:
            logits, alignment, state = super().step(state, tokens)
            return -logits, alignment, state

    class Around:
        def __getattr__(self, name: str) -> Any:
            return getattr(ready, name)

        def step(self, state: Any, tokens: Any) -> Any:
            logits, alignment, state = ready.step(state, tokens)
            return -logits, alignment, state

    assert_equal(search(Around(), 9), search(Around(), 9, steps=True))
    expected = search(Around(), 9)
    ready.__class__ = Other
    assert_equal(search(ready, 9), expected)


def test_the_sum_is_in_the_default_dtype(always: None) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        ready = prepare(untrained({}).float())
        assert is_written(ready)
        assert_equal(search(ready, 40), search(ready, 40, steps=True))
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("end", [None, np.int64(ENDLESS)])
def test_other_end_marks_are_left_to_the_steps(end: Any, always: None) -> None:
    ready = prepare(untrained({}))
    assert_equal(search(ready, 5, end), search(ready, 5, steps=True))
