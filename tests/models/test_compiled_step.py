"""The compiled step of a decoder, against the operations of torch and the model itself."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.compiled import thread_team, tile_code, vector_code
from regard.compiled.step_work import FULL, HALVES, MOST_ROWS, PAIRS, PRODUCT, STAGE, WORK
from regard.generation.beam import beam_search
from regard.generation.config import Beam
from regard.generation.greedy_search import greedy
from regard.mechanisms.rotary.rotary import Rotary
from regard.mechanisms.rotary.scalings import PositionInterpolation
from regard.mechanisms.scores.base import Dot
from regard.models import Transformer, TransformerConfig, compiled_layers, inference, step_parts
from regard.models.compiled_step import CompiledStep, LateStep
from regard.models.inference import FIRST_ROOM, FixedTransformer, prepare
from regard.storage import choices
from regard.storage.choices import Choices
from tests.models.test_inference import assert_same

VOCAB, BOS, EOS = 331, 1, 2
LIMITS: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS, "max_steps": FIRST_ROOM + 5, "alignments": True}
KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_position": "post", "embedding_gain": 3.0},
    "one key": {"num_kv_heads": 1},
    "two keys, learned": {"num_kv_heads": 2, "positions": "learned", "max_length": 40, "tied_output": False},
    "modern": {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "positions": "rotary"},
    "gelu": {"activation": "gelu", "norm_position": "post", "norm": "rms"},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
SOURCE, LENGTHS = torch.tensor([[7, 12, 45, 9, 30, 3, 17]]), torch.tensor([7])


def untrained(kind: dict[str, Any], **sizes: int) -> Transformer:
    """Large weights, so that answers differ. No size is a multiple of a vector's."""
    torch.manual_seed(0)
    chosen: Any = {"dim": 24, "num_heads": 4, "feed_forward_dim": 31, "encoder_layers": 2, "decoder_layers": 2} | sizes
    config = TransformerConfig(**chosen, **kind)
    model = Transformer(config, source_vocab_size=53, target_vocab_size=VOCAB).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.output.weight[EOS] *= 2
    return model


@pytest.fixture
def always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every sentence that can be is decoded by the compiled step."""
    monkeypatch.setattr(inference, "FIRST_STEPS", 0)
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])


def keep_matrices(kept: str, patch: pytest.MonkeyPatch) -> bool:
    """Let matrices of bfloat16 be kept as pairs or as halves, and say whether they are pairs."""
    if kept == "pairs" and not vector_code.HAS_PAIRS:
        pytest.skip("this processor does not multiply pairs of bfloat16 numbers")
    half = PAIRS if kept == "pairs" else HALVES
    patch.setattr(compiled_layers, "_kept", lambda weight: FULL if weight.dtype == torch.float32 else half)
    return kept == "pairs"


def assert_steps_agree(decoders: tuple[Any, Any], states: list[Any], tokens: Tensor) -> None:
    """Two decoders have the same logits and weights after each column of tokens."""
    with torch.no_grad():
        for column in tokens:
            (ours, attended, states[0]), (theirs, expected, states[1]) = (
                each.step(state, column) for each, state in zip(decoders, states, strict=True)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
            torch.testing.assert_close(attended.dense(), expected.dense(), rtol=0, atol=1e-5)


def run_stages(stages: Any, rows: int, threads: int) -> None:
    """Do stages of compiled code once."""
    from regard.compiled.step_loop import run

    work, counters = np.zeros(1, WORK), np.zeros(3, np.int64)
    at = counters.ctypes.data
    asked = {"counter": at, "done": at + 8, "finished": at + 16, "rows": rows, "count": len(stages), "steps": 1}
    for name, value in (asked | {"stages": stages.ctypes.data}).items():
        work[name] = value
    thread_team.run_in_threads(run, work.ctypes.data, threads)


def is_compiled(ready: FixedTransformer) -> bool:
    return ready.start(SOURCE, LENGTHS).compiled is not None


@every_kind
def test_searches_find_what_the_model_says(kind: Any, always: None) -> None:
    model = untrained(kind)
    ready = prepare(model)
    assert is_compiled(ready)
    assert_same(greedy(ready, SOURCE, LENGTHS, **LIMITS), greedy(model, SOURCE, LENGTHS, **LIMITS), 2e-5)
    for size in (2, 5, MOST_ROWS, MOST_ROWS + 1):
        beam = Beam(size, num_best=2)
        found, expected = (beam_search(each, SOURCE, LENGTHS, beam=beam, **LIMITS)[0] for each in (ready, model))
        assert_same(found, expected, 2e-5)


@every_kind
@pytest.mark.parametrize("rows", range(1, MOST_ROWS + 1))
def test_a_step_is_the_models(kind: Any, rows: int, always: None) -> None:
    model, tokens = untrained(kind), torch.randint(3, VOCAB, (4, rows))
    ready, states = prepare(model), []
    for each in (ready, model):
        state = each.start(SOURCE, LENGTHS)
        states.append(each.reorder(state, torch.zeros(rows, dtype=torch.long)))
    assert_steps_agree((ready, model), states, tokens)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("kind", ["pre", "modern"])
def test_the_default_dtype_is_not_that_of_the_step(kind: str, dtype: torch.dtype, always: None) -> None:
    """Compiled code takes addresses: buffers of another dtype would be read wrongly, and written beyond their end."""
    model = untrained(KINDS[kind])
    expected = greedy(model, SOURCE, LENGTHS, **LIMITS)
    torch.set_default_dtype(dtype)
    try:
        ready = prepare(model)
        assert is_compiled(ready)
        found = greedy(ready, SOURCE, LENGTHS, **LIMITS)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(found, expected, 2e-5)


@pytest.mark.parametrize("has_pairs", [False, True])
def test_matrices_in_bfloat16_are_rounded_once(has_pairs: bool, always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies pairs of bfloat16 numbers rounds the vectors too."""
    has_pairs = keep_matrices("pairs" if has_pairs else "halves", monkeypatch)
    model = untrained({})
    rounded = prepare(model, torch.bfloat16)
    with torch.no_grad():
        for name, parameter in model.decoder.named_parameters():
            if parameter.dim() > 1 and "cross_attention.in_weights" not in name:
                parameter.copy_(parameter.bfloat16())
        for layer in model.decoder:
            # Keys and values of the source are not the step's; they are taken from the prepared decoder below.
            projection: Any = layer.cross_attention
            projection.in_weights[0][:24].copy_(projection.in_weights[0][:24].bfloat16())
    exact = prepare(model)
    state = rounded.start(SOURCE, LENGTHS)
    other = exact.start(SOURCE, LENGTHS)
    other = type(other)(state.memory, other.owners, other.cache, 0, compiled=other.compiled)
    for token in (BOS, 30, 17):
        ours, _, state = rounded.step(state, torch.tensor([token]))
        theirs, _, other = exact.step(other, torch.tensor([token]))
        if has_pairs:
            torch.testing.assert_close(ours, theirs, atol=0.05 * float(theirs.abs().max()), rtol=0.0)
        else:
            assert torch.equal(ours, theirs)


