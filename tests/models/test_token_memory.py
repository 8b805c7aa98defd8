"""Memories of tokens: the nearest keys against scikit-learn, the mixture against its formula, searches with it."""

from dataclasses import replace
from typing import Any

import jaxtyping
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.neighbors import NearestNeighbors
from torch import nn

from regard.errors import ArgumentError, ShapeError
from regard.models import Ensemble, RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig, token_memory
from regard.models.token_memory import RememberingOutput, TokenMemory, Vote, read_by_output
from regard.tasks.generation.config import Beam
from regard.tasks.translation.search_job import SearchJob, search

SIZES: dict[str, Any] = {"source_vocab_size": 30, "target_vocab_size": 30}
JOB = SearchJob(sources=[[4, 9, 7, 2], [5, 2], [8, 8, 8, 8, 8, 2]], begin_id=1, end_id=2, max_steps=9)


def memory_of(entries: int, width: int, seed: int = 0) -> TokenMemory:
    generator = torch.Generator().manual_seed(seed)
    keys = torch.randn(entries, width, generator=generator)
    return TokenMemory(keys, torch.randint(0, 30, (entries,), generator=generator), torch.arange(entries) // 3)


def model_of(kind: str) -> Any:
    torch.manual_seed(0)
    sizes = TransformerConfig(dim=16, num_heads=2, encoder_layers=1, decoder_layers=1, feed_forward_dim=16)
    made = Transformer(sizes, **SIZES) if kind == "transformer" else RNNSeq2Seq(RNNConfig(hidden_dim=16), **SIZES)
    for parameter in made.parameters():
        nn.init.normal_(parameter, std=0.5)
    return made.eval().requires_grad_(False)


def with_memory(kind: str, entries: int = 200) -> Any:
    model = model_of(kind)
    model.output = RememberingOutput(model.output, memory_of(entries, 16), Vote(0.6, 4.0, 8))
    return model


@pytest.mark.parametrize("scores", [35, 320, 1 << 16])
def test_the_nearest_are_those_of_scikit_learn(monkeypatch: pytest.MonkeyPatch, scores: int) -> None:
    monkeypatch.setattr(token_memory, "SCORES", scores)
    monkeypatch.setattr(token_memory, "ROWS", 5)
    memory, query = memory_of(130, 6), torch.randn(12, 6, generator=torch.Generator().manual_seed(1))
    distances, places = memory.nearest(query, 9)
    expected, where = NearestNeighbors(n_neighbors=9).fit(memory.keys.double()).kneighbors(query.double())
    assert places.tolist() == where.tolist()
    torch.testing.assert_close(distances.double(), torch.from_numpy(expected).square(), rtol=1e-4, atol=1e-5)


@given(entries=st.integers(1, 40), count=st.integers(1, 50), seed=st.integers(0, 99))
def test_the_order_of_a_memory_changes_nothing(entries: int, count: int, seed: int) -> None:
    memory, x = memory_of(entries, 4, seed), torch.randn(3, 4, generator=torch.Generator().manual_seed(seed))
    order = torch.randperm(entries, generator=torch.Generator().manual_seed(seed))
    turned = TokenMemory(memory.keys[order], memory.tokens[order], memory.pairs[order])
    output = nn.Linear(4, 30)
    one, other = (RememberingOutput(output, each, Vote(0.5, 2.0, count))(x).exp() for each in (memory, turned))
    torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(one.sum(-1), torch.ones(3))


def test_the_mixture_is_the_formula() -> None:
    memory, output, x = memory_of(50, 8), nn.Linear(8, 30), torch.randn(2, 3, 8)
    vote = Vote(share=0.3, temperature=5.0, count=7)
    found = RememberingOutput(output, memory, vote)(x)
    squares = (x.double()[:, :, None] - memory.keys.double()).square().sum(-1)
    nearest = squares.argsort(-1)[..., :7]
    weights = (-squares.gather(-1, nearest) / 5.0).softmax(-1)
    votes = torch.zeros(2, 3, 30, dtype=torch.double).scatter_add(-1, memory.tokens[nearest], weights)
    expected = 0.7 * output.double()(x.double()).softmax(-1) + 0.3 * votes
    torch.testing.assert_close(found.double().exp(), expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("kind", ["transformer", "rnn"])
@pytest.mark.parametrize("form", ["model", "ensemble"])
@pytest.mark.parametrize("size", [1, 4])
def test_scores_of_a_search_are_those_of_the_mixture(kind: str, form: str, size: int) -> None:
    """Step by step and batched, a search sees the probabilities of one pass over the whole target."""
    model = with_memory(kind)
    decoder = Ensemble([model]) if form == "ensemble" else model
    found = search(decoder, replace(JOB, beam=Beam(size, num_best=size)))
    for source, best in zip(JOB.sources, found, strict=True):
        for one in best:
            logits = model(torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[1, *one.tokens[:-1]]]))
            gains = logits[0].log_softmax(-1)[torch.arange(len(one.tokens)), one.tokens]
            score = gains.sum() if size == 1 else gains.mean()
            assert one.score == pytest.approx(float(score), abs=1e-3)


def test_a_memory_of_the_sentence_itself_brings_it_back() -> None:
    """What the model read while it was forced to write a target makes it write that target again."""
    model, target = model_of("transformer"), [11, 3, 17, 5, 2]
    source = torch.tensor([[4, 9, 7, 2]]), torch.tensor([4])
    (read,) = read_by_output(model, *source, torch.tensor([[1, *target[:-1]]]))
    memory = TokenMemory(read, torch.tensor(target), torch.zeros(5, dtype=torch.long))
    model.output = RememberingOutput(model.output, memory, Vote(0.9, 0.1, 1))
    assert search(model, replace(JOB, sources=[[4, 9, 7, 2]], beam=Beam(1)))[0][0].tokens == target


def test_what_cannot_be_a_memory_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jaxtyping.config, "jaxtyping_disable", True)  # users have no checks of shapes
    none, two, three = torch.arange(0), torch.arange(2), torch.arange(3)
    with pytest.raises(ShapeError, match=r"of one E that is at least 1, got \(0, 4\)"):
        TokenMemory(torch.zeros(0, 4), none, none)
    with pytest.raises(ShapeError, match=r"got \(2, 4\), \(3,\) and \(2,\)"):
        TokenMemory(torch.zeros(2, 4), three, two)
    with pytest.raises(ShapeError, match="reads 5 numbers and has 40 tokens, and the memory has keys of 4"):
        RememberingOutput(nn.Linear(5, 40), memory_of(3, 4), Vote())
    with pytest.raises(ShapeError, match="tokens from 29 to 29: it is of another model"):
        RememberingOutput(nn.Linear(4, 29), TokenMemory(torch.zeros(1, 4), two[1:] + 28, two[1:]), Vote())
    wrongs: list[dict[str, Any]] = [{"share": 1.0}, {"share": 0.0}, {"temperature": 0.0}, {"temperature": torch.inf}]
    for wrong in [*wrongs, {"count": 0}]:
        with pytest.raises(ArgumentError, match="0 < share < 1"):
            Vote(**wrong)
