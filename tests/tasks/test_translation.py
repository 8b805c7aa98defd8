import json
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from importlib.metadata import version
from itertools import count, islice
from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.files.atomic import checksum_of_file, read_checksummed, write_checksummed
from regard.models.config import TransformerConfig
from regard.tasks.generation.config import Beam
from regard.tasks.pictures.save import page_example
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.text.tokenizer_recipes import Characters
from regard.tasks.translation.results import forced_attention
from regard.tasks.translation.train import (
    TeacherForcing,
    TranslationConfig,
    Translator,
    train_translation,
)
from regard.tasks.translation.translation_model import AlignmentOf
from tests.tasks.small_runs import PAIRS, SMALL, small_config, write_pairs

SOURCES = [source for source, _ in PAIRS]


@pytest.fixture(scope="module", params=["transformer", "rnn"])
def fitted(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Translator:
    folder = tmp_path_factory.mktemp(request.param)
    length: dict[str, Any] = {"steps": 110, "schedule": "cosine", "validate_every": 55, "save_every": 110}
    return train_translation(small_config(folder, model=request.param, vocab_size=330, **length))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("short")
    positions = TransformerConfig(dim=8, num_heads=2, encoder_layers=1, decoder_layers=2, feed_forward_dim=8)
    config = small_config(
        folder,
        transformer=replace(positions, positions="learned", max_length=40),
        max_length=40,
        vocab_size=262,  # all but bytes: a character beyond ASCII is several tokens
        steps=3,
    )
    train_translation(config)
    return config.out


@pytest.fixture
def copied(run: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(run, tmp_path / "copy"))


def test_fifty_pairs_are_learnt_by_heart(fitted: Translator) -> None:
    for beam_size in (1, 3):
        found = fitted.evaluate(PAIRS, beam=Beam(beam_size))
        assert found.bleu.value == pytest.approx(100)
        assert found.chrf.value == pytest.approx(100)
        assert (found.exact_match, found.pairs) == (100.0, 50)
    assert found.loss < 0.1


def test_order_windows_and_batches_change_nothing(fitted: Translator) -> None:
    lines = [*SOURCES[::-1], "", "  ", *SOURCES[:3]]
    together = list(fitted.translate(lines, beam=Beam(2)))
    assert [translation.source for translation in together] == lines
    for one in together[::9]:
        (alone,) = fitted.translate([one.source], beam=Beam(2))
        assert one.text == alone.text
        assert one.candidates[0].score == pytest.approx(alone.candidates[0].score, abs=1e-5)
    by_windows = fitted.translate(iter(lines), beam=Beam(2), window_lines=7)
    assert [one.text for one in by_windows] == [one.text for one in together]
    assert together[50].text == ""


def test_translation_streams(fitted: Translator) -> None:
    """Endless input is answered, and no more than a window of it is read ahead."""
    read = 0

    def endless() -> Iterator[str]:
        nonlocal read
        for index in count():
            read += 1
            yield SOURCES[index % 50]

    found = list(islice(fitted.translate(endless(), beam=Beam(1), window_lines=5), 7))
    assert [one.text for one in found] == [target for _, target in PAIRS[:7]]
    assert read == 10


def test_alignments_are_over_the_printed_labels(run: Path) -> None:
    """Pieces that share a character are one label; rows sum to 1, with nothing on the padding of the batch."""
    translator = Translator.load(run, device="cpu")
    sources = ["木々", "we see звёзды", "", "e"]
    for one in translator.translate(sources, beam=Beam(2), alignments=AlignmentOf()):
        best = one.candidates[0]
        if not one.source:
            assert (best.text, best.alignment) == ("", None)
            continue
        assert one.source_labels[-1] == "<eos>"
        assert len(one.source_labels) <= len(one.source) + 1  # and not one a byte
        assert best.alignment is not None
        assert best.alignment.shape == (len(best.labels), len(one.source_labels))
        torch.testing.assert_close(best.alignment.sum(-1), torch.ones(len(best.labels)), rtol=0, atol=1e-5)


def test_maps_are_over_the_printed_labels(run: Path) -> None:
    translator: Any = Translator.load(run, device="cpu")
    seen = translator.attend("木々 звёзды")
    assert seen.source_labels == ["木", "々", "␣", *"звёзды", "<eos>"]
    merged = seen.maps["encoder.0"]
    source = torch.tensor([[*translator.source_tokenizer.encode("木々 звёзды"), 2]])
    full = translator.model.attend(source, torch.tensor([source.shape[1]]), torch.tensor([[1]]))["encoder.0"].dense()
    # 木 is the first three tokens: their mean looks at itself with the sum over its three.
    torch.testing.assert_close(merged[:, 0, 0], full[0, :, :3, :3].sum(-1).mean(-1))
    torch.testing.assert_close(merged.sum(-1), torch.ones(merged.shape[:-1]), rtol=0, atol=1e-5)


def test_attend_names_every_map(fitted: Translator) -> None:
    seen = fitted.attend("we see two trees")
    assert "木" in "".join(seen.target_labels)
    assert set(seen.alignment_names) <= set(seen.maps)
    for name, weights in seen.maps.items():
        rows, columns = seen.labels(name)
        assert tuple(weights.shape[1:]) == (len(rows), len(columns))
        dense = weights if isinstance(weights, torch.Tensor) else weights.dense()
        assert float((dense.sum(-1) - 1).abs().max()) < 1e-5
    assert len(seen.read_labels) == len(seen.target_labels)
    with pytest.raises(DataError, match="empty sentence"):
        fitted.attend("")


@torch.no_grad()
def test_three_alternatives_of_each_word_are_those_of_a_search(fitted: Translator) -> None:
    """Against the model's own steps, which write the most probable token each time: the next three, best first."""
    source_, target = fitted.source_tokenizer, fitted.target_tokenizer
    (ids,) = source_.encode_batch(["we see two trees"])
    model: Any = fitted.model
    source = torch.tensor([[*ids, source_.marks.end_id]])
    state, before = model.start(source, torch.tensor([source.shape[1]])), target.marks.begin_id
    tokens: list[int] = []
    expected = []
    while before != target.marks.end_id and len(tokens) < 12:
        step = model.step(state, torch.tensor([before]))
        probable = step.logits[0].double().softmax(-1)
        written, *others = probable.argsort(descending=True).tolist()[:4]
        expected.append([(target.labels([one])[0].text.strip(), float(probable[one])) for one in others])
        tokens.append(written)
        state, before = step.state, written
    seen = forced_attention(model, source_, target, ids, tokens, alternatives=3)
    labels = target.labels(tokens)
    told = seen.alternatives(seen.shown)
    assert told is not None
    assert len(told) == len(labels) == len(seen.target_labels)
    for found, label in zip(told, labels, strict=True):
        wanted = expected[label.pieces[0]]
        assert [text.strip() or "␣" for text, _ in found] == [text for text, _ in wanted]
        assert [share for _, share in found] == pytest.approx([share for _, share in wanted], rel=1e-3, abs=1e-6)
    assert seen.alternatives("encoder.0") is None
    assert len(fitted.attend("we see two trees").choices or []) > 0
    example = page_example("we see two trees", seen)
    assert example.maps[seen.shown].alternatives == told


def test_the_loaded_model_is_the_best_one(fitted: Translator, run: Path) -> None:
    history = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    best = min(record["loss"] for record in history if record["event"] == "valid")
    assert Translator.load(run, device="cpu").loss(PAIRS) == pytest.approx(best, abs=1e-5)


def test_a_sentence_longer_than_the_positions_is_named(run: Path) -> None:
    translator = Translator.load(run, device="cpu")
    with pytest.raises(DataError, match="pair 1: 42 tokens"):
        translator.loss([("x" * 41, "y")])
    with pytest.raises(DataError, match="the sentence has 42 tokens"):
        translator.attend("x" * 41)


def test_what_a_run_folder_keeps(run: Path) -> None:
    names = {path.name for path in run.iterdir()}
    ours = "config.json prepared.json source_tokenizer.json target_tokenizer.json best.safetensors last.safetensors"
    assert names >= {*ours.split(), "metrics.jsonl", "train.log", "tensorboard", "data"}
    record = json.loads((run / "config.json").read_text())
    assert record["config"]["seed"] == 0
    assert record["versions"]["torch"] == version("torch")
    assert not [path for path in run.rglob("*") if path.suffix in (".pt", ".pth", ".pkl", ".ckpt", ".bin")]


def test_a_vocabulary_that_does_not_fit(copied: Path) -> None:
    """Both the tokenizer and its fingerprint were replaced: the sizes still tell."""
    other = Characters().train(["abc"])
    other.save(copied / "source_tokenizer.json")
    prepared = read_checksummed(copied / "prepared.json")
    files = prepared["files"] | {"source_tokenizer.json": checksum_of_file(copied / "source_tokenizer.json")}
    changed = {"source_fingerprint": other.fingerprint(), "files": files}
    write_checksummed(copied / "prepared.json", prepared | changed)
    with pytest.raises(RunFolderError, match="does not fit the model: source_embedding"):
        Translator.load(copied)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("prepared.json", "prepared.json is missing"),
        ("target_tokenizer.json", "target_tokenizer.json"),
        ("best.safetensors", "no checkpoint at"),
    ],
)
def test_a_run_folder_that_lacks_a_file(copied: Path, name: str, message: str) -> None:
    (copied / name).unlink()
    with pytest.raises(RunFolderError, match=message):
        Translator.load(copied)


