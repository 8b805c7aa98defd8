"""A sentence read by compiled code, against the operations of torch and the model itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

from regard.compiled import thread_team, tile_code
from regard.generation.greedy_search import greedy
from regard.mechanisms.rotary.rotary import Rotary
from regard.models import compiled_layers, inference, step_parts
from regard.models.compiled_encoder import MOST_TOKENS, CompiledEncoder, LateEncoder
from regard.models.inference import FixedTransformer, prepare
from regard.models.step_parts import encoder_parts
from regard.storage.choices import Choices
from tests.models.test_compiled_step import KINDS, LENGTHS, LIMITS, SOURCE, keep_matrices, untrained
from tests.models.test_inference import assert_same

UNTURNED = {name: kind for name, kind in KINDS.items() if kind.get("positions") != "rotary"}
every_kind = pytest.mark.parametrize("kind", UNTURNED.values(), ids=UNTURNED)


def compiled(model: Any, dtype: torch.dtype = torch.float32) -> CompiledEncoder:
    parts = encoder_parts(model, dtype)
    assert parts is not None
    return CompiledEncoder(parts)


def by_operations(model: Any, x: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    with torch.no_grad():
        return FixedTransformer(model, dtype)._read(x, None)


def sentence(length: int, dim: int = 24) -> Tensor:
    return torch.randn(1, length, dim, generator=torch.Generator().manual_seed(length))


@every_kind
def test_it_reads_what_the_operations_read(kind: Any) -> None:
    model = untrained(kind)
    reader = compiled(model)
    # Shorter sentences follow longer ones, of which nothing may be left.
    for length in (MOST_TOKENS, 40, 17, 16, 7, 5, 1):
        x = sentence(length)
        expected = by_operations(model, x)
        torch.testing.assert_close(reader(x), expected, rtol=1e-4, atol=2e-5 * float(expected.abs().max()))


def test_a_gated_network_is_read_too() -> None:
    model = untrained({"activation": "swiglu", "norm": "rms", "num_kv_heads": 1})
    x = sentence(9)
    torch.testing.assert_close(compiled(model)(x), by_operations(model, x), rtol=1e-4, atol=1e-4)


@every_kind
def test_translations_are_the_models(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    call = CompiledEncoder.__call__
    monkeypatch.setattr(inference, "FIRST_STEPS", 0)
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])
    monkeypatch.setattr(CompiledEncoder, "__call__", lambda self, x: read.append(x.shape[1]) or call(self, x))
    model = untrained(kind)
    ready = prepare(model)
    expected = greedy(model, SOURCE, LENGTHS, **LIMITS)
    for times in (1, 2):
        assert_same(greedy(ready, SOURCE, LENGTHS, **LIMITS), expected, 2e-5)
        assert read == [7] * times
    two = greedy(ready, SOURCE.expand(2, -1), torch.tensor([7, 5]), **LIMITS)
    assert_same(two, greedy(model, SOURCE.expand(2, -1), torch.tensor([7, 5]), **LIMITS), 2e-5)
    padded = greedy(ready, SOURCE, torch.tensor([5]), **LIMITS)
    assert_same(padded, greedy(model, SOURCE, torch.tensor([5]), **LIMITS), 2e-5)
    assert read == [7, 7], "several sentences, and one with padding, go by operations"


@pytest.mark.parametrize("has_pairs", [False, True])
def test_matrices_in_bfloat16_are_rounded_once(has_pairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor that multiplies pairs of bfloat16 numbers rounds the vectors too."""
    has_pairs = keep_matrices("pairs" if has_pairs else "halves", monkeypatch)
    model, x = untrained({}), sentence(11)
    half = compiled(model, torch.bfloat16)(x)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() > 1 and ("encoder." in name or "cross_attention.in_weights" in name):
                parameter.copy_(parameter.bfloat16())
    exact = compiled(model)(x)
    if has_pairs:
        torch.testing.assert_close(half, exact, atol=0.02 * float(exact.abs().max()), rtol=0.0)
    else:
        assert torch.equal(half, exact)


def test_threads_share_a_sentence_and_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    reader, x = compiled(untrained({}, dim=64, feed_forward_dim=300)), sentence(33, 64)
    before, found = torch.get_num_threads(), []
    try:
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            found += [reader(x) for _ in range(5)]
        monkeypatch.setattr(thread_team, "openmp", lambda: None)
        found.append(reader(x))
    finally:
        torch.set_num_threads(before)
    monkeypatch.setattr(compiled_layers, "run_in_threads", lambda f, a, _: thread_team.run_in_threads(f, a, 1))
    found.append(reader(x))
    assert all(torch.equal(one, found[0]) for one in found)


def test_nan_reaches_every_token() -> None:
    x = sentence(6)
    x[0, 4, 3] = torch.nan
    assert compiled(untrained({}))(x).isnan().all()


def test_what_is_done_to_the_model_later_does_not_show() -> None:
    model, x = untrained({}), sentence(6)
    reader = compiled(model)
    expected = reader(x)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert torch.equal(reader(x), expected)


def operations(x: Tensor) -> Tensor:
    return x.expand(1, -1, x.shape[-1])


def test_longer_sentences_and_whoever_looks_on_get_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])
    late = LateEncoder(encoder_parts(untrained({}), torch.float32))
    assert isinstance(late.chosen(MOST_TOKENS, operations), CompiledEncoder)
    assert late.chosen(MOST_TOKENS + 1, operations) is operations
    with TorchDispatchMode():
        assert late.chosen(5, operations) is operations
    assert LateEncoder(None).chosen(5, operations) is operations


def test_each_kind_of_length_is_measured_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(_self: Choices, kind: str, ways: dict[str, Any], x: Tensor) -> str:
        asked.append(kind)
        assert [way()(x).shape[:2] for way in ways.values()] == [(1, x.shape[1])] * 2
        return "compiled" if x.shape[1] < 32 else "operations"

    monkeypatch.setattr(Choices, "fastest", measured)
    late = LateEncoder(encoder_parts(untrained({}), torch.float32))
    found = [late.chosen(length, operations) is operations for length in (1, 16, 3, 17, 32, 20, 33, 128)]
    assert found == [False, False, False, True, True, True, True, True]
    threads, tiles = torch.get_num_threads(), ", in tiles" if tile_code.HAS_TILES else ""
    lengths = [16, 32, 64, 128]
    assert asked == [
        f"reading {n} tokens, 4 sublayers, 24 x 31, 96 outputs, float32{tiles}, threads: {threads}" for n in lengths
    ]


def test_other_parts_go_by_operations(monkeypatch: pytest.MonkeyPatch) -> None:
    def turned(model: Any) -> None:
        for layer in model.encoder:
            layer.self_attention.rotary = Rotary(6)

    changes: list[Any] = [
        turned,
        lambda model: setattr(model.encoder[0].feed_forward, "activation", nn.functional.tanh),
        lambda model: setattr(model.encoder[1].residuals[1], "norm", nn.Identity()),
        lambda model: setattr(model.decoder[0].residuals[1], "norm", nn.Identity()),
    ]
    for change in changes:
        model = untrained({})
        assert encoder_parts(model, torch.float32) is not None
        change(model)
        assert encoder_parts(model, torch.float32) is None
    assert encoder_parts(untrained({}), torch.float16) is None
    monkeypatch.setattr(step_parts, "is_installed", lambda: False)
    assert encoder_parts(untrained({}), torch.float32) is None
