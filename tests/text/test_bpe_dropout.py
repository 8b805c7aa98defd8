"""BPE dropout: the cuts of the paper's algorithm, drawn from a key."""

import json
from collections import Counter, defaultdict
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from regard.errors import ArgumentError, DataError
from regard.tasks.text.bpe_dropout import BPEDropout, NewCuts
from regard.tasks.text.tokenizer_recipes import ByteLevelBPE, Words
from regard.tasks.text.tokenizers import Tokenizer

TEXTS = [
    "Zwei junge weiße Männer sind im Freien, in der Nähe vieler Büsche.",
    "anananas  banana\tananas's ('said) x",
    "木々が 2024年に — “ça va”, n'est-ce pas?  ",
    "the cats sat on the mats; the other cats' hats are there's ones",
    "",
    "!",
]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    return ByteLevelBPE(vocab_size=420).train(TEXTS * 3)


def tokens_of(tokenizer: Tokenizer, texts: list[str]) -> list[npt.NDArray[np.int64]]:
    return [np.array(ids, np.int64) for ids in tokenizer.encode_batch(texts)]


def some_keys(count: int) -> npt.NDArray[np.uint64]:
    return np.random.default_rng(3).integers(0, 2**64, count, np.uint64)


def exact_probabilities(tokenizer: Tokenizer, word: str, probability: float) -> dict[tuple[str, ...], float]:
    """Algorithm 1 of the paper, with all that can happen in each round and its probability."""
    ranks = {tuple(pair): rank for rank, pair in enumerate(json.loads(tokenizer.to_json())["model"]["merges"])}
    done: defaultdict[tuple[str, ...], float] = defaultdict(float)
    todo: dict[tuple[str, ...], float] = {tuple(word): 1.0}
    while todo:
        following: defaultdict[tuple[str, ...], float] = defaultdict(float)
        for cut, share in todo.items():
            possible = sorted((ranks[cut[i : i + 2]], i) for i in range(len(cut) - 1) if cut[i : i + 2] in ranks)
            for better, (_, i) in enumerate(possible):
                merged = (*cut[:i], cut[i] + cut[i + 1], *cut[i + 2 :])
                following[merged] += share * probability**better * (1 - probability)
            done[cut] += share * probability ** len(possible)
        todo = following
    return done


def test_without_dropout_the_cuts_are_the_librarys(tokenizer: Tokenizer) -> None:
    every = tokens_of(tokenizer, TEXTS)
    # So small a probability takes the whole way, but leaves out nothing.
    for probability in (0.0, 1e-300):
        found = BPEDropout(tokenizer, probability)(every, some_keys(len(every)))
        assert [cut.tolist() for cut in found] == [cut.tolist() for cut in every]


def test_merging_all_bytes_again_gives_the_librarys_cuts(tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    dropout = BPEDropout(tokenizer, 0.0)

    def every_word(streams: Any, merges: npt.NDArray[np.int64]) -> tuple[Any, Any]:
        return np.full(len(merges), 1000), np.ones(len(merges), bool)

    monkeypatch.setattr(dropout, "_first_left_out", every_word)
    every = tokens_of(tokenizer, TEXTS)
    assert [cut.tolist() for cut in dropout(every, some_keys(len(every)))] == [cut.tolist() for cut in every]


def test_all_left_out_are_single_bytes(tokenizer: Tokenizer) -> None:
    every = tokens_of(tokenizer, TEXTS)
    found = BPEDropout(tokenizer, 1.0)(every, some_keys(len(every)))
    assert [len(cut) for cut in found] == [len(text.encode()) for text in TEXTS]


@pytest.mark.parametrize("probability", [0.1, 0.5])
@pytest.mark.parametrize("word", [" banananas", " there"])
def test_cuts_are_as_frequent_as_the_algorithm_says(tokenizer: Tokenizer, probability: float, word: str) -> None:
    draws = 20_000
    [tokens] = tokens_of(tokenizer, [word])
    exact = exact_probabilities(tokenizer, word.replace(" ", "Ġ"), probability)
    assert len(exact) > 10
    found = BPEDropout(tokenizer, probability)([tokens] * draws, some_keys(draws))
    counts = Counter(tuple(map(tokenizer.piece, cut)) for cut in found)
    assert set(counts) <= set(exact)
    # Deviations of a binomial count: none of these cuts may be off by five of them.
    for cut, share in exact.items():
        assert abs(counts[cut] - draws * share) <= 5 * max(draws * share * (1 - share), 1) ** 0.5


@pytest.mark.parametrize("probability", [0.1, 0.7])
def test_the_text_stays(tokenizer: Tokenizer, probability: float) -> None:
    every = tokens_of(tokenizer, TEXTS * 20)
    found = BPEDropout(tokenizer, probability)(every, some_keys(len(every)))
    assert [tokenizer.decode(cut.tolist()) for cut in found] == TEXTS * 20
    assert sum(map(len, found)) > sum(map(len, every))


def test_a_cut_depends_on_its_key_alone(tokenizer: Tokenizer) -> None:
    every, keys = tokens_of(tokenizer, TEXTS), some_keys(len(TEXTS))
    together = BPEDropout(tokenizer, 0.4)(every, keys)
    alone = [BPEDropout(tokenizer, 0.4)([tokens], keys[i : i + 1])[0] for i, tokens in enumerate(every)]
    assert [cut.tolist() for cut in alone] == [cut.tolist() for cut in together]
    others = BPEDropout(tokenizer, 0.4)(every, keys + np.uint64(1))
    assert [cut.tolist() for cut in others] != [cut.tolist() for cut in together]


def test_pairs_have_new_cuts_in_every_epoch_and_for_every_seed(tokenizer: Tokenizer) -> None:
    every = tokens_of(tokenizer, TEXTS)
    dropout, numbers = BPEDropout(tokenizer, 0.4), list(range(len(every)))

    def cuts(seed: int, epoch: int) -> list[list[list[int]]]:
        made = NewCuts(dropout, dropout, seed=seed, max_length=10_000, max_tokens=20_000)
        return [[cut.tolist() for cut in side] for side in made(every, every, numbers=numbers, epoch=epoch)]

    assert cuts(0, 0) == cuts(0, 0)
    different = [cuts(0, 0), cuts(0, 1), cuts(1, 0)]
    sides = [side for both in different for side in both]  # source and target are drawn apart
    assert all(one != other for i, one in enumerate(sides) for other in sides[:i])


def test_what_would_be_too_long_stays(tokenizer: Tokenizer) -> None:
    texts = [*TEXTS, "hats on mats"]
    every = tokens_of(tokenizer, texts)
    longest = max(map(len, every)) + 1
    dropout = BPEDropout(tokenizer, 0.5)
    cuts = NewCuts(dropout, dropout, seed=0, max_length=longest, max_tokens=2 * longest)
    sources, _ = cuts(every, every, numbers=range(len(every)), epoch=0)
    assert max(map(len, sources)) + 1 <= longest
    assert any(len(new) > len(old) for new, old in zip(sources, every, strict=True))
    assert [tokenizer.decode(cut.tolist()) for cut in sources] == texts


def test_the_door(tokenizer: Tokenizer) -> None:
    with pytest.raises(ArgumentError, match=r"bpe_dropout must be between 0 and 1, got 1\.5"):
        BPEDropout(tokenizer, 1.5)
    with pytest.raises(ArgumentError, match="expected a tokenizer with merges"):
        BPEDropout(Words().train(["to be"]), 0.1)
    with pytest.raises(DataError, match="tokens of a text"):
        BPEDropout(tokenizer, 0.1)([np.array([1, 2])], some_keys(1))
