"""BPE dropout and Muon as settings of a run: what they change, what they leave alone, and resuming."""

from collections.abc import Callable
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pytest

from regard.errors import ArgumentError
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text import sections as sections_module
from regard.tasks.text.batches import Batch, padding_share
from regard.tasks.translation import token_batches
from regard.tasks.translation.corpus import new_cuts, open_corpus, prepare_corpus
from regard.tasks.translation.token_batches import TokenBatches
from regard.tasks.translation.train import run_translation
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, changed, small_config
from tests.training.test_attention_log import RUNS, lines, tensors_of

SOME_DROPOUT: dict[str, Any] = {"translation": "transformer", "recurrent translation": "rnn"}


def settings(task: str, folder: Path, **changes: Any) -> Any:
    """A run of four steps with dropout in its model."""
    folder.mkdir()
    config = RUNS[task][0](folder, steps=4, validate_every=2, save_every=2)
    part = SOME_DROPOUT.get(task, "model")
    return replace(config, **{part: replace(getattr(config, part), dropout=0.2)}, **changes)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("translation", {"bpe_dropout": 0.3, "batch_tokens": 900}),
        ("recurrent translation", {"bpe_dropout": 0.3, "optimizer": "muon"}),
        ("translation", {"optimizer": "muon", "muon_rate": 2.0}),
        ("language model", {"optimizer": "muon"}),
    ],
)
def test_a_run_is_another_and_resumes_bit_for_bit(task: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name in ("plain", "whole", "parted"):
        config = settings(task, tmp_path / name, **{} if name == "plain" else options)
        for steps in (1, 4) if name == "parted" else (4,):
            RUNS[task][1](changed(config, steps=steps), resume=True)
        found.append(tensors_of(config.out))
    plain, whole, parted = found
    assert parted == whole
    weights = [name for name in whole if name.startswith("last/model")]
    assert weights
    assert any(plain[name] != whole[name] for name in weights)


def test_validation_and_translation_cut_as_always(tmp_path: Path) -> None:
    config = small_config(tmp_path, steps=3, bpe_dropout=0.5)
    run_translation(config)
    translator = Translator.load(config.out, checkpoint="last")
    assert lines(config.out, "valid")[-1]["loss"] == pytest.approx(translator.loss(PAIRS), rel=1e-5)


@pytest.fixture(params=[2**16, 16], ids=["one section", "sections"])
def cut_anew(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Makes the batches of a corpus of fifty pairs, cut anew; also in sections of some 16 pairs, in runs of 4."""
    monkeypatch.setattr(token_batches, "FRESH_PAIRS", request.param)
    monkeypatch.setattr(token_batches, "CUT_TOGETHER_PAIRS", 8)
    monkeypatch.setattr(sections_module, "RUN_ROWS", 4)
    config = small_config(tmp_path, bpe_dropout=0.4, batch_tokens=200)
    folder = RunFolder(config.out)
    folder.path.mkdir()
    prepare_corpus(config, folder, lambda line: None)
    corpus = open_corpus(config, folder)

    def make(rank: int = 0, world_size: int = 1, **changes: Any) -> TokenBatches:
        limits: dict[str, Any] = {"max_length": config.max_length, "max_tokens": 200, "seed": config.seed}
        cuts = new_cuts(config, corpus)
        return TokenBatches(corpus.train, **{**limits, "cuts": cuts, "rank": rank, "world_size": world_size} | changes)

    return make


def rows(batch: Batch) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """The tokens of each pair."""
    sides = (batch.source, batch.target_output)
    return list(zip(*([tuple(row[row != 0].tolist()) for row in side] for side in sides), strict=True))


def tokens_of(pairs: list[tuple[tuple[int, ...], tuple[int, ...]]]) -> int:
    return sum(len(side) for pair in pairs for side in pair)


def test_ranks_share_the_batches_of_one(cut_anew: Callable[..., Any]) -> None:
    one, first, second = (list(cut_anew(*share).epoch(1, 0)) for share in ((0, 1), (0, 2), (1, 2)))
    assert len(one) > 3
    for whole, *shares in zip_longest(one, first, second):
        assert sorted(rows(whole)) == sorted(row for share in shares for row in rows(share))
    for start in range(len(one) + 1):
        again = list(cut_anew().epoch(1, start))
        assert [rows(batch) for batch in again] == [rows(batch) for batch in one[start:]]


def test_batches_are_planned_by_the_new_cuts(cut_anew: Callable[..., Any]) -> None:
    """All pairs are there, and no batch has more places than are allowed; padding is little."""
    stored = sorted(row for batch in cut_anew(cuts=None).epoch(0, 0) for row in rows(batch))
    found = [list(cut_anew().epoch(epoch, 0)) for epoch in range(2)]
    cut = [sorted(row for batch in batches for row in rows(batch)) for batches in found]
    assert cut[0] != cut[1]
    for batches, pairs in zip(found, cut, strict=True):
        assert len(pairs) == len(stored) == len(PAIRS)
        assert tokens_of(pairs) > tokens_of(stored)
        assert max(batch.padded_tokens for batch in batches) <= 200
        assert padding_share(batches) < 0.2  # by the usual cuts it would be a third
    assert abs(cut_anew().count() - len(found[0])) <= 1


def test_a_cut_is_that_of_the_pairs_number(cut_anew: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where pairs are cut a few at a time, and sections are others."""
    found = []
    for together in (8, 50):
        monkeypatch.setattr(token_batches, "CUT_TOGETHER_PAIRS", together)
        monkeypatch.setattr(token_batches, "FRESH_PAIRS", together * 2)
        found.append(sorted(row for batch in cut_anew().epoch(0, 0) for row in rows(batch)))
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"bpe_dropout": 1.5}, r"bpe_dropout must be between 0 and 1, got 1\.5"),
        ({"bpe_dropout": 0.1, "tokenizer": "words"}, "bpe_dropout leaves out merges, .* got words"),
        ({"muon_rate": 0.0, "optimizer": "muon"}, r"muon_rate must be above 0, got 0\.0"),
        ({"muon_rate": 2.0}, "muon_rate is for --optimizer muon, and this is adamw"),
        ({"muon_rate": 1e300, "optimizer": "muon"}, r"muon_rate must be at most 1e\+18, got 1e\+300"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        small_config(tmp_path, **changes)
