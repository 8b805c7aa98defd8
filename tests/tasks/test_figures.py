"""Figures tell what they could not see: references are text; unknown tokens and cut translations are counted."""

import os
import random
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from sacrebleu.metrics.bleu import BLEU

from regard.errors import ArgumentError, RunFolderError
from regard.models.config import DecoderOnlyConfig
from regard.tasks import Translator, train_translation
from regard.tasks.generation.config import Beam
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.train import train_language_model
from regard.tasks.runs import run as runs
from regard.tasks.text.pairs import read_pairs
from regard.tasks.text.tokenizers import EOS, UNK
from regard.tasks.training.metrics import bleu, bleu_caution, fitting_tokenizer
from regard.tasks.training.reporting import Event, Validated
from regard.tasks.translation.translation_model import Request
from tests import each_once
from tests.conftest import Call
from tests.tasks.small_runs import PAIRS, small_config, small_text_config, write_pairs
from tests.tasks.test_translate_options import favour, make

ENGLISH = (("I", "she", "we"), ("eat", "buy", "see"), ("apples", "tea", "rice"), ("today", "now", "at home"))
# Subject, verb, object and time, and their order in a sentence with its full stop.
LANGUAGES: dict[str, tuple[tuple[str, ...], tuple[str, ...], tuple[str, ...], tuple[str, ...], str]] = {
    "fr": (("Je", "Elle", "On"), ("mange", "achète", "voit"), ("des pommes", "du thé", "du riz"),
           ("aujourd'hui", "maintenant", "chez nous"), "{0} {1} {2} {3}."),
    "zh": (("我", "她", "我们"), ("吃", "买", "看见"), ("苹果", "茶", "米饭"), ("今天", "现在", "在家"),
           "{0}{3}{1}{2}。"),
    "ja": (("私は", "彼女は", "私たちは"), ("食べる", "買う", "見る"), ("りんごを", "お茶を", "ご飯を"),
           ("今日", "今", "家で"), "{0}{3}{2}{1}。"),
    "th": (("ฉัน", "เธอ", "เรา"), ("กิน", "ซื้อ", "เห็น"), ("แอปเปิล", "ชา", "ข้าว"), ("วันนี้", "ตอนนี้", "ที่บ้าน"),
           "{0}{1}{2}{3}"),
    "hi": (("मैं", "वह", "हम"), ("खाना", "ख़रीदना", "देखना"), ("सेब", "चाय", "चावल"), ("आज", "अभी", "घर पर"),
           "{0} {3} {2} {1}।"),
}  # fmt: skip
TOKENIZED_AS = {"fr": "13a", "zh": "zh", "ja": "char", "th": "char", "hi": "13a"}
KINDS: dict[str, dict[str, Any]] = {
    "bpe": {"tokenizer": "bpe", "vocab_size": 300},
    "words": {"tokenizer": "words", "vocab_size": 12},  # most words are unknown
    "characters": {"tokenizer": "characters", "vocab_size": 24},
}


def pairs_of(language: str) -> list[tuple[str, str]]:
    *words, order = LANGUAGES[language]
    chosen = list(product(range(3), repeat=4))
    found = [
        (" ".join(side[i] for side, i in zip(ENGLISH, at, strict=True)) + ".",
         order.format(*(side[i] for side, i in zip(words, at, strict=True))))
        for at in chosen
    ]  # fmt: skip
    return found[::2] + found[1::2]


