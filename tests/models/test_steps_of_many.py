"""The compiled step of many sentences at once, against the operations of torch and the model itself."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.backends import short_sequences
from regard.compiled import tile_code
from regard.compiled.step_work import MOST_OF_MANY, TILE_ROWS
from regard.generation.beam import beam_search
from regard.generation.config import Beam
from regard.generation.greedy_search import greedy
from regard.models import compiled_layers, compiled_tiles, inference
from regard.models.compiled_step import CompiledStep
from regard.models.ensemble import EnsembleDecoder
from regard.models.inference import FIRST_ROOM, ManySentences, of_many, prepare
from regard.storage.choices import Choices
from regard.tasks.translation import search_job
from regard.tasks.translation.search_job import SearchJob, search
from tests.models.test_compiled_step import BOS, EOS, LIMITS, VOCAB, assert_steps_agree, every_kind, untrained
from tests.models.test_inference import assert_same

LENGTHS = torch.tensor([7, 1, 4, 6, 2, 7, 7, 5, 3])
SOURCES = torch.randint(3, 53, (9, 7), generator=torch.Generator().manual_seed(3))


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every step that can be is the compiled one."""
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The rows of each compiled step."""
    found: list[int] = []
    real = CompiledStep.__call__

    def noted(self: CompiledStep, x: Tensor, *arguments: Any) -> tuple[Tensor, Tensor]:
        found.append(len(x))
        return real(self, x, *arguments)

    monkeypatch.setattr(CompiledStep, "__call__", noted)
    return found


@every_kind
@pytest.mark.parametrize("size", [1, 2, 5])
def test_searches_find_what_the_model_says(kind: Any, size: int, rows: list[int]) -> None:
    """Sentences of unlike lengths, which end after unlike numbers of steps."""
    model = untrained(kind)
    ready = of_many(prepare(model))
    if size == 1:
        found, expected = (greedy(each, SOURCES, LENGTHS, **LIMITS) for each in (ready, model))
    else:
        beam = Beam(size)
        both = (beam_search(each, SOURCES, LENGTHS, beam=beam, **LIMITS) for each in (ready, model))
        found, expected = ([best[0] for best in each] for each in both)
    assert_same(found, expected, 2e-5)
    assert rows[0] == 9
    assert size == 1 or rows[1] == 9 * size
    assert len(rows) >= max(len(one.tokens) for one in found)


def test_sources_without_padding() -> None:
    model = untrained({})
    ready, full = of_many(prepare(model)), torch.full((9,), 7)
    assert_same(greedy(ready, SOURCES, full, **LIMITS), greedy(model, SOURCES, full, **LIMITS), 2e-5)


def test_matrices_in_bfloat16_are_those_of_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "FIRST_STEPS", 0)
    ready = prepare(untrained({}), torch.bfloat16)
    source, length = SOURCES[:1], LENGTHS[:1]
    state = ready.start(source, length)
    many = replace(state, compiled=None, late=ready.of_many().start(source, length).late)
    for token in (BOS, 30, 17):
        ours, _, state = ready.step(state, torch.tensor([token]))
        theirs, _, many = ready.step(many, torch.tensor([token]))
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("repeats", [1, 7])
def test_the_bits_of_a_row_depend_on_no_other_row(repeats: int, threads: int) -> None:
    """But on whether there are so many that they are multiplied as tiles."""
    before = torch.get_num_threads()
    ready = of_many(prepare(untrained({}, dim=64, feed_forward_dim=300)))
    count = 9 * repeats
    tokens, some = torch.arange(count) + 4, torch.randperm(count)[: max(2, count // 2)]
    assert (len(some) >= TILE_ROWS) == (count >= TILE_ROWS)
    try:
        torch.set_num_threads(threads)
        start = ready.reorder(ready.start(SOURCES, LENGTHS), torch.arange(9).repeat_interleave(repeats))
        whole, _, _ = ready.step(start, tokens)
        torch.set_num_threads(1)
        for index in (some, some.flip(0)):
            assert torch.equal(ready.step(ready.reorder(start, index), tokens[index])[0], whole[index])
    finally:
        torch.set_num_threads(before)


@every_kind
@pytest.mark.parametrize("count", [TILE_ROWS, 3 * TILE_ROWS + 1])
def test_many_rows_are_the_models(kind: Any, count: int, rows: list[int]) -> None:
    model, states, tokens = untrained(kind), [], torch.randint(3, VOCAB, (4, count))
    ready = of_many(prepare(model))
    for each in (ready, model):
        states.append(each.reorder(each.start(SOURCES, LENGTHS), torch.arange(count) % 9))
    assert_steps_agree((ready, model), states, tokens)
    assert rows == [count] * 4


@pytest.mark.skipif(not tile_code.HAS_TILES, reason="this processor, or this process, multiplies no tiles")
def test_tiles_of_bfloat16_are_what_pairs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokens = untrained({}, dim=64, feed_forward_dim=300), torch.arange(18) + 4
    found = []
    for there in (True, False):
        monkeypatch.setattr(compiled_layers, "has_tiles", lambda _rows, there=there: there)
        monkeypatch.setattr(compiled_tiles, "has_tiles", lambda _rows, there=there: there)
        ready = of_many(prepare(model, torch.bfloat16))
        found.append(ready.step(ready.reorder(ready.start(SOURCES, LENGTHS), torch.arange(18) % 9), tokens)[0])
    assert not torch.equal(*found)
    torch.testing.assert_close(*found, atol=2e-2 * float(found[0].abs().max()), rtol=0)


def test_the_number_of_rows_decides(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    """Each kind is asked once, whatever was decoded before, and a step that is slower here is not taken."""
    asked: list[str] = []

    def small_ones(_self: Choices, kind: str, ways: dict[str, Any], x: Tensor) -> str:
        asked.append(kind.split(" of 6 ")[0])
        assert [way()(x).shape for way in ways.values()] == [(len(x), VOCAB)] * 2
        return "compiled" if len(x) <= 4 else "operations"

    ready = of_many(prepare(untrained({})))
    monkeypatch.setattr(Choices, "fastest", small_ones)
    state = ready.start(SOURCES, LENGTHS)
    for count in (9, 8, 5, 4, 3, 2, 1):
        state = ready.reorder(state, torch.arange(count))
        rows.clear()
        ready.step(state, torch.full((count,), BOS))
        ready.step(state, torch.full((count,), BOS))
        trials = 1 if count in (9, 8, 4, 2, 1) else 0
        assert rows == [count] * (trials + (2 if count <= 4 else 0)), count
    assert asked == [f"step of up to {n} rows of many sentences" for n in (16, 8, 4, 2, 1)]


def test_a_trial_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """It writes into the caches, at a position that the real step writes anew."""

    def tried(_self: Choices, _kind: str, ways: dict[str, Any], x: Tensor) -> str:
        for way in ways.values():
            way()(x)
        return "operations"

    model, tokens = untrained({}), torch.randint(4, VOCAB, (FIRST_ROOM + 2, 9))
    found: list[Tensor] = []
    made = [of_many(prepare(model)) for _ in range(2)]
    for ready, fastest in zip(made, (tried, lambda *_: "operations"), strict=True):
        monkeypatch.setattr(Choices, "fastest", fastest)
        state = ready.start(SOURCES, LENGTHS)
        for step, column in enumerate(tokens):
            count = 9 - step % 3
            state = ready.reorder(state, torch.arange(state.count)[:count])
            logits, _, state = ready.step(state, column[: state.count])
        found.append(logits)
    assert torch.equal(*found)


def test_whoever_looks_at_operations_sees_them(rows: list[int]) -> None:
    class Looking(TorchDispatchMode):
        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return function(*args, **(kwargs or {}))

    ready = of_many(prepare(untrained({})))
    before = ready.start(SOURCES, LENGTHS)
    with Looking():
        ready.step(ready.start(SOURCES, LENGTHS), torch.full((9,), BOS))
        ready.step(before, torch.full((9,), BOS))
    assert not rows
    ready.step(ready.start(SOURCES, LENGTHS), torch.full((9,), BOS))
    assert rows == [9]


def test_under_autocast_all_goes_by_operations(rows: list[int]) -> None:
    """Keys of half precision would be read as float32."""
    model = untrained({})
    ready = of_many(prepare(model))
    with torch.autocast("cpu", torch.bfloat16):
        state = ready.start(SOURCES, LENGTHS)
        _, _, state = ready.step(state, torch.full((9,), BOS))
        logits, _, _ = ready.step(state, torch.full((9,), 30))
    assert not rows
    expected = prepare(model)
    _, _, state = expected.step(expected.start(SOURCES, LENGTHS), torch.full((9,), BOS))
    right, _, _ = expected.step(state, torch.full((9,), 30))
    assert (logits.float() - right).abs().max() < 0.1 * right.abs().max()


def test_a_step_that_was_made_in_inference_mode_goes_on_outside_of_it(rows: list[int]) -> None:
    ready = of_many(prepare(untrained({})))
    with torch.inference_mode():
        inside = greedy(ready, SOURCES, LENGTHS, **LIMITS)
    outside = greedy(ready, SOURCES, LENGTHS, **LIMITS)
    assert rows
    assert [one.tokens for one in inside] == [one.tokens for one in outside]


def test_where_nothing_is_measured_torch_reads_the_sources(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("REGARD_CACHE", "off")
    monkeypatch.setattr(short_sequences, "_run", lambda *_given, **_more: pytest.fail("compiled code has read"))
    ready = of_many(prepare(untrained({}, dim=64)))
    ready.start(torch.randint(3, 53, (300, 7)), torch.full((300,), 7))


def test_sources_without_tokens_and_too_many_rows_go_by_operations(rows: list[int]) -> None:
    ready = of_many(prepare(untrained({})))
    ready.step(ready.start(SOURCES, LENGTHS - 1), torch.full((9,), BOS))
    state = ready.reorder(ready.start(SOURCES[:1], LENGTHS[:1]), torch.zeros(MOST_OF_MANY + 1, dtype=torch.long))
    ready.step(state, torch.full((MOST_OF_MANY + 1,), BOS))
    assert not rows
    ready.step(ready.reorder(state, torch.arange(MOST_OF_MANY)), torch.full((MOST_OF_MANY,), BOS))
    assert rows == [MOST_OF_MANY]


@pytest.mark.parametrize("kv_heads", [4, 2])
def test_many_short_sources_are_read_by_the_kernel_for_them(kv_heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    taken: list[int] = []
    real = short_sequences._run
    monkeypatch.delenv("REGARD_CACHE")  # Tests measure nothing, and compute alike.
    monkeypatch.setattr(
        short_sequences, "_run", lambda *given, **more: taken.append(len(more["query"])) or real(*given, **more)
    )
    model = untrained({"num_kv_heads": kv_heads}, dim=64)
    ready = prepare(model)
    generator = torch.Generator().manual_seed(5)
    source = torch.randint(3, 53, (300, 7), generator=generator)
    lengths = torch.randint(1, 8, (300,), generator=generator)
    found = of_many(ready).start(source, lengths).memory
    assert taken == [300] * 2
    expected = ready.start(source, lengths).memory
    assert taken == [300] * 2, "the others are read by the operations of torch"
    real_tokens = torch.arange(7) < lengths[:, None]
    for ours, theirs in zip((*found.key, *found.value), (*expected.key, *expected.value), strict=True):
        each = [one.transpose(1, 2)[real_tokens] for one in (ours, theirs)]
        torch.testing.assert_close(*each, atol=2e-5, rtol=1e-4)


def test_decoders_of_other_kinds_stay_as_they_are() -> None:
    model = untrained({})
    assert of_many(model) is model
    both = of_many(EnsembleDecoder([prepare(model), model]))
    assert [type(member) for member in both.members] == [ManySentences, type(model)]
    found, expected = (greedy(each, SOURCES, LENGTHS, **LIMITS) for each in (both, model))
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_a_job_says_among_how_many_it_is(monkeypatch: pytest.MonkeyPatch, rows: list[int]) -> None:
    ready = prepare(untrained({}))
    sources = [row[:length].tolist() for row, length in zip(SOURCES, LENGTHS, strict=True)]
    found = []
    for among in (1, search_job.MANY - 1, search_job.MANY):
        rows.clear()
        job = SearchJob(sources=sources, begin_id=BOS, end_id=EOS, max_steps=9, among=among)
        found.append([best[0].tokens for best in search(ready, job)])
        assert bool(rows) == (among == search_job.MANY)
    assert found[0] == found[1] == found[2]
