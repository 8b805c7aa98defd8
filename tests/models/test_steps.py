"""Decoding by steps, against one pass over the whole target: whichever sequences go on, after changes of modules."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.call.rotary import rotary
from regard.models import DecoderOnly, DecoderOnlyConfig, Transformer, TransformerConfig
from regard.nn import DifferentialAttention, LatentAttention, Mamba2
from regard.tensors.guards import KeptPlace
from tests import each_once
from tests.operators import operators_of
from tests.searches import greedy

VOCAB, BOS, EOS = 31, 1, 2
LENGTHS = torch.tensor([7, 0, 4, 7])
SOURCE = torch.randint(3, VOCAB, (4, 7), generator=torch.Generator().manual_seed(3))
TOKENS = torch.randint(3, VOCAB, (4, 6), generator=torch.Generator().manual_seed(4))
KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_position": "post"},
    "gpt-2": {"positions": "learned", "max_length": 32},
    "modern": {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "positions": "rotary"},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)
FAMILIES = ("encoder and decoder", "decoder")


def untrained(family: str, kind: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    sizes = {"dim": 16, "num_heads": 4, "feed_forward_dim": 24, "dropout": 0.0, "tied_output": False, **kind}
    if family == "decoder":
        model: Any = DecoderOnly(DecoderOnlyConfig(num_layers=2, **sizes), vocab_size=VOCAB)
    else:
        config = TransformerConfig(encoder_layers=1, decoder_layers=2, **sizes)
        model = Transformer(config, source_vocab_size=VOCAB, target_vocab_size=VOCAB)
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.3)
    return model.double().eval()


def in_one_pass(model: Any, rows: Tensor, written: Tensor) -> Tensor:
    """The logits after each of the tokens (N, T) that follow these rows of the sources."""
    if isinstance(model, Transformer):
        return model(SOURCE[rows], LENGTHS[rows], written)
    found = []
    for row, tokens in zip(rows.tolist(), written, strict=True):
        length = int(LENGTHS[row])
        found.append(model(torch.cat([SOURCE[row, :length], tokens])[None])[0, length:])
    return torch.stack(found)


@every_kind
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    ("index", "records"),
    each_once(
        [[0, 1, 2, 3], [3, 2, 1, 0], [0, 0, 1, 1, 2, 2, 3, 3], [2, 2, 2], [3, 0, 0, 1], [0, 1, 0], [1, 1, 3, 3]],
        [False, True],
    ),
    ids=str,
)
def test_any_sequences_go_on(family: str, kind: Any, records: bool, index: list[int]) -> None:
    model, rows = untrained(family, kind), torch.tensor(index)
    with torch.set_grad_enabled(records):
        state = model.start(SOURCE, LENGTHS)
        for column in TOKENS.T[:3]:
            logits, _, state = model.step(state, column)
        state, written = model.reorder(state, rows), TOKENS[rows][:, :3]
        for turn in range(3):
            tokens = torch.arange(3 + turn, 3 + turn + len(rows)) % VOCAB
            logits, alignment, state = model.step(state, tokens)
            written = torch.cat([written, tokens[:, None]], 1)
            expected = in_one_pass(model, rows, written)[:, -1]
            torch.testing.assert_close(logits, expected, rtol=0, atol=1e-10)
            if alignment is not None:
                weights = model.attend(SOURCE[rows], LENGTHS[rows], written)[model.alignment_names[-1]].dense()
                torch.testing.assert_close(alignment.dense(), weights[:, :, -1:], rtol=0, atol=1e-10)
            # Once more, turned around within what is left, and without the first.
            again = torch.arange(len(rows)).flip(0)[: max(len(rows) - turn, 1)]
            state, rows, written = model.reorder(state, again), rows[again], written[again]


def test_the_hypotheses_of_a_source_share_its_keys() -> None:
    model = untrained("encoder and decoder", {})
    with torch.no_grad():
        state = model.reorder(model.start(SOURCE, LENGTHS), torch.arange(4).repeat_interleave(3))
        _, _, state = model.step(state, torch.full((12,), BOS))
        memory = state.memory
        assert [len(one.key) for one in memory] == [4, 4]
        state = model.reorder(state, torch.arange(12).view(4, 3).flip(1).flatten())
        assert state.memory is memory
        state = model.reorder(state, torch.tensor([3, 4, 5, 9, 9, 10]))
        assert [len(one.key) for one in state.memory] == [2, 2]


@pytest.mark.parametrize("family", FAMILIES)
def test_caches_are_written_in_place_and_never_where_gradients_are_recorded(family: str) -> None:
    model = untrained(family, {})
    for records in (False, True):
        with torch.set_grad_enabled(records):
            state = model.start(SOURCE, LENGTHS)
            places = []
            for column in TOKENS.T:
                _, _, state = model.step(state, column)
                places.append(state.caches[0].key_buffer.data_ptr())
        assert (len(set(places)) < len(places)) == (not records)


@every_kind
@pytest.mark.parametrize("family", FAMILIES)
def test_gradients_go_through_the_steps(family: str, kind: Any) -> None:
    model, rows = untrained(family, kind), torch.tensor([2, 2, 0, 0])
    written = torch.cat([TOKENS[rows][:, :2], torch.tensor([[5], [6], [7], [8]])], 1)

    def step_by_step() -> Tensor:
        state = model.start(SOURCE, LENGTHS)
        for column in TOKENS.T[:2]:
            _, _, state = model.step(state, column)
        return model.step(model.reorder(state, rows), written[:, 2]).logits

    grads = []
    for logits in (step_by_step(), in_one_pass(model, rows, written)[:, -1]):
        loss = (logits * torch.linspace(-1, 1, VOCAB, dtype=torch.float64)).sum()
        grads.append(torch.autograd.grad(loss, list(model.parameters()), allow_unused=True))
    for ours, right in zip(*grads, strict=True):
        assert (ours is None) == (right is None)
        if ours is not None:
            torch.testing.assert_close(ours, right, rtol=0, atol=1e-10)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_hook_acts_in_each_step_as_in_one_pass(family: str) -> None:
    model, rows = untrained(family, {}), torch.arange(4)
    inside = [name for name, _ in model.named_modules() if name and "residuals" not in name and "encoder" not in name]
    for name in inside:
        hook = model.get_submodule(name).register_forward_hook(lambda module, given, output: 2 * output)
        try:
            with torch.no_grad():
                expected = in_one_pass(model, rows, TOKENS)
                state, found = model.start(SOURCE, LENGTHS), []
                for tokens in TOKENS.unbind(1):
                    step = model.step(state, tokens)
                    state = step.state
                    found.append(step.logits)
        finally:
            hook.remove()
        torch.testing.assert_close(torch.stack(found, 1), expected, msg=partial("{}: {}".format, name))


@pytest.mark.parametrize(
    "attend",
    [
        LatentAttention(16, 2, latent_dim=6, head_dim=4, rotary=regard.Rotary(4)),
        DifferentialAttention(16, 2, layer=0),
        Mamba2(16, 2),
    ],
    ids=lambda module: type(module).__name__,
)
def test_every_mixer_with_a_cache_is_called(attend: Any) -> None:
    x, fired = torch.randn(1, 5, 16), list[Any]()
    attend.register_forward_hook(lambda module, given, output: fired.append(output))
    first, cache = attend.extend(x[:, :3], None)
    last, _ = attend.extend(x[:, 3:], cache)
    assert [id(one) for one in fired] == [id(first), id(last)]
    torch.testing.assert_close(torch.cat([first, last], 1), attend(x, mask=regard.causal()))


TEXT = torch.arange(4, 20).reshape(2, 8)
LAYERS = 12
MOST = 1.1
"""Ours, of transformers' own."""