def test_a_run_that_was_killed_before_its_data_was_ready_resumes(config: TranslationConfig) -> None:
    RunFolder(config.out).begin("translation", config)
    (config.out / "source_tokenizer.json").write_text("{ half of a f")
    train_translation(config, resume=True)
    assert RunFolder(config.out).checkpoints.position("last").step == config.fit.steps


def test_shared_vocabulary(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, shared_vocabulary=True, transformer=replace(SMALL["transformer"], shared_embeddings=True), steps=2
    )
    translator: Any = train_translation(config)
    assert translator.source_tokenizer.fingerprint() == translator.target_tokenizer.fingerprint()
    assert (config.out / "tokenizer.json").exists()
    assert Translator.load(config.out).loss(PAIRS) == pytest.approx(translator.loss(PAIRS))


def test_a_lower_cased_translator_reads_any_case_and_is_scored_in_lower_case(tmp_path: Path) -> None:
    pairs = [(source.title(), target.title()) for source, target in PAIRS]
    config = replace(small_config(tmp_path, steps=40, validate_every=40, save_every=40), lowercase=True)
    write_pairs(config.data[0], pairs)
    translator = train_translation(config)
    [as_it_is, upper] = translator.translate([pairs[0][0], pairs[0][0].upper()])
    assert as_it_is.text == upper.text == as_it_is.text.lower()
    shouted, usual = (translator.evaluate(some) for some in ([(s, t.upper()) for s, t in PAIRS], PAIRS))
    assert shouted == usual
    assert "case:lc" in usual.bleu.signature
    assert "case:lc" in usual.chrf.signature
    assert usual.bleu.value > 5.0


def test_a_run_that_fails_ends_the_thread_of_tensorboard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would write into the folder of a run that is removed, and print a traceback."""

    def refuse(*_: object) -> NoReturn:
        raise ArgumentError("no loss")

    monkeypatch.setattr(TeacherForcing, "__call__", refuse)
    with pytest.raises(ArgumentError, match="no loss"):
        train_translation(small_config(tmp_path, steps=2))
    assert not [thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"]
