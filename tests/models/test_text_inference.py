"""A language model made ready to decode, against the model itself."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytest.importorskip("numba", reason="numba is not installed (the extra `fast`)")

import regard
from regard.compiled.step_work import MOST_ROWS
from regard.generation.greedy_search import greedy
from regard.mechanisms.rotary.layouts import Interleaved
from regard.mechanisms.rotary.rotary import Rotary
from regard.models import DecoderOnly, DecoderOnlyConfig, text_inference
from regard.models.inference import prepare
from regard.models.text_inference import FIRST_ROOM, FixedDecoderOnly
from regard.storage.choices import Choices

VOCAB = 97
KINDS: dict[str, dict[str, Any]] = {
    "sinusoidal": {},
    "post, learned": {"norm_position": "post", "positions": "learned", "max_length": 90, "activation": "gelu"},
    "rotary": {"positions": "rotary", "tied_output": False},
    "Llama": {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "positions": "rotary"},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def untrained(kind: dict[str, Any]) -> DecoderOnly:
    torch.manual_seed(0)
    config = DecoderOnlyConfig(dim=24, num_heads=4, num_layers=2, feed_forward_dim=31, **kind)
    model = DecoderOnly(config, vocab_size=VOCAB).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.add_(0.2 * torch.randn_like(parameter))
    return model


@pytest.fixture(autouse=True)
def _always(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every text that can be goes on by the compiled step."""
    monkeypatch.setattr(text_inference, "FIRST_STEPS", 0)
    monkeypatch.setattr(Choices, "fastest", lambda _self, _kind, ways, _x: [*ways][-1])


def assert_same_steps(model: DecoderOnly, ready: Any, texts: Tensor, steps: int, *, compiled: bool = True) -> None:
    """The same logits, step after step; all but the last token are the prompt."""
    lengths = torch.full((len(texts),), texts.shape[1] - 1)
    states, tokens = [each.start(texts[:, :-1], lengths) for each in (ready, model)], texts[:, -1]
    assert (states[0].compiled is not None) == compiled
    with torch.no_grad():
        for _ in range(steps):
            (ours, _, states[0]), (theirs, _, states[1]) = (
                each.step(state, tokens) for each, state in zip((ready, model), states, strict=True)
            )
            torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)
            tokens = theirs.argmax(-1)


@every_kind
@pytest.mark.parametrize("rows", [1, 3, MOST_ROWS])
@pytest.mark.parametrize("length", [1, 2, 7])
def test_steps_are_the_models(kind: Any, rows: int, length: int) -> None:
    model = untrained(kind)
    ready = prepare(model)
    assert isinstance(ready, FixedDecoderOnly)
    assert_same_steps(model, ready, torch.randint(4, VOCAB, (rows, length)), FIRST_ROOM + 40)


def test_pairs_that_are_neighbours_are_turned() -> None:
    model = untrained({"positions": "rotary"})
    for layer in model.each_layer():
        layer.self_attention.rotary = Rotary(6, layout=Interleaved(), fraction=0.7)
    assert_same_steps(model, prepare(model), torch.randint(4, VOCAB, (2, 5)), 5)


def test_many_texts_and_padded_ones_go_by_operations() -> None:
    model = untrained(KINDS["Llama"])
    ready = prepare(model)
    assert_same_steps(model, ready, torch.randint(4, VOCAB, (MOST_ROWS + 1, 5)), 3, compiled=False)
    source, lengths = torch.randint(4, VOCAB, (3, 6)), torch.tensor([6, 0, 4])
    limits: dict[str, Any] = {"bos_id": 1, "eos_id": 2, "max_steps": 9}
    found, expected = (greedy(each, source, lengths, **limits) for each in (ready, model))
    assert [one.tokens for one in found] == [one.tokens for one in expected]


def test_texts_leave_and_come_back_as_many() -> None:
    model = untrained(KINDS["Llama"])
    states = [
        each.start(torch.randint(4, VOCAB, (3, 5)).fill_(9), torch.full((3,), 5)) for each in (prepare(model), model)
    ]
    ready, logits = prepare(model), list[Tensor]()
    with torch.no_grad():
        for each, state in zip((ready, model), states, strict=True):
            for index in ([2, 0], [1] * (MOST_ROWS + 2), [0, 3]):
                state = each.reorder(state, torch.tensor(index))
                found, _, state = each.step(state, torch.arange(len(index)) + 5)
                logits.append(found)
    for ours, theirs in zip(logits[:3], logits[3:], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=2e-5)


def test_a_watch_and_hooks_see_the_modules_called() -> None:
    model, text = untrained({}), torch.randint(4, VOCAB, (1, 5))
    ready, called = prepare(model), list[str]()

    def is_compiled() -> bool:
        return ready.start(text, torch.tensor([5])).compiled is not None

    assert is_compiled()
    with regard.watch(model) as seen:
        state = ready.start(text, torch.tensor([5]))
        ready.step(state, torch.tensor([7]))
    assert [one.shape[-2:] for one in seen["layers.1.self_attention"]] == [(5, 5), (1, 6)]
    layer: Any = model.layers[1]
    for hooked in (layer.register_forward_hook, layer.self_attention.register_forward_pre_hook):
        handle = hooked(lambda *_: called.append("hook"))
        assert not is_compiled()
        handle.remove()
        assert is_compiled()
    layer.forward = layer.forward
    assert not is_compiled()
    del layer.forward
    assert is_compiled()


CHANGES: dict[str, Callable[[DecoderOnly], Any]] = {
    "in place": lambda model: model.output.weight.mul_(2),
    "other memory": lambda model: setattr(model.layers[0].feed_forward.up, "weight", nn.Parameter(torch.ones(31, 24))),
    "loaded": lambda model: model.load_state_dict({k: v * 0.5 for k, v in model.state_dict().items()}),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=CHANGES)
def test_what_is_done_to_the_model_shows_in_the_next_text(change: Any) -> None:
    model, text = untrained({}), torch.randint(4, VOCAB, (1, 5))
    ready = prepare(model)
    assert_same_steps(model, ready, text, 2)
    change(model)
    model.requires_grad_(False)
    assert_same_steps(model, ready, text, 2)


def test_a_model_in_training_drops_numbers() -> None:
    model = untrained({})
    ready = prepare(model)
    model.train()
    assert ready.start(torch.tensor([[5, 6]]), torch.tensor([2])).compiled is None


def test_others_decode_as_they_are() -> None:
    double = untrained({}).double()
    assert prepare(double) is double

    class Louder(DecoderOnly):
        """A model that may do anything."""

    louder = Louder(DecoderOnlyConfig(dim=8, num_heads=2, num_layers=1), vocab_size=9).eval()
    assert prepare(louder) is louder