@pytest.mark.parametrize("kept", ["float32", "halves", "pairs"])
@pytest.mark.parametrize(
    ("rows", "inputs", "outputs"), [(1, 1, 1), (4, 31, 64), (5, 32, 65), (6, 47, 130), (13, 96, 7)]
)
def test_a_product_is_that_of_what_is_kept(
    kept: str, rows: int, inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an odd number of inputs too, behind whose last stands what means nothing."""
    keep_matrices(kept, monkeypatch)
    weight = torch.randn(outputs, inputs, dtype=torch.float32 if kept == "float32" else torch.bfloat16)
    source, target = torch.full((rows, inputs + 3), torch.nan), torch.full((rows, outputs + 2), -7.0)
    source[:, :inputs] = torch.randn(rows, inputs)
    panels = compiled_layers._panels(weight)
    stage = np.zeros(1, STAGE)
    told = {
        "kind": PRODUCT, "source": source.data_ptr(), "source_stride": inputs + 3, "target": target.data_ptr(),
        "target_stride": outputs + 2, "inputs": inputs, "outputs": outputs, "weights": panels.data_ptr(),
        "kept": compiled_layers._kept(weight),
    }  # fmt: skip
    for name, value in told.items():
        stage[name] = value
    run_stages(stage, rows, threads=1)
    numbers = source[:, :inputs].bfloat16() if kept == "pairs" else source[:, :inputs]
    expected = numbers.double() @ weight.double().T
    torch.testing.assert_close(target[:, :outputs].double(), expected, atol=2e-5, rtol=1e-5)
    assert (target[:, outputs:] == -7.0).all()


def test_numba_may_be_told_another_processor() -> None:
    """It may not know pairs of bfloat16 numbers: LLVM would end the process."""
    told = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": ""}
    asked = "from regard.compiled import vector_code as code; print(code.IS_FOR_HOST, code.HAS_PAIRS)"
    done = subprocess.run([sys.executable, "-c", asked], env={**os.environ, **told}, capture_output=True, text=True)
    assert (done.stdout, done.returncode) == ("False False\n", 0), done.stderr
    assert vector_code.IS_FOR_HOST


def test_threads_share_a_step_and_change_no_bit(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    ready = prepare(untrained({}, dim=64, feed_forward_dim=300))
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [greedy(ready, SOURCE, LENGTHS, **LIMITS)[0] for _ in range(3)]
        monkeypatch.setattr(thread_team, "openmp", lambda: None)
        found.append(greedy(ready, SOURCE, LENGTHS, **LIMITS)[0])
    finally:
        torch.set_num_threads(before)
    assert all(one.score == found[0].score and one.tokens == found[0].tokens for one in found)


def test_a_thread_that_comes_alone_does_all(always: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenMP may give fewer threads than were asked for."""
    ready = prepare(untrained({}))
    together = greedy(ready, SOURCE, LENGTHS, **LIMITS)

    def alone(function: Any, argument: int, _threads: int) -> None:
        thread_team.run_in_threads(function, argument, 1)

    monkeypatch.setattr(compiled_layers, "run_in_threads", alone)
    assert_same(greedy(ready, SOURCE, LENGTHS, **LIMITS), together, 0.0)


def test_sentences_of_several_threads_do_not_mix(always: None) -> None:
    ready = prepare(untrained({}, dim=64))
    sources = [torch.randint(3, 53, (1, 7), generator=torch.Generator().manual_seed(n)) for n in range(4)]
    expected = [greedy(ready, source, LENGTHS, **LIMITS)[0] for source in sources]
    found: dict[int, Any] = {}

    def decode(n: int) -> None:
        for _ in range(5):
            found[n] = greedy(ready, sources[n], LENGTHS, **LIMITS)[0]

    threads = [threading.Thread(target=decode, args=(n,)) for n in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert_same([found[n] for n in range(4)], expected, 0.0)


def test_nan_stays_nan(always: None) -> None:
    model = untrained({})
    with torch.no_grad():
        model.decoder[0].feed_forward.up.bias[3] = torch.nan
    ready = prepare(model)
    assert ready.step(ready.start(SOURCE, LENGTHS), torch.tensor([BOS]))[0].isnan().all()


def test_several_sentences_and_padded_ones_go_by_operations(always: None) -> None:
    ready = prepare(untrained({}))
    assert ready.start(SOURCE.expand(2, -1), LENGTHS.expand(2)).compiled is None
    assert ready.start(SOURCE, torch.tensor([5])).compiled is None
    assert is_compiled(ready)


def test_a_sentence_is_decoded_in_one_way_to_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])
    monkeypatch.setattr(inference, "FIRST_STEPS", 10)
    ready, ways = prepare(untrained({})), []
    for _ in range(3):
        state = ready.start(SOURCE, LENGTHS)
        for _ in range(8):
            _, _, state = ready.step(state, torch.tensor([BOS]))
            ways.append(state.compiled is not None)
    assert ways == [False] * 16 + [True] * 8


