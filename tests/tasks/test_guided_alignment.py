"""Guided alignment: the loss, the links that a run keeps, a head that learns them, and links that are refused."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.batches import collate
from regard.tasks.text.links import read_links
from regard.tasks.translation.alignment_error import error_of
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.corpus import open_corpus, prepare_corpus
from regard.tasks.translation.forcing import GuidedAlignment, TeacherForcing, misalignment
from regard.tasks.translation.token_batches import TokenBatches
from regard.tasks.translation.train import train_translation
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, SMALL, changed, small_config

CROSSED = "0-3 1-2 2-1 3-0 3-4"
"""Links that no head would find by itself: the words of the pairs stand in the same order."""


def with_links(folder: Path, lines: list[str] | None = None, **changes: Any) -> TranslationConfig:
    (folder / "links").write_text("".join(f"{line}\n" for line in lines or [CROSSED] * len(PAIRS)))
    settings = {"alignment_data": folder / "links", "alignment_valid": folder / "links", "tokenizer": "words"}
    return small_config(folder, **settings | changes)


@pytest.mark.parametrize("kind", ["transformer", "rnn"])
def test_the_loss_is_the_papers_equation(kind: str) -> None:
    """Written out over the whole matrix in float64, with its gradients."""
    model = {"transformer": Transformer, "rnn": RNNSeq2Seq}[kind](
        SMALL[kind], source_vocab_size=11, target_vocab_size=11
    ).double()
    links: list[tuple[Any, Any]] = [
        (np.array([0, 1, 2, 0]), np.array([0, 0, 1, 3])),
        (np.array([], int), np.array([], int)),
        (np.array([2]), np.array([0])),
    ]
    batch = collate([[4, 5, 6], [7], [5, 5, 9, 8]], [[4, 4, 5, 6], [9, 9], [7]], links=links)
    head = 0 if kind == "rnn" else 1
    guided = GuidedAlignment(TeacherForcing(0.1), AlignmentOf(head=head), model.alignment_names, 0.3)
    found = guided(model, batch)
    plain = TeacherForcing(0.1)(model, batch)
    weights = model.attend(batch.source, batch.source_lengths, batch.target_input)[model.alignment_names[-1]].dense()
    expected = plain.total
    for pair, (sources, targets) in enumerate(links):
        for target in sorted(set(map(int, targets))):
            mine = [int(s) for s, t in zip(sources, targets, strict=True) if t == target]
            expected = expected - 0.3 * sum(weights[pair, head, target, s].log() for s in mine) / len(mine)
    assert found.count == plain.count
    torch.testing.assert_close(found.total, expected, rtol=1e-10, atol=0)
    parameters = [p for p in model.parameters() if p.requires_grad]
    gradients = (torch.autograd.grad(total, parameters, retain_graph=True) for total in (found.total, expected))
    for ours, theirs in zip(*gradients, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-7, atol=1e-9)


def test_a_weight_that_is_zero_keeps_the_loss_finite() -> None:
    import regard

    query = torch.tensor([[[[400.0], [1.0]]]], requires_grad=True)
    key = torch.tensor([[[[1.0], [-1.0]]]])
    weights = regard.attention(query, key, key, return_weights=True).weights
    loss = misalignment(weights, torch.tensor([[0, 0, 1], [0, 1, 0]]), 0)
    loss.backward()
    assert loss.isfinite()
    assert query.grad is not None
    assert query.grad.isfinite().all()


@pytest.mark.parametrize("tokenizer", ["words", "characters", "bpe"])
def test_links_of_words_are_kept_as_those_of_their_tokens(tmp_path: Path, tokenizer: str) -> None:
    """Through the store and the batches: each linked token decodes to a piece of the linked word."""
    config = with_links(tmp_path, ["0-0 1-2 3?3"] * len(PAIRS), tokenizer=tokenizer)
    folder = RunFolder(config.out)
    folder.begin("translation", config)
    prepare_corpus(config, folder, lambda line: None)
    corpus = open_corpus(config, folder)
    seen = 0
    for batch in TokenBatches(corpus.train, corpus.links, max_length=256, max_tokens=900, seed=1).epoch(0, 0):
        for pair in range(len(batch.source)):
            source, target = (
                side[pair, : int(length[pair]) - 1].tolist()
                for side, length in ((batch.source, batch.source_lengths), (batch.target_output, batch.target_lengths))
            )
            texts = corpus.source_tokenizer.decode(source), corpus.target_tokenizer.decode(target)
            assert texts in PAIRS
            mine = [(t, s) for p, t, s in batch.links.tolist() if p == pair]
            expected = set()
            for word, of in ((0, 0), (1, 2)):
                tokens = []
                for codec, ids, text, number in (
                    (corpus.source_tokenizer, source, texts[0], word),
                    (corpus.target_tokenizer, target, texts[1], of),
                ):
                    words = text.split()
                    first, last = (len(" ".join(words[:n]).encode()) for n in (number, number + 1))
                    ends = [len(codec.decode(ids[: n + 1]).encode()) for n in range(len(ids))]
                    begins = [0, *ends[:-1]]
                    tokens.append([n for n in range(len(ids)) if ends[n] > first + bool(number) and begins[n] < last])
                expected |= {(t, s) for s in tokens[0] for t in tokens[1]}
            if tokenizer != "bpe" or all(text.isascii() for text in texts):
                assert set(mine) == expected
            assert len(mine) == len(set(mine))
            seen += 1
    assert seen == len(PAIRS)
    assert [one.links.possible for one in corpus.aligned] == [{(0, 0), (1, 2), (3, 3)}] * len(PAIRS)


@pytest.fixture(scope="module", params=["transformer", "rnn"])
def taught(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run whose head 1 (the only one of the recurrent model) was taught links that run against the order of words."""
    folder = tmp_path_factory.mktemp(request.param)
    head = 1 if request.param == "transformer" else 0
    changes = {"model": request.param, "alignment_head": head, "alignment_weight": 1.0}
    config = with_links(folder, steps=40, validate_every=40, save_every=40, **changes)
    train_translation(config)
    return config.out


