"""The model made ready to decode, against the model itself."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.generation.beam import beam_search
from regard.generation.config import Beam
from regard.generation.greedy_search import greedy
from regard.models import RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig
from regard.models.inference import FIRST_ROOM, FixedTransformer, prepare, why_not

VOCAB, BOS, EOS = 331, 1, 2
# More steps than a cache has room for at first.
LIMITS: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS, "max_steps": FIRST_ROOM + 5, "alignments": True}
KINDS: dict[str, dict[str, Any]] = {
    "pre": {},
    "post": {"norm_position": "post", "embedding_gain": 3.0},
    "one key": {"num_kv_heads": 1, "activation": "gelu"},
    "modern": {"num_kv_heads": 2, "norm": "rms", "activation": "swiglu", "positions": "rotary"},
    "learned": {"positions": "learned", "max_length": 40, "tied_output": False},
}
every_kind = pytest.mark.parametrize("kind", KINDS.values(), ids=KINDS)


def untrained(kind: dict[str, Any], dtype: torch.dtype = torch.float64, seed: int = 0) -> Any:
    """Large weights, so that answers differ."""
    torch.manual_seed(seed)
    config = TransformerConfig(dim=24, num_heads=4, encoder_layers=2, decoder_layers=2, feed_forward_dim=31, **kind)
    model = Transformer(config, source_vocab_size=53, target_vocab_size=VOCAB).to(dtype).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
        model.output.weight[EOS] *= 4  # some answers end, and at different times
    return model


def sources() -> tuple[Tensor, Tensor]:
    return torch.randint(3, 53, (9, 7), generator=torch.Generator().manual_seed(3)), torch.tensor(
        [7, 1, 4, 6, 2, 7, 7, 5, 3]
    )


def assert_same(found: Any, expected: Any, tolerance: float) -> None:
    assert [one.tokens for one in found] == [one.tokens for one in expected]
    for one, other in zip(found, expected, strict=True):
        assert one.score == pytest.approx(other.score, abs=tolerance, rel=tolerance)
        torch.testing.assert_close(one.alignment, other.alignment, rtol=0, atol=tolerance)


@every_kind
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-10), (torch.float32, 1e-5)], ids=["64", "32"])
def test_tokens_scores_and_alignments_are_the_models(kind: Any, dtype: torch.dtype, tolerance: float) -> None:
    model = untrained(kind, dtype)
    ready = prepare(model)
    assert isinstance(ready, FixedTransformer)
    assert_same(greedy(ready, *sources(), **LIMITS), greedy(model, *sources(), **LIMITS), tolerance)
    beams, expected = (
        beam_search(each, *sources(), beam=Beam(4, num_best=3), **LIMITS) for each in (ready, model)
    )  # fmt: skip
    assert_same([one for best in beams for one in best], [one for best in expected for one in best], tolerance)
    assert len({len(one.tokens) for beam in beams for one in beam}) > 1  # sources leave the batch at different times


@every_kind
def test_padding_changes_nothing(kind: Any) -> None:
    ready, (source, lengths) = prepare(untrained(kind)), sources()
    together = beam_search(ready, source, lengths, beam=Beam(3), **LIMITS)
    for n, length in enumerate(lengths.tolist()):
        alone = beam_search(ready, source[n : n + 1, :length], lengths[n : n + 1], beam=Beam(3), **LIMITS)
        assert alone[0][0].tokens == together[n][0].tokens


@every_kind
@pytest.mark.parametrize("index", [[4, 0, 0, 2], [8, 8, 3, 3, 1, 1], [0, 1, 2, 3, 4, 5, 6, 7, 8], [5]], ids=str)
def test_any_sequences_can_be_picked(kind: Any, index: Any) -> None:
    ready, model = (each(untrained(kind)) for each in (prepare, lambda model: model))
    steps, index = torch.randint(3, VOCAB, (3, 9)), torch.tensor(index)
    logits, weights = [], []
    for each in (ready, model):
        with torch.no_grad():
            state = each.start(*sources())
            for tokens in steps[:2]:
                _, _, state = each.step(state, tokens)
            state = each.reorder(state, index)
            _, _, state = each.step(state, steps[2][index])
            # Once more, within what is left.
            again = torch.arange(len(index)).flip(0)
            answer = each.step(each.reorder(state, again), steps[0][index][again])
        logits.append(answer[0]), weights.append(answer[1].dense())
    torch.testing.assert_close(*logits, rtol=0, atol=1e-10)
    torch.testing.assert_close(*weights, rtol=0, atol=1e-10)


def test_the_hypotheses_of_a_source_share_its_memory() -> None:
    ready = prepare(untrained({}))
    state = ready.reorder(ready.start(*sources()), torch.arange(9).repeat_interleave(2))
    assert [len(key) for key in state.memory.key] == [9, 9]
    _, _, state = ready.step(state, torch.full((18,), BOS))
    memory = state.memory
    swapped = torch.arange(18).view(9, 2).flip(1).flatten()
    state = ready.reorder(state, swapped)
    assert state.memory is memory
    # Two buffers in turn: no step allocates a cache.
    first, second = state.cache, state.spare
    _, _, state = ready.step(state, torch.full((18,), BOS))
    state = ready.reorder(state, swapped)
    assert (state.cache, state.spare) == (second, first)


def test_learned_positions_still_end() -> None:
    ready = prepare(untrained(KINDS["learned"]))
    with pytest.raises(ArgumentError, match="serve up to 40 tokens, got a sequence that reaches 41"):
        greedy(ready, *sources(), bos_id=BOS, eos_id=-1, max_steps=41)


def test_what_is_done_to_the_model_later_does_not_show() -> None:
    model = untrained({})
    ready = prepare(model)
    before = greedy(ready, *sources(), **LIMITS)
    with torch.no_grad():
        for module in (*model.encoder, *model.decoder, model.target_embedding):
            for parameter in module.parameters():
                parameter.zero_()
    assert_same(greedy(ready, *sources(), **LIMITS), before, 0.0)


class Louder(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * x


def test_other_models_decode_as_they_are() -> None:
    recurrent = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    assert prepare(recurrent) is recurrent
    assert prepare(recurrent, torch.float32) is recurrent
    with pytest.raises(ArgumentError, match=r"in torch\.float32 only, got torch\.bfloat16: .* for a RNNSeq2Seq"):
        prepare(recurrent, torch.bfloat16)
    strange = untrained({})
    strange.decoder[1].feed_forward = Louder()
    assert why_not(strange) == "it has layers of its own kind"
    assert prepare(strange) is strange


def trained(steps: int = 300) -> tuple[Any, float]:
    """A model that turns sentences around and is sure of it, whatever its first weights were."""
    torch.manual_seed(0)
    config = TransformerConfig(
        dim=32, num_heads=2, encoder_layers=1, decoder_layers=1, feed_forward_dim=64, dropout=0.0
    )
    model = Transformer(config, source_vocab_size=12, target_vocab_size=12)
    optimizer = torch.optim.Adam(model.parameters(), lr=5e-3)
    for _ in range(steps):
        words = torch.randint(3, 12, (64, 5))
        target = nn.functional.pad(words.flip(1), (0, 1), value=EOS)
        logits = model(words, torch.full((64,), 5), nn.functional.pad(target[:, :-1], (1, 0), value=BOS))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), target.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model.eval(), loss.item()


def test_bfloat16_scores_a_trained_models_answers_alike() -> None:
    model, loss = trained()
    assert loss < 0.02
    words, lengths = torch.randint(3, 12, (200, 5)), torch.full((200,), 5)
    limits: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS, "max_steps": 9, "beam": Beam(5)}
    exact, fast = (beam_search(prepare(model, dtype), words, lengths, **limits) for dtype in (None, torch.bfloat16))
    apart = torch.tensor([abs(one.score - other.score) for (one,), (other,) in zip(exact, fast, strict=True)])
    assert all(one.tokens[:5] == line for (one,), line in zip(exact, words.flip(1).tolist(), strict=True))
    assert apart.max() > 0  # it is another precision
    assert (apart < 1e-2).float().mean() >= 0.99


def test_logits_of_bfloat16_weights_are_not_rounded_to_it() -> None:
    ready = prepare(untrained(KINDS["pre"], torch.float32), torch.bfloat16)
    logits, _, _ = ready.step(ready.start(*sources()), torch.full((9,), BOS))
    assert logits.dtype == torch.float32
    assert (logits != logits.bfloat16()).float().mean() > 0.9