@pytest.mark.parametrize(("kind", "language"), each_once(KINDS, LANGUAGES))
@pytest.mark.usefixtures("as_installed")
def test_train_and_evaluate_agree(language: str, kind: str, tmp_path: Path) -> None:
    """On pairs that were held out, in any script, however many of their words the tokenizer lacks."""
    every, beam = pairs_of(language), Beam(2)
    data, valid = write_pairs(tmp_path / "train.tsv", every[:-7]), write_pairs(tmp_path / "held.tsv", every[-7:])
    settings = {"data": (data,), "valid": (valid,), "steps": 24, "validate_every": 24, "save_every": 24, **KINDS[kind]}
    config = small_config(tmp_path, **settings, validation_beam=2, best_by="bleu", lowercase=kind == "words")
    told: list[dict[str, float]] = []

    def listen(event: Event) -> None:
        if isinstance(event, Validated):
            told.append(dict(event.metrics))

    translator = train_translation(config, callbacks=[listen])
    held = list(read_pairs(valid))
    found = translator.evaluate(held, beam=beam)
    assert told[-1]["bleu"] == pytest.approx(found.bleu.value)
    assert told[-1]["loss"] == pytest.approx(found.loss, rel=1e-4)
    assert f"tok:{TOKENIZED_AS[language]}" in found.bleu.signature
    log = (config.out / "train.log").read_text()
    assert f"BLEU of the validation pairs: {found.bleu.signature}" in log
    assert (found.unknown > 0.3) == (kind == "words")
    assert ("of the tokens of the validation targets are unknown" in log) == (found.unknown > 0)


def test_the_figure_is_that_of_sacrebleu_on_texts(run_of_words: Path, tmp_path: Path) -> None:
    translator, pairs = Translator.load(run_of_words, device="cpu"), pairs_of("zh")[:5] + PAIRS[:5]
    texts = [one.text for one in translator.translate([source for source, _ in pairs])]
    for tokenize in ("13a", "zh"):
        metric = BLEU(tokenize=tokenize)
        expected = metric.corpus_score(texts, [[target for _, target in pairs]])
        found = translator.evaluate(pairs, bleu_tokenize=tokenize)
        assert found.bleu.value == pytest.approx(expected.score)
        assert found.bleu.signature == str(metric.get_signature())