def llama() -> Any:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=128, num_hidden_layers=LAYERS, num_attention_heads=2,
        eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config).eval()


def generated(model: Any, mask: torch.Tensor) -> Callable[[int], object]:
    return lambda steps: model.generate(
        TEXT, attention_mask=mask, do_sample=False, max_new_tokens=steps, min_new_tokens=steps
    )


def of_a_step(run: Callable[[int], object]) -> int:
    with torch.no_grad():
        run(3)
        return operators_of(lambda: run(5)).total() - operators_of(lambda: run(4)).total()


def test_a_step_of_our_decoder(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a Llama of its sizes. What counts operators would keep the angles of the layers from being shared."""
    monkeypatch.setattr(rotary, "where_kept", lambda x: KeptPlace(x.device, 0))
    config = DecoderOnlyConfig(
        dim=32, num_heads=2, num_layers=LAYERS, feed_forward_dim=128, dropout=0.0, activation="swiglu", norm="rms",
        positions="rotary",
    )  # fmt: skip
    model, lengths = DecoderOnly(config, vocab_size=64).eval(), torch.full((2,), 8)
    ours = of_a_step(lambda steps: greedy(model, TEXT, lengths, bos_id=1, eos_id=-1, max_steps=steps))
    assert ours <= MOST * of_a_step(generated(llama(), torch.ones_like(TEXT)))


@pytest.mark.parametrize("padded", [False, True])
def test_a_step_of_an_enabled_model(padded: bool) -> None:
    model, mask = llama(), torch.ones_like(TEXT)
    mask[0, :3] = 0 if padded else 1
    theirs = of_a_step(generated(model, mask))
    with regard.huggingface.enable(model):
        ours = of_a_step(generated(model, mask))
    assert ours <= MOST * theirs, (ours, theirs)
