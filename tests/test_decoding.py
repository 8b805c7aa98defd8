"""Greedy and beam search, on tables small enough to try everything and on the models."""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jaxtyping
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models import RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig
from regard.tasks.generation.config import Beam
from regard.tasks.generation.protocol import Hypothesis
from tests.searches import beam_search, greedy

BOS, EOS = 1, 2
LIMITS: dict[str, Any] = {"bos_id": BOS, "eos_id": EOS}


class Answer(NamedTuple):
    logits: Tensor
    alignment: None
    state: list[tuple[int, ...]]


@functools.cache
def random_row(size: int, prefix: tuple[int, ...]) -> Tensor:
    generator = torch.Generator().manual_seed(hash((size, prefix)) % (2**31))
    return torch.randn(size, generator=generator, dtype=torch.float64)


class Table:
    def __init__(self, vocab: int, *, spread: float = 2.0, eos_bonus: float = 0.0) -> None:
        self.vocab, self.spread, self.eos_bonus = vocab, spread, eos_bonus

    def logits(self, prefix: tuple[int, ...]) -> Tensor:
        logits = self.spread * random_row(self.vocab, prefix)
        logits[EOS] += self.eos_bonus
        return logits

    def start(self, source: Tensor, source_lengths: Tensor) -> list[tuple[int, ...]]:
        return [(int(first),) for first in source[:, 0]]

    def step(self, state: list[tuple[int, ...]], tokens: Tensor) -> Answer:
        after = [(*prefix, token) for prefix, token in zip(state, tokens.tolist(), strict=True)]
        logits = torch.stack([self.logits(prefix) for prefix in after])
        return Answer(logits, None, after)

    def reorder(self, state: list[tuple[int, ...]], index: Tensor) -> list[tuple[int, ...]]:
        return [state[i] for i in index.tolist()]

    def log_probability(self, first: int, tokens: list[int]) -> float:
        prefixes = [(first, BOS, *tokens[:t]) for t in range(len(tokens))]
        return sum(
            float(self.logits(p).log_softmax(-1)[token]) for p, token in zip(prefixes, tokens, strict=True)
        )  # fmt: skip

    def every_answer(self, first: int, steps: int) -> list[list[int]]:
        others = [token for token in range(self.vocab) if token != EOS]
        return [
            [*body, EOS] for length in range(steps) for body in itertools.product(others, repeat=length)
        ]  # fmt: skip

    def best_answers(self, first: int, steps: int, penalty: float) -> list[tuple[float, list[int]]]:
        answers = self.every_answer(first, steps)
        return sorted(((self.log_probability(first, y) / len(y) ** penalty, y) for y in answers), reverse=True)


def sources(*first: int, width: int = 3) -> tuple[Tensor, Tensor]:
    source = torch.zeros(len(first), width, dtype=torch.long)
    source[:, 0] = torch.tensor(first)
    return source, torch.full((len(first),), width)


def tokens_of(found: list[Hypothesis]) -> list[list[int]]:
    return [hypothesis.tokens for hypothesis in found]


@pytest.mark.parametrize(("vocab", "steps"), [(3, 5), (4, 3)])
@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0])
def test_a_wide_beam_finds_the_exhaustive_optimum(vocab: int, steps: int, penalty: float) -> None:
    table, firsts = Table(vocab), (5, 7, 11, 13)
    count = len(table.every_answer(0, steps))
    found = beam_search(
        table, *sources(*firsts), **LIMITS, max_steps=steps,
        beam=Beam(vocab**steps, num_best=count, length_penalty=penalty),
    )  # fmt: skip
    for first, hypotheses in zip(firsts, found, strict=True):
        best = table.best_answers(first, steps, penalty)
        assert tokens_of(hypotheses) == [tokens for _, tokens in best]
        torch.testing.assert_close(
            torch.tensor([h.score for h in hypotheses]), torch.tensor([score for score, _ in best]), rtol=0, atol=1e-6
        )