def test_what_was_slower_here_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def first(_self: Choices, kind: str, ways: dict[str, Any], x: Tensor) -> str:
        asked.append(kind)
        assert [way()(x).shape for way in ways.values()] == [(1, VOCAB)] * 2
        return "operations"

    monkeypatch.setattr(inference, "FIRST_STEPS", 0)
    ready = prepare(untrained({}))
    monkeypatch.setattr(Choices, "fastest", first)
    assert [is_compiled(ready), is_compiled(ready)] == [False, False]
    threads, tiles = torch.get_num_threads(), ", in tiles" if tile_code.HAS_TILES else ""
    assert asked == [f"step of 6 sublayers, 24 x 31, 331 outputs, float32{tiles}, threads: {threads}"]


def test_with_nothing_measured_all_goes_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(choices.FOLDER, choices.OFF)
    monkeypatch.setattr(inference, "FIRST_STEPS", 0)
    choices.choices.cache_clear()
    try:
        assert not is_compiled(prepare(untrained({})))
    finally:
        choices.choices.cache_clear()


def test_other_parts_go_by_operations(always: None) -> None:
    changes: list[Callable[[Any], None]] = [
        lambda layer: setattr(layer.feed_forward, "activation", nn.functional.tanh),
        lambda layer: setattr(layer.residuals[1], "norm", nn.Identity()),
        lambda layer: setattr(layer.self_attention, "rotary", Rotary(6, scaling=PositionInterpolation(2.0))),
        lambda layer: setattr(layer.self_attention, "rotary", Rotary(6)),  # in one layer alone
        lambda layer: setattr(layer.self_attention, "score", Dot()),
    ]
    for change in changes:
        model = untrained({})
        assert step_parts.step_parts(model, torch.float32) is not None
        change(model.decoder[0])
        assert (step_parts.step_parts(model, torch.float32) is None) == (change is not changes[-1])


def test_other_numbers_sizes_and_installations_go_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    model = untrained({})
    assert step_parts.step_parts(model, torch.float32) is not None
    assert step_parts.step_parts(model, torch.float16) is None
    assert step_parts.step_parts(untrained({}).double(), torch.float64) is None
    with monkeypatch.context() as patch:
        patch.setattr(step_parts, "MOST_BYTES", 1000)
        assert step_parts.step_parts(model, torch.float32) is None
    monkeypatch.setattr(step_parts, "is_installed", lambda: False)
    assert step_parts.step_parts(model, torch.float32) is None
    assert LateStep(lambda: None, 0, 8).chosen(lambda _way, tokens: tokens) is None


def test_what_is_done_to_the_model_later_does_not_show(always: None) -> None:
    model = untrained({})
    ready = prepare(model)
    with torch.no_grad():
        expected = model.step(model.start(SOURCE, LENGTHS), torch.tensor([BOS]))[0].clone()
        for parameter in nn.ModuleList([*model.decoder, model.output]).parameters():
            parameter.zero_()
    found = ready.step(ready.start(SOURCE, LENGTHS), torch.tensor([BOS]))[0]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=2e-5)
    assert isinstance(ready.start(SOURCE, LENGTHS).compiled, CompiledStep)
