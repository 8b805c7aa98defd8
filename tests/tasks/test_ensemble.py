"""Ensembles: the mean of probabilities in the loss and in every search, and what is refused."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import run_command
from regard.errors import ArgumentError
from regard.models import Ensemble, RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig
from regard.tasks.generation.config import Beam
from regard.tasks.translation.search_job import SearchJob, search
from regard.tasks.translation.train import run_translation
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, changed, small_config

SIZES: dict[str, Any] = {"source_vocab_size": 30, "target_vocab_size": 30}
JOB = SearchJob(sources=[[4, 9, 7, 2], [5, 2], [8, 8, 8, 8, 8, 2]], begin_id=1, end_id=2, max_steps=9)


def members() -> list[Any]:
    torch.manual_seed(0)
    small = TransformerConfig(dim=16, num_heads=2, encoder_layers=1, decoder_layers=1, feed_forward_dim=16)
    wide = replace(small, dim=24, decoder_layers=2, positions="learned", max_length=12)
    made = [Transformer(small, **SIZES), Transformer(wide, **SIZES), RNNSeq2Seq(RNNConfig(hidden_dim=8), **SIZES)]
    for model in made:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.5)
    return [model.eval().requires_grad_(False) for model in made]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Two runs with the same tokenizers, of different kinds, and one with others."""
    folder = tmp_path_factory.mktemp("runs")
    config = small_config(folder, steps=60, validate_every=60, save_every=60, warmup_steps=20, out=folder / "first")
    run_translation(config)
    run_translation(changed(config, out=folder / "second", model="rnn", seed=1, steps=30))
    run_translation(changed(config, out=folder / "other", tokenizer="characters", steps=1))
    return folder / "first", folder / "second", folder / "other"


@pytest.mark.parametrize("size", [1, 4])
def test_scores_of_a_search_are_those_of_the_mean(size: int) -> None:
    models = members()
    both: Any = Ensemble(models)
    found = search(both, replace(JOB, beam=Beam(size, num_best=size)))
    assert both.max_length == 12
    for source, best in zip(JOB.sources, found, strict=True):
        for one in best:
            given = torch.tensor([source]), torch.tensor([len(source)]), torch.tensor([[1, *one.tokens[:-1]]])
            mean = torch.stack([model(*given).double().softmax(-1) for model in models]).mean(0)[0]
            gains = mean.log()[torch.arange(len(one.tokens)), one.tokens]
            score = gains.sum() if size == 1 else gains.mean()  # greedy search does not divide by the length
            assert one.score == pytest.approx(float(score), abs=1e-3)
            torch.testing.assert_close(both(*given)[0].double().exp(), mean, rtol=1e-4, atol=1e-6)


def test_an_ensemble_of_one_model_translates_as_the_model() -> None:
    model = members()[0]
    for decoder in (Ensemble([model]), Ensemble([model, model])):
        found, expected = (search(one, replace(JOB, beam=Beam(3))) for one in (decoder, model))
        assert [best[0].tokens for best in found] == [best[0].tokens for best in expected]


def test_runs_translate_together(runs: tuple[Path, Path, Path]) -> None:
    first, second, _ = runs
    alone = Translator.load(first, device="cpu")
    both: Any = Translator.load(first, device="cpu", ensemble=[second])
    pair = [PAIRS[0]]
    batch = both.collate(alone.source_tokenizer.encode_batch([PAIRS[0][0]]), [[5, 6]])
    given = batch.source, batch.source_lengths, batch.target_input
    for name, expected in alone.model.attend(*given).items():  # what it attends to is the first's
        torch.testing.assert_close(both.model.attend(*given)[name].dense(), expected.dense())
    assert both.fingerprint() != alone.fingerprint()
    losses = [translator.loss(pair) for translator in (alone, Translator.load(second, device="cpu"), both)]
    assert losses[2] < (losses[0] + losses[1]) / 2  # the logarithm of a mean is above the mean of logarithms


def test_the_command_line(runs: tuple[Path, Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second, other = map(str, runs)
    source = PAIRS[3][0]
    assert run_command(["translate", first, source, "--ensemble", second, "--device", "cpu"]) == 0
    both = Translator.load(first, device="cpu", ensemble=[second])
    assert capsys.readouterr().out.strip() == next(both.translate([source])).text
    data = tmp_path / "pairs.tsv"
    data.write_text("".join(f"{a}\t{b}\n" for a, b in PAIRS[:4]), encoding="utf-8")
    assert run_command(["evaluate", first, "--data", str(data), "--ensemble", second, "--device", "cpu"]) == 0
    assert f"loss\t{both.loss(PAIRS[:4]):.4f}" in capsys.readouterr().out
    for wrong, message in ((other, "need the same tokenizers"), (str(tmp_path / "nowhere"), "nowhere")):
        for command in (["translate", first, source], ["evaluate", first, "--data", str(data)]):
            assert run_command([*command, "--ensemble", wrong, "--device", "cpu"]) == 2
            said = capsys.readouterr()
            assert said.out == ""
            assert message in said.err
            assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("command", ["translate {} word", "evaluate {} --data {}"])
def test_another_engine_searches_for_one_run(
    command: str, runs: tuple[Path, Path, Path], capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        *command.format(runs[0], runs[0].parent / "pairs.tsv").split(),
        "--ensemble",
        str(runs[1]),
        "--engine",
        "ctranslate2",
    ]
    assert run_command(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "regard: --engine ctranslate2 searches for one run: leave out --ensemble"


def test_a_pupil_learns_from_what_a_run_writes(runs: tuple[Path, Path, Path], tmp_path: Path) -> None:
    """The two commands of docs/translate.md."""
    (tmp_path / "train.en").write_text("".join(f"{source}\n" for source, _ in PAIRS), encoding="utf-8")
    distilled, pupil = tmp_path / "distilled.fr", tmp_path / "pupil"
    made = f"translate {runs[0]} --input {tmp_path / 'train.en'} --output {distilled} --max-length 1000 --device cpu"
    made += " --engine regard"  # a beam of CTranslate2 ends earlier
    assert run_command(made.split()) == 0
    written = distilled.read_text(encoding="utf-8").splitlines()
    assert written == [one.text for one in Translator.load(runs[0], device="cpu").translate(s for s, _ in PAIRS)]
    sizes = "--transformer.dim 8 --transformer.num-heads 2 --vocab-size 300 --steps 1 --pictures 0 --device cpu"
    learn = f"train --out {pupil} --data {tmp_path / 'train.en'} {distilled} {sizes}"
    assert run_command(learn.split()) == 0
    assert "45 pairs to train on, 5 held out" in (pupil / "train.log").read_text()


def test_what_is_no_ensemble_is_refused() -> None:
    with pytest.raises(ArgumentError, match="at least one model"):
        Ensemble([])
    small = TransformerConfig(dim=8, num_heads=2)
    other = Transformer(small, source_vocab_size=30, target_vocab_size=31)
    with pytest.raises(ArgumentError, match=r"one vocabulary, got sizes \[30, 31\]"):
        Ensemble([members()[0], other])