@pytest.mark.parametrize("penalty", [0.0, 0.5, 1.0, 2.0])
def test_stopping_early_loses_no_better_answer(penalty: float) -> None:
    """The one best of a beam too wide to fill up is the optimum, although the search stops when it is certain."""
    table, firsts = Table(3, eos_bonus=1.0), range(20, 30)
    found = beam_search(
        table, *sources(*firsts), **LIMITS, max_steps=5,
        beam=Beam(3**4, length_penalty=penalty),
    )  # fmt: skip
    for first, (hypothesis,) in zip(firsts, found, strict=True):
        score, tokens = table.best_answers(first, 5, penalty)[0]
        assert hypothesis.tokens == tokens
        assert hypothesis.score == pytest.approx(score, abs=1e-6)


def test_a_search_without_length_penalty_stops_as_soon_as_it_is_certain() -> None:
    table = Table(3, eos_bonus=9.0)
    steps, step = [], table.step
    table.step = lambda state, tokens: steps.append(len(tokens)) or step(state, tokens)
    beam_search(table, *sources(3, 5), **LIMITS, max_steps=50, beam=Beam(4, length_penalty=0.0))
    assert len(steps) < 4


def test_a_search_stops_at_a_step_that_ends_nothing_too() -> None:
    """An answer of one token scores -1; all else loses log 4 a token, and is out of reach of it after a while."""
    table = Table(6)
    first = torch.tensor([-9.0, -9.0, -1.0, -9.0, math.log(1 - math.exp(-1)), -9.0], dtype=torch.float64)
    later = torch.tensor([0.0, 0.0, -99.0, 0.0, 0.0, -99.0], dtype=torch.float64)
    table.logits = lambda prefix: first if len(prefix) == 2 else later
    steps, step = [], table.step
    table.step = lambda state, tokens: steps.append(len(tokens)) or step(state, tokens)
    (found,) = beam_search(table, *sources(3), **LIMITS, max_steps=20, beam=Beam(2))
    assert found[0].tokens == [EOS]
    # After n steps the best that goes on has log p(4) - (n - 1) log 4, to be divided by 20 at the most.
    assert len(steps) == next(n for n in range(1, 21) if first[4] - (n - 1) * math.log(4) <= -20)


def narrow_beam(
    table: Table, first: int, *, steps: int, size: int, num_best: int, penalty: float
) -> list[tuple[float, list[int]]]:
    def score(total: float, length: int) -> float:
        return total / length**penalty

    live: list[tuple[float, list[int]]] = [(0.0, [])]
    finished: list[tuple[float, list[int]]] = []
    for length in range(1, steps + 1):
        longer = []
        for total, tokens in live:
            gains = table.logits((first, BOS, *tokens)).log_softmax(-1).tolist()
            longer += [(total + gain, [*tokens, token]) for token, gain in enumerate(gains)]
        longer.sort(reverse=True)
        finished += [(score(total, length), tokens) for total, tokens in longer[:size] if tokens[-1] == EOS]
        finished = sorted(finished, reverse=True)[:size]
        live = [(total, tokens) for total, tokens in longer if tokens[-1] != EOS][:size]
        if len(finished) == size and score(live[0][0], length) <= finished[num_best - 1][0]:
            break
    cut = [(score(total, steps), tokens) for total, tokens in live]
    return (finished + (cut if len(finished) < size else []))[:num_best]


@settings(max_examples=40)
@given(
    vocab=st.integers(3, 7), steps=st.integers(1, 7), size=st.integers(1, 5), data=st.data(),
    penalty=st.sampled_from([0.0, 0.6, 1.0, 1.7]), eos_bonus=st.sampled_from([-3.0, 0.0, 2.0]),
)  # fmt: skip
def test_a_narrow_beam_does_what_it_says(
    vocab: int, steps: int, size: int, penalty: float, eos_bonus: float, data: st.DataObject
) -> None:
    num_best = data.draw(st.integers(1, size))
    firsts = data.draw(st.lists(st.integers(3, 99), min_size=1, max_size=6))
    table = Table(vocab, eos_bonus=eos_bonus)
    found = beam_search(
        table, *sources(*firsts), **LIMITS, max_steps=steps,
        beam=Beam(size, num_best=num_best, length_penalty=penalty),
    )  # fmt: skip
    how = {"steps": steps, "size": size, "num_best": num_best}
    for first, hypotheses in zip(firsts, found, strict=True):
        expected = narrow_beam(table, first, **how, penalty=penalty)
        assert tokens_of(hypotheses) == [tokens for _, tokens in expected]
        for hypothesis, (score, _) in zip(hypotheses, expected, strict=True):
            assert hypothesis.score == pytest.approx(score, abs=1e-5)


