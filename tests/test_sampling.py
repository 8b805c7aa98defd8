"""Filters against those of transformers, samples against their distribution, and constraints in every search."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from regard.errors import ArgumentError, NonFiniteError
from regard.models import DecoderOnly, DecoderOnlyConfig
from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import (
    Filter,
    ForcedPrefix,
    Progress,
    Temperature,
    TopK,
    TopP,
    Vocabulary,
)
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.generation.sampling import draw_tokens
from tests.searches import beam_search, greedy, sample, sample_steps
from tests.test_decoding import BOS, EOS, LIMITS, Table, padded_sources, sources, tokens_of, untrained

VOCAB = 23


def theirs(name: str, value: float) -> Callable[[Tensor, Tensor], Tensor]:
    from transformers.generation import logits_process

    return getattr(logits_process, name)(value)


FILTERS: dict[str, tuple[Callable[..., Filter], st.SearchStrategy]] = {
    "TemperatureLogitsWarper": (Temperature, st.floats(0.1, 4.0)),
    "TopKLogitsWarper": (TopK, st.integers(1, VOCAB + 5)),
    "TopPLogitsWarper": (TopP, st.floats(0.01, 1.0)),
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("name", FILTERS)
@settings(max_examples=30)
@given(data=st.data(), seed=st.integers(0, 999), spread=st.sampled_from([0.0, 0.3, 3.0]))
def test_filters_are_those_of_transformers(name: str, data: st.DataObject, seed: int, spread: float) -> None:
    torch.manual_seed(seed)
    make, values = FILTERS[name]
    value = data.draw(values)
    logits, tokens = spread * torch.randn(5, VOCAB), torch.randint(0, VOCAB, (5, 4))
    if spread == 0.3:
        logits = logits.round(decimals=1)  # with ties
    ours = make(value)(logits, Progress(torch.arange(5), tokens))
    expected = theirs(name, value)(tokens, logits.clone())
    if name == "TopPLogitsWarper" and spread < 1.0:
        # Which of equals is left out is the sort's affair: as many are, and of the same probability.
        assert torch.equal(ours.sort().values, expected.sort().values)
    else:
        assert torch.equal(ours, expected)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_list_is_applied_in_its_order() -> None:
    logits, tokens = 3 * torch.randn(5, VOCAB), torch.randint(0, VOCAB, (5, 4))
    settings_ = [("TemperatureLogitsWarper", 0.5), ("TopKLogitsWarper", 9), ("TopPLogitsWarper", 0.9)]
    ours, expected, progress = logits, logits, Progress(torch.arange(5), tokens)
    for name, value in settings_:
        ours, expected = FILTERS[name][0](value)(ours, progress), theirs(name, value)(tokens, expected)
    assert torch.equal(ours, expected)


def test_the_nucleus_is_never_empty() -> None:
    for size in range(1, 40):
        kept = TopP(1e-9)(torch.randn(9, size), Progress(torch.arange(9), torch.zeros(9, 0).long()))
        assert torch.equal((kept > -torch.inf).sum(-1), torch.ones(9).long())


@pytest.mark.parametrize("p", [0.1, 0.5, 0.9, 0.99, 0.9999, 1.0])
def test_a_nucleus_that_is_larger_than_what_is_looked_at_first(p: float) -> None:
    progress = Progress(torch.arange(3), torch.zeros(3, 0).long())
    # The last row is flat: its nucleus has thousands of tokens.
    logits = torch.stack([5 * torch.randn(5_000), 2 * torch.randn(5_000), 0.1 * torch.randn(5_000)])
    found = TopP(p)(logits, progress)
    off = logits.shape[-1] ** 0.5 * torch.finfo(logits.dtype).eps  # of a sum of so many shares
    for row, kept in zip(logits.double().softmax(-1), found > -torch.inf, strict=True):
        assert row[kept].sum() >= p - off
        assert row[kept].sum() - row[kept].min() < p + off
        assert not kept.any() or not (~kept).any() or row[kept].min() >= row[~kept].max()
    assert torch.equal(found[found > -torch.inf], logits[found > -torch.inf])


def test_draws_follow_the_probabilities() -> None:
    probabilities = torch.tensor([[0.0, 0.5, 0.0, 0.3, 0.2, 0.0]]).expand(60_000, 6)
    tokens = draw_tokens(probabilities, torch.Generator().manual_seed(0))
    share = tokens.flatten().bincount(minlength=6) / len(tokens)
    assert share[[0, 2, 5]].tolist() == [0.0, 0.0, 0.0]
    torch.testing.assert_close(share, probabilities[0], rtol=0, atol=0.01)


def test_a_token_that_no_rounding_can_miss(monkeypatch: pytest.MonkeyPatch) -> None:
    for number in (0.0, 1.0 - 2.0**-53):
        monkeypatch.setattr(
            torch, "rand", lambda *_, number=number, **made: torch.full((1, 1), number, dtype=made["dtype"])
        )
        for weights in ([0.1, 0.2, 0.0], [1e-30, 3e-30], [0.0, 1e30, 0.0, 0.0], [0.0, 1.0]):
            probabilities = torch.tensor([weights])
            assert probabilities[0, draw_tokens(probabilities)[0, 0]] > 0


@pytest.mark.parametrize("weights", [[0.0, 0.0], [float("nan"), 1.0], [1.0, float("nan")]], ids=str)
def test_nothing_is_drawn_from_what_are_no_probabilities(weights: list[float]) -> None:
    with pytest.raises(NonFiniteError, match="whose sum is above 0, got a sum of"):
        draw_tokens(torch.tensor([[0.5, 0.5], weights]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Temperature(0.0), "temperature must be above 0 and finite, got 0.0"),
        (lambda: Temperature(float("nan")), "got nan"),
        (lambda: TopK(0), "top-k must keep at least 1 token, got 0"),
        (lambda: TopP(0.0), "top-p must be above 0 and at most 1, got 0.0"),
        (lambda: TopP(1.1), "got 1.1"),
        (lambda: Vocabulary.of([], 4), "at least one token"),
        (lambda: Vocabulary.of([4], 4), "from 0 to 3, got 4"),
    ],
)
def test_values_outside_their_range(make: Callable[[], object], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_samples_are_drawn_from_the_filtered_distribution() -> None:
    """Twenty thousand answers of two tokens: each as frequent as its probability, to four standard deviations."""
    table, count = Table(4, spread=1.0), 20_000
    filters: list[Filter] = [Temperature(1.5), TopK(3)]
    found = sample(table, *sources(*[5] * count), **LIMITS, max_steps=2, filters=filters)
    frequency: dict[tuple[int, ...], int] = {}
    for hypothesis in found:
        frequency[tuple(hypothesis.tokens)] = frequency.get(tuple(hypothesis.tokens), 0) + 1

    def probabilities(prefix: tuple[int, ...]) -> list[float]:
        logits = table.logits(prefix)[None] / 1.5
        return logits.masked_fill(logits < logits.topk(3).values[:, -1:], -torch.inf).softmax(-1)[0].tolist()

    expected: dict[tuple[int, ...], float] = {}
    for first, p in enumerate(probabilities((5, BOS))):
        if first == EOS:
            expected[(first,)] = p
        else:
            expected |= {(first, second): p * q for second, q in enumerate(probabilities((5, BOS, first)))}
    assert sum(expected.values()) == pytest.approx(1.0)
    for answer, p in expected.items():
        assert abs(frequency.get(answer, 0) - count * p) <= 4 * (count * p * (1 - p)) ** 0.5, answer


def test_scores_are_the_models_own() -> None:
    table, firsts = Table(6), range(3, 23)
    found = sample(table, *sources(*firsts), **LIMITS, max_steps=6, filters=[Temperature(3.0), TopK(4)])
    for first, hypothesis in zip(firsts, found, strict=True):
        assert hypothesis.score == pytest.approx(table.log_probability(first, hypothesis.tokens), abs=1e-6)
        assert EOS not in hypothesis.tokens[:-1]
    assert len({len(hypothesis.tokens) for hypothesis in found}) > 2


def test_the_most_probable_token_alone_is_greedy() -> None:
    model, given_ = untrained(lambda: decoder_only(), 3), padded_sources()
    limits: dict[str, Any] = LIMITS | {"max_steps": 8}
    for filters in ([TopK(1)], [TopP(1e-9)], [Temperature(1e-4)], [Temperature(1e-300)]):
        assert tokens_of(sample(model, *given_, **limits, filters=filters)) == tokens_of(
            greedy(model, *given_, **limits)
        )


@pytest.mark.parametrize("temperature", [5e-324, 1e-300, 1e300])
def test_a_temperature_beyond_float32_gives_finite_scores_in_the_same_order(temperature: float) -> None:
    found = Temperature(temperature)(torch.tensor([[-1.0, 0.0, 2.0]]), None)  # type: ignore[arg-type]
    assert found.isfinite().all()
    assert found.argsort().tolist() == [[0, 1, 2]]


def test_a_seed_gives_the_same_again() -> None:
    table = Table(9, eos_bonus=-2.0)
    draw = lambda seed: tokens_of(  # noqa: E731
        sample(table, *sources(3, 4), **LIMITS, max_steps=9, generator=torch.Generator().manual_seed(seed))
    )
    assert draw(1) == draw(1) != draw(2)


def test_steps_are_handed_out_as_they_are_drawn_and_stop_when_nobody_asks() -> None:
    table = Table(5, eos_bonus=-99.0)
    calls, step = [], table.step
    table.step = lambda state, tokens: calls.append(len(tokens)) or step(state, tokens)
    steps: Any = sample_steps(table, *sources(3, 4), **LIMITS, max_steps=50)
    first = next(steps)
    assert (len(calls), first.rows.tolist(), first.gains.shape) == (1, [0, 1], (2,))
    next(steps)
    steps.close()
    assert len(calls) == 2


def test_texts_that_have_ended_leave_the_batch() -> None:
    table = Table(5, eos_bonus=1.0)
    rows = [step.rows.tolist() for step in sample_steps(table, *sources(*range(3, 20)), **LIMITS, max_steps=9)]
    found = sample(table, *sources(*range(3, 20)), **LIMITS, max_steps=9)
    assert len(rows[0]) == 17 > len(rows[-1])
    assert all(set(later) < set(earlier) or later == earlier for earlier, later in itertools.pairwise(rows))
    assert all(hypothesis.tokens for hypothesis in found)


def decoder_only() -> DecoderOnly:
    return DecoderOnly(DecoderOnlyConfig(dim=12, num_heads=3, num_layers=2, feed_forward_dim=19), vocab_size=11)


SEARCHES: dict[str, Callable[..., list[Hypothesis]]] = {
    "greedy": greedy,
    "beam": lambda *a, **k: [found[0] for found in beam_search(*a, beam=Beam(3, length_penalty=0.0), **k)],
    "sample": sample,
}
every_search = pytest.mark.parametrize("search", SEARCHES.values(), ids=SEARCHES)


@every_search
def test_forced_prefixes(search: Callable[..., list[Hypothesis]]) -> None:
    table, prefixes = Table(6), [[3, 4, 3], [], [5], [EOS]]
    found = search(table, *sources(7, 8, 9, 10), **LIMITS, max_steps=5, constraints=[ForcedPrefix(prefixes)])
    for first, prefix, hypothesis in zip((7, 8, 9, 10), prefixes, found, strict=True):
        assert hypothesis.tokens[: len(prefix)] == prefix
        assert hypothesis.score == pytest.approx(table.log_probability(first, hypothesis.tokens), abs=1e-6)
    assert found[3].tokens == [EOS]


@every_search
def test_vocabularies(search: Callable[..., list[Hypothesis]]) -> None:
    table = Table(8, eos_bonus=-1.0)
    found = search(table, *sources(*range(7, 17)), **LIMITS, max_steps=6, constraints=[Vocabulary.of([EOS, 3, 5], 8)])
    assert {token for hypothesis in found for token in hypothesis.tokens} <= {EOS, 3, 5}
    own = torch.zeros(2, 8, dtype=torch.bool)
    own[0, [EOS, 3]] = own[1, [EOS, 6, 7]] = True
    one, two = search(table, *sources(7, 8), **LIMITS, max_steps=6, constraints=[Vocabulary(own)])
    assert set(one.tokens) <= {EOS, 3}
    assert set(two.tokens) <= {EOS, 6, 7}


class NeverTwice:
    """A constraint of one's own: every token but the end mark comes once at most."""

    def allowed(self, progress: Progress, vocab_size: int) -> Tensor:
        free = torch.ones(len(progress.sources), vocab_size, dtype=torch.bool)
        return free.scatter(1, progress.tokens, False)