def test_the_tokenizer_fits_the_script(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = {name: [target for _, target in pairs_of(name)] for name in LANGUAGES}
    assert {name: fitting_tokenizer(texts[name]) for name in LANGUAGES} == TOKENIZED_AS
    assert fitting_tokenizer(["나는 오늘 집에서 차를 마신다."]) == "13a"  # it has spaces
    assert fitting_tokenizer(["", "12 345 !"]) == "13a"
    monkeypatch.setattr("regard.tasks.training.metrics.find_spec", lambda name: object())
    assert fitting_tokenizer(texts["ja"]) == "ja-mecab"
    assert fitting_tokenizer(texts["zh"]) == "zh"


def test_a_tokenizer_that_finds_no_spaces_says_so() -> None:
    chinese, french = ([target for _, target in pairs_of(name)] for name in ("zh", "fr"))
    assert bleu_caution(french, "auto") is None
    assert "13a finds no spaces in this script: BLEU is by sacrebleu's tokenizer zh" in str(
        bleu_caution(chinese, "auto")
    )
    for tokenize in ("13a", "none"):
        assert f"{tokenize} finds no spaces in most references" in str(bleu_caution(chinese, tokenize))
    assert bleu_caution(chinese, "char") is None
    assert "13a finds no spaces in most references" in str(bleu_caution(["chat", "chien"], "auto"))  # no runs of four
    with pytest.raises(ArgumentError, match=r"bleu_tokenize ja-mecab is not installed .*: take char"):
        bleu(chinese, chinese, tokenize="ja-mecab")


def test_the_flags_choose_and_the_lines_are_said(call: Call, run_of_words: Path, tmp_path: Path) -> None:
    data = str(write_pairs(tmp_path / "zh.tsv", [("we see two cats", target) for _, target in pairs_of("zh")[:3]]))
    command = ("evaluate", str(run_of_words), "--data", data, "--beam", "1", "--device", "cpu")
    status, out, err = call(*command)
    assert (status, "tok:zh" in out) == (0, True)
    assert "13a finds no spaces in this script" in err
    status, out, err = call(*command, "--bleu-tokenize", "13a")
    assert (status, "tok:13a" in out) == (0, True)
    assert "13a finds no spaces in most references" in err
    status, _, err = call(*command, "--bleu-tokenize", "ja-mecab")
    assert (status, err.splitlines()[-1][:53]) == (2, "regard: --bleu-tokenize ja-mecab is not installed (Ja")


def test_where_bleu_tells_nothing_the_loss_decides_in_training(tmp_path: Path) -> None:
    """Else the first of many models with a BLEU of 0 is the best."""
    single = write_pairs(tmp_path / "one.tsv", [(source, target.split()[0]) for source, target in PAIRS])
    config = small_config(
        tmp_path, data=(single,), valid=(single,), best_by="bleu", steps=20, validate_every=10, save_every=10
    )
    told: list[Validated] = []
    train_translation(config, callbacks=[lambda event: told.append(event) if isinstance(event, Validated) else None])
    assert [one.metrics["bleu"] for one in told] == [0.0, 0.0]
    assert told[1].metrics["loss"] < told[0].metrics["loss"]
    assert told[1].is_best
    assert "13a finds no spaces in most references" in (config.out / "train.log").read_text()


def text_config(folder: Path, **changes: Any) -> LanguageModelConfig:
    words = ["to", "be", "or", "not", "to", "be", "that", "is", "the", "question"]
    lines = [" ".join(random.Random(n).sample(words, len(words))) for n in range(40)]
    own: dict[str, Any] = {"tokenizer": "words", "vocab_size": 7, "block_length": 16, "steps": 8, "validate_every": 8}
    model = DecoderOnlyConfig(dim=16, num_heads=2, num_layers=1, feed_forward_dim=16)
    return small_text_config(folder, lines=lines, model=model, batch_tokens=128, warmup_steps=2, **own, **changes)


def test_no_bits_per_byte_where_much_is_unknown(tmp_path: Path, call: Call) -> None:
    config = text_config(tmp_path)
    told: list[Validated] = []
    writer: Any = train_language_model(
        config, callbacks=[lambda event: told.append(event) if isinstance(event, Validated) else None]
    )
    assert all("bits_per_byte" not in one.metrics for one in told)
    assert "no bits per byte: more than 1% of the tokens" in (config.out / "train.log").read_text()
    lines = (tmp_path / "text.txt").read_text().splitlines()
    ids = [token for line in lines for token in writer.tokenizer.encode_batch([line])[0]]
    found = writer.evaluate(lines)
    assert found.unknown == pytest.approx(ids.count(UNK) / found.tokens)
    assert found.bits_per_byte is None
    known = writer.evaluate(["to be to be"])
    assert (known.unknown, known.bits_per_byte is None) == (0.0, False)
    status, out, _ = call("evaluate", str(config.out), "--data", str(tmp_path / "text.txt"), "--device", "cpu")
    rows = dict(line.split("\t")[:2] for line in out.splitlines())
    assert (status, rows["bits per byte"], rows["unknown"]) == (0, "none", f"{100 * found.unknown:.2f}")


SHORT, LONG = "we see one", "we see one red house and they see two and a cat a dog and three trees"


@pytest.fixture
def endless() -> Translator:
    translator = make(positions="sinusoidal", decoder_layers=1)
    favour(translator, EOS, -99.0)
    return translator


@pytest.mark.parametrize("beam", [Beam(1), Beam(3)])
@pytest.mark.usefixtures("as_installed")
def test_the_limit_is_a_lines_own(endless: Translator, beam: Beam) -> None:
    lines: list[str | Request] = [SHORT, LONG, Request(SHORT, "on voit " * 20)]
    alone = [next(endless.translate([line], beam=beam, max_length=99)) for line in lines]
    beside = list(endless.translate(lines, beam=beam, max_length=99))
    assert [one.candidates[0].labels for one in beside] == [one.candidates[0].labels for one in alone]
    counts = [len(one.candidates[0].labels) for one in beside]
    assert counts == [64, 96, 128]  # 2 n + 50 and the prefix, rounded up
    assert not any(one.candidates[0].finished for one in beside)
    most = list(endless.translate(lines[:2], beam=beam, max_length=99, max_target_length=7))
    assert [len(one.candidates[0].labels) for one in most] == [7, 7]
    long = next(endless.translate([SHORT], beam=beam, max_length=99, max_target_length=70))
    assert len(long.candidates[0].labels) == 70
    (bad,) = endless.translate(lines[2:], max_length=99, max_target_length=7, bad_lines="skip")
    assert bad.problem == "a prefix of 41 tokens, and the model writes 7 at most"


def test_the_commands_count_them(call: Call, run_of_words: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("we see two cats\n\nwe see one trees\n")
    command = ("translate", str(run_of_words), "--input", str(lines), "--device", "cpu", "--max-length", "9")
    for engine in ("regard", "ctranslate2"):
        status, out, err = call(*command, "--engine", engine)
        assert (status, err) == (0, "")
        status, short, err = call(*command[:-1], "5", "--engine", engine)
        assert (status, out.count("\n")) == (0, 3)
        assert err == "translations cut off by the limit of their tokens: 2; the first: line 1; raise --max-length\n"
        assert [len(line.split()) for line in out.splitlines()] == [5, 0, 5]
        assert engine != "regard" or short == "on\n\non\n"  # the beam has a worse one, which ended in time
    data = str(write_pairs(tmp_path / "pairs.tsv", PAIRS[:4]))
    evaluated = ("evaluate", str(run_of_words), "--data", data, "--device", "cpu")
    assert "cut off" not in call(*evaluated)[1]
    assert "cut off\t4\t" in call(*evaluated, "--max-length", "3")[1]


def test_generate_counts_texts_without_their_end(call: Call, tmp_path: Path) -> None:
    """If the model ends texts at all."""
    for documents, said in (
        ("lines", "texts cut off by the limit of their tokens: 2; raise --max-tokens\n"),
        ("file", ""),
    ):
        config = text_config(tmp_path, documents=documents)
        train_language_model(replace(config, out=tmp_path / documents))
        run = ("generate", str(tmp_path / documents), "to", "--samples", "2", "--device", "cpu", "--max-tokens")
        assert call(*run, "1")[::2] == (0, said)
    assert call(*run[:1], str(tmp_path / "lines"), *run[2:], "300")[::2] == (0, "")


def test_a_busy_machine_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setattr(os, "getloadavg", lambda: (99.0, 0.0, 0.0))
    monkeypatch.setattr(os, "cpu_count", lambda: 2)
    try:
        torch.set_num_threads(2)
        config = small_config(tmp_path, steps=1)
        train_translation(config)
        line = "the machine is busy (a load of 99.0 on 2 cores, and 2 threads more): beside other work fewer threads"
        assert line in (config.out / "train.log").read_text()
        train_translation(replace(config, out=tmp_path / "one", threads=1))
        assert torch.get_num_threads() == 1
        assert "busy" not in (tmp_path / "one" / "train.log").read_text()
    finally:
        torch.set_num_threads(before)
    with pytest.raises(ArgumentError, match="threads must be at least 1, got 0"):
        small_config(tmp_path, threads=0)


def test_a_refused_setting_is_told_as_it_was_written(tmp_path: Path) -> None:
    other = write_pairs(tmp_path / "other.tsv")
    config = small_config(tmp_path)
    for change, said in (
        ({"data": (other, other)}, rf"has data \S+pairs.tsv, not {other} {other}; it can"),
        ({"warm_start": other}, f"has warm_start none, not {other}; it can"),
        ({"transformer": replace(config.transformer, num_heads=4)}, "has transformer.num_heads 2, not 4; it can"),
    ):
        with pytest.raises(RunFolderError, match=said):
            runs.check_resumed(replace(config, **change), config)