@settings(max_examples=20)
@given(
    vocab=st.integers(3, 9), steps=st.integers(1, 7), penalty=st.sampled_from([0.0, 1.0]),
    firsts=st.lists(st.integers(3, 99), min_size=1, max_size=9),
)  # fmt: skip
def test_a_beam_of_one_is_greedy(vocab: int, steps: int, penalty: float, firsts: list[int]) -> None:
    table = Table(vocab)
    given = sources(*firsts)
    best = greedy(table, *given, **LIMITS, max_steps=steps)
    beams = beam_search(
        table, *given, **LIMITS, max_steps=steps, beam=Beam(1, length_penalty=penalty)
    )  # fmt: skip
    assert tokens_of(best) == [beam[0].tokens for beam in beams]
    for one, (two,) in zip(best, beams, strict=True):
        assert one.score / len(one.tokens) ** penalty == pytest.approx(two.score, abs=1e-6)


@settings(max_examples=20)
@given(size=st.integers(1, 5), steps=st.integers(1, 9), firsts=st.lists(st.integers(3, 99), min_size=2, max_size=9))
def test_sources_do_not_touch_each_other(size: int, steps: int, firsts: list[int]) -> None:
    table = Table(5)
    limits: dict[str, Any] = LIMITS | {"max_steps": steps, "beam": Beam(size, num_best=size)}
    together = beam_search(table, *sources(*firsts), **limits)
    for first, hypotheses in zip(firsts, together, strict=True):
        (alone,) = beam_search(table, *sources(first), **limits)
        assert tokens_of(hypotheses) == tokens_of(alone)
        assert [h.score for h in hypotheses] == [h.score for h in alone]
    singly = [greedy(table, *sources(first), **LIMITS, max_steps=steps)[0] for first in firsts]
    assert tokens_of(greedy(table, *sources(*firsts), **LIMITS, max_steps=steps)) == tokens_of(singly)


def test_sources_that_are_done_leave_the_batch() -> None:
    """The work of a step is that of the sources that still run, to within a sixteenth."""
    table = Table(5, eos_bonus=-99.0)
    ends_at = dict.fromkeys(range(3, 12), 1) | {12: 6}
    logits = table.logits
    table.logits = lambda prefix: (
        logits(prefix) + 199.0 * nn.functional.one_hot(torch.tensor(EOS), 5) * (len(prefix) - 1 >= ends_at[prefix[0]])
    )
    rows, step = [], table.step
    table.step = lambda state, tokens: rows.append(len(tokens)) or step(state, tokens)
    assert [len(h.tokens) for h in greedy(table, *sources(*ends_at), **LIMITS, max_steps=8)] == [1] * 9 + [6]
    assert rows == [10, 1, 1, 1, 1, 1]
    rows.clear()
    found = beam_search(table, *sources(*ends_at), **LIMITS, max_steps=8, beam=Beam(2, length_penalty=0.0))
    assert [len(beam[0].tokens) for beam in found] == [1] * 9 + [6]
    assert rows == [10, 2, 2, 2, 2, 2]  # At the first step a source has one hypothesis.


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"size": 10**9}, "a beam has at most 10,000 hypotheses, got 1,000,000,000: 5 are usual"),
        ({"size": 0}, "num_best must be in 1..size, got num_best=1 and size=0"),
        ({"num_best": 0}, "got num_best=0 and size=3"),
        ({"num_best": 4}, "got num_best=4 and size=3"),
        ({"length_penalty": -0.1}, "length_penalty must be at least 0 and finite, got -0.1"),
        ({"length_penalty": float("nan")}, "got nan"),
        ({"length_penalty": 51.0}, "length_penalty must be at most 50, got 51.0"),
    ],
)
def test_a_beam_of_numbers_outside_their_range(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Beam(**{"size": 3, **arguments})


VOCAB, SOURCE, STEPS = 11, 6, 8
MODELS: dict[str, Callable[[], nn.Module]] = {
    "transformer": lambda: Transformer(
        TransformerConfig(
            dim=12, num_heads=3, num_kv_heads=1, encoder_layers=1, decoder_layers=2, feed_forward_dim=19,
        ),
        source_vocab_size=VOCAB, target_vocab_size=VOCAB,
    ),
    "bahdanau": lambda: RNNSeq2Seq(
        RNNConfig(embedding_dim=5, hidden_dim=7, attention_dim=11), source_vocab_size=VOCAB, target_vocab_size=VOCAB
    ),
    "luong": lambda: RNNSeq2Seq(
        RNNConfig(embedding_dim=5, hidden_dim=7, decoder="luong", score="dot"),
        source_vocab_size=VOCAB, target_vocab_size=VOCAB,
    ),
}  # fmt: skip
every_model = pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)