@every_search
def test_constraints_see_what_was_chosen(search: Callable[..., list[Hypothesis]]) -> None:
    table, firsts = Table(5, eos_bonus=-3.0), range(3, 13)
    found = search(table, *sources(*firsts), **LIMITS, max_steps=5, constraints=[NeverTwice()])
    for hypothesis in found:
        assert len(set(hypothesis.tokens)) == len(hypothesis.tokens)
    wide = beam_search(table, *sources(*firsts), **LIMITS, max_steps=5, beam=Beam(5**4), constraints=[NeverTwice()])
    for first, (hypothesis,) in zip(firsts, wide, strict=True):
        answers = (y for _, y in table.best_answers(first, 5, 1.0))
        assert hypothesis.tokens == next(y for y in answers if len(set(y)) == len(y))


@every_search
def test_constraints_that_name_no_token_of_the_model(search: Callable[..., list[Hypothesis]]) -> None:
    with pytest.raises(ArgumentError, match="from 0 to 3, got 4"):
        search(Table(4), *sources(3), **LIMITS, max_steps=5, constraints=[ForcedPrefix([[4]])])
    with pytest.raises(ArgumentError, match="the model has 4 tokens, the constraint 5"):
        search(Table(4), *sources(3), **LIMITS, max_steps=5, constraints=[Vocabulary.of([3], 5)])


@every_search
def test_texts_of_any_lengths_go_on_as_they_do_alone(search: Callable[..., list[Hypothesis]]) -> None:
    """The last token of each text is the first that the search passes in."""
    model = untrained(lambda: decoder_only(), 4)
    text, lengths = padded_sources()
    last = text[torch.arange(5), lengths - 1]
    limits: dict[str, Any] = {"eos_id": EOS, "max_steps": 6}
    if search is sample:
        limits["filters"] = [TopK(1)]
    together = search(model, text, lengths - 1, bos_id=last, **limits)
    for b, n in enumerate(lengths.tolist()):
        (alone,) = search(model, text[b : b + 1, : n - 1], torch.tensor([n - 1]), bos_id=last[b : b + 1], **limits)
        assert alone.tokens == together[b].tokens
        whole = torch.cat([text[b, :n], torch.tensor(alone.tokens)])[None]
        with torch.no_grad():
            own = model(whole[:, :-1]).log_softmax(-1).gather(2, whole[:, 1:, None])[0, n - 1 :, 0]
        assert alone.score == pytest.approx(float(own.sum()), abs=1e-6)