def test_a_head_learns_the_links_and_is_asked_from_then_on(taught: Path) -> None:
    metrics = [json.loads(line) for line in (taught / "metrics.jsonl").read_text().splitlines()]
    rates = [line["aer"] for line in metrics if line["event"] == "valid"]
    assert rates[-1] < 5 < 60
    translator = Translator.load(taught, device="cpu")
    links = read_links(taught.parent / "links")
    assert error_of(translator, PAIRS, links, translator.alignment) == pytest.approx(rates[-1], abs=3)
    if translator.alignment.head:
        assert error_of(translator, PAIRS, links, AlignmentOf(head=0)) > 50
    assert error_of(translator, PAIRS, links, AlignmentOf(layer=0, head=translator.alignment.head)) < 5
    (asked,) = translator.translate(["we see two cats"], confidence=True, keep_tags=True)
    (named,) = translator.translate(["we see two cats"], confidence=True, alignments=translator.alignment)
    assert asked.candidates[0].confidence == named.candidates[0].confidence
    assert (asked.candidates[0].confidence or named.candidates[0].confidence) is not None


def test_the_head_is_not_taught_without_the_loss(tmp_path: Path) -> None:
    """The same training without links: what the head then looks at has nothing to do with them."""
    config = replace(with_links(tmp_path, steps=20, validate_every=20), alignment_data=None, alignment_valid=None)
    translator = train_translation(config)
    assert error_of(translator, PAIRS, read_links(tmp_path / "links"), AlignmentOf(head=0)) > 50


def test_held_out_pairs_take_their_links_with_them(tmp_path: Path) -> None:
    config = replace(with_links(tmp_path), valid=(), alignment_valid=None)
    train_translation(changed(config, steps=3))
    corpus = open_corpus(config, RunFolder(config.out))
    assert corpus.links is not None
    assert len(corpus.links) == len(corpus.train)
    assert len(corpus.aligned) == len(corpus.valid) > 0
    assert len(corpus.train) + len(corpus.valid) == len(PAIRS)


def test_resumed_is_the_same_to_the_bit(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    whole = train_translation(with_links(tmp_path / "a", tokenizer="bpe", steps=9))
    half = with_links(tmp_path / "b", tokenizer="bpe", steps=5)
    train_translation(half)
    resumed = train_translation(changed(half, steps=9), resume=True)
    for ours, theirs in zip(resumed.model.parameters(), whole.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    with pytest.raises(RunFolderError, match=r"has alignment_weight 0\.05, not 0\.1"):
        train_translation(replace(half, alignment_weight=0.1), resume=True)


def test_recomputed_layers_teach_the_same(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    one, other = (
        train_translation(with_links(tmp_path / name, steps=4, gradient_checkpointing=name == "b")) for name in "ab"
    )
    for ours, theirs in zip(one.model.parameters(), other.model.parameters(), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([CROSSED] * 3 + ["4-0"] + [CROSSED] * 46, r"links:4: expected words from 0 to 3 and 0 to 4, got 4-0"),
        ([CROSSED] * 7 + ["0-0 1:1"] + [CROSSED] * 42, r"links:8: expected links like 0-0 .* got '1:1'"),
        ([CROSSED] * 49, r"links ends after line 49, before the pairs: expected a line of links for each"),
        ([CROSSED] * 51, r"links:51: expected a line of links for each of 50 pairs, got one more"),
    ],
)
def test_bad_links_end_the_run_and_leave_nothing(tmp_path: Path, lines: list[str], said: str) -> None:
    config = with_links(tmp_path, lines)
    with pytest.raises(DataError, match=said):
        train_translation(config)
    assert not config.out.exists()


def test_a_bad_line_of_links_is_left_out_with_its_pair(tmp_path: Path) -> None:
    lines = [CROSSED, "9-9", "x"] + [CROSSED] * 47
    config = with_links(tmp_path, lines, bad_lines="skip", valid=(), alignment_valid=None)
    folder = RunFolder(config.out)
    folder.begin("translation", config)
    said: list[str] = []
    prepare_corpus(config, folder, said.append)
    corpus = open_corpus(config, folder)
    assert len(corpus.train) + len(corpus.valid) == len(PAIRS) - 2
    assert "; 2 bad lines left out; the first: " in said[0]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"alignment_head": 2}, "alignment_head must be from -2 to 1, as the decoder has 2, got 2"),
        ({"alignment_layer": -2}, "alignment_layer must be from -1 to 0, as the decoder has 1, got -2"),
        ({"alignment_weight": 0.0}, "alignment_weight must be above 0"),
        ({"alignment_data": None, "alignment_valid": None, "alignment_head": 1}, "alignment_head is for a head that"),
        ({"alignment_data": None, "alignment_valid": None, "alignment_weight": 1.0}, "add --alignment-data"),
        ({"valid": ()}, "alignment_valid links the pairs of --valid"),
        ({"model": "rnn", "alignment_head": 1}, "alignment_head must be from -1 to 0"),
    ],
)
def test_settings_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        with_links(tmp_path, **changes)