def untrained(make: Callable[[], nn.Module], seed: int) -> Any:
    torch.manual_seed(seed)
    model = make().double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    return model


def padded_sources() -> tuple[Tensor, Tensor]:
    return torch.randint(3, VOCAB, (5, SOURCE)), torch.tensor([6, 1, 4, 6, 2])


def teacher_forced(model: Any, source: Tensor, length: Tensor, tokens: list[int]) -> float:
    target = torch.tensor([[BOS, *tokens[:-1]]])
    with torch.no_grad():
        log_probs = model(source[None], length[None], target).log_softmax(-1)[0]
    return float(log_probs[torch.arange(len(tokens)), torch.tensor(tokens)].sum())


@every_model
@pytest.mark.parametrize("seed", range(2))
def test_scores_are_the_models_own(make: Callable[[], nn.Module], seed: int) -> None:
    model = untrained(make, seed)
    source, lengths = padded_sources()
    limits: dict[str, Any] = LIMITS | {"max_steps": STEPS}
    best = [[h] for h in greedy(model, source, lengths, **limits)]
    beams = beam_search(model, source, lengths, beam=Beam(4, num_best=3, length_penalty=0.7), **limits)
    for found, penalty in ((best, 0.0), (beams, 0.7)):
        for hypotheses, sentence, length in zip(found, source, lengths, strict=True):
            for hypothesis in hypotheses:
                total = teacher_forced(model, sentence, length, hypothesis.tokens)
                assert hypothesis.score == pytest.approx(total / len(hypothesis.tokens) ** penalty, abs=1e-9)
    assert len({len(h.tokens) for hypotheses in beams for h in hypotheses}) > 1 or seed  # answers do differ


@every_model
def test_reordering_within_a_source_copies_no_memory(make: Callable[[], nn.Module]) -> None:
    model = untrained(make, 5)
    with torch.no_grad():
        state = model.start(*padded_sources())
        state = model.reorder(state, torch.arange(5).repeat_interleave(2))
        _, _, state = model.step(state, torch.full((10,), BOS))
        after = model.reorder(state, torch.tensor([1, 0, 2, 2, 5, 5, 7, 6, 8, 9]))
    assert getattr(after, "memory", None) is getattr(state, "memory", None)
    assert getattr(after, "annotations", None) is getattr(state, "annotations", None)


@every_model
def test_bfloat16_decodes(make: Callable[[], nn.Module]) -> None:
    model = untrained(make, 5).bfloat16()
    found = beam_search(model, *padded_sources(), **LIMITS, max_steps=STEPS, beam=Beam(3))
    assert all(len(h.tokens) <= STEPS for (h,) in found)


@pytest.mark.parametrize("search", [greedy, beam_search])
def test_sources_and_lengths_must_fit(search: Callable[..., object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # what a user's wrong call meets
    source, lengths = padded_sources()
    with pytest.raises(ArgumentError, match="max_steps must be at least 1, got 0"):
        search(Table(4), source, lengths, **LIMITS, max_steps=0)
    with pytest.raises(ArgumentError, match=r"got \(5, 6\) and \(4,\)"):
        search(Table(4), source, lengths[:4], **LIMITS, max_steps=5)
    with pytest.raises(ArgumentError, match=r"got \(6,\) and \(5,\)"):
        search(Table(4), source[0], lengths, **LIMITS, max_steps=5)
