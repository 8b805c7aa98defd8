"""CTranslate2's decoder-only export writes what our own models write."""

import subprocess
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import run_command
from regard.errors import ArgumentError
from regard.models.config import DecoderOnlyConfig
from regard.models.decoder_only import DecoderOnly
from regard.tasks.exports.ctranslate2_text import ExportedText, exported_text, text_to_ctranslate2
from regard.tasks.exports.text_engine import CTranslate2Writer, sampling_of, writing_by_ctranslate2
from regard.tasks.generation.filters import Filter, MinP, Temperature, TopK, TopP
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.train import train_language_model
from regard.tasks.runs.run_folder import ENGINE
from regard.tasks.text.tokenizer_recipes import Characters
from regard.tasks.training.fit_config import FitConfig
from tests import each_once

ctranslate2 = pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
SMALL = DecoderOnlyConfig(dim=16, num_heads=2, num_layers=2, feed_forward_dim=24, max_length=24, dropout=0.0)
TEXT = "".join(f"{n} times {m} is {n * m}.\n" for n in range(9) for m in range(9))
CONFIGS: dict[str, dict[str, Any]] = {
    "rotary": {},
    "learned": {"positions": "learned"},
    "sinusoidal": {"positions": "sinusoidal", "activation": "relu", "embedding_gain": 3.0},
    "grouped": {"num_kv_heads": 1, "norm": "rms", "activation": "swiglu"},
    "post": {"norm_position": "post", "tied_output": False},
    "post, learned": {"norm_position": "post", "positions": "learned", "norm": "rms"},
}


def model_of(name: str, documents: Any = "file") -> LanguageModel:
    """A model whose every weight and bias matters."""
    torch.manual_seed(1)
    config = replace(SMALL, **CONFIGS[name])
    tokenizer = Characters().train([TEXT])
    model = DecoderOnly(config, vocab_size=len(tokenizer))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.2 * torch.randn_like(parameter))
    return LanguageModel(model, tokenizer, block_length=24, documents=documents)


def export(language: LanguageModel, folder: Path) -> Path:
    tokenizer: Any = language.tokenizer
    config: Any = language.model.config
    text_to_ctranslate2(ExportedText(language.model, config, tokenizer, language.block_length), folder)
    return folder


def writer_of(language: LanguageModel, folder: Path) -> CTranslate2Writer:
    folder.mkdir()
    made = export(language, folder)
    return CTranslate2Writer(made, language.language, device=torch.device("cpu"), precision="float32")


@pytest.mark.parametrize("name", CONFIGS)
def test_its_probabilities_are_those_of_our_model(name: str, tmp_path: Path) -> None:
    language = model_of(name)
    tokenizer: Any = language.tokenizer
    theirs = ctranslate2.Generator(str(export(language, tmp_path)), device="cpu", intra_threads=1)
    ids = language.language.prompt("3 times 4 is 12")
    with torch.no_grad():
        ours = language.model(torch.tensor([ids]))[0, :-1].log_softmax(-1)
    expected = ours.gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
    (found,) = theirs.score_batch([[tokenizer.piece(number) for number in ids]])
    torch.testing.assert_close(torch.tensor(found.log_probs), expected, atol=1e-4, rtol=0)
    del theirs


@pytest.mark.parametrize(("documents", "name"), each_once(["file", "lines"], CONFIGS))
def test_it_writes_our_greedy_tokens_beyond_a_block(name: str, documents: str, tmp_path: Path) -> None:
    language = model_of(name, documents)
    greedy: dict[str, Any] = {"filters": [TopK(1)], "max_tokens": 60}
    prompts = ["", "3 times", "1 times 2 is 2.\n2 times 2 is 4"]
    ours = ["".join(language.generate(prompt, **greedy)) for prompt in prompts]
    assert len(set(ours)) > 1, "every prompt has one answer: nothing is compared"
    language.writer = writer_of(language, tmp_path / "export")
    assert ["".join(language.generate(prompt, **greedy)) for prompt in prompts] == ours
    assert list(language.samples("3 times", count=3, **greedy)) == [ours[1]] * 3
    stop = ours[0][5:7]
    language.writer, own = None, language.writer
    expected = "".join(language.generate("", stop=[stop], **greedy))
    language.writer = own
    assert "".join(language.generate("", stop=[stop], **greedy)) == expected


@pytest.mark.parametrize(
    "filters",
    [
        [],
        [Temperature(0.5)],
        [TopK(4)],
        [TopP(0.6)],
        [Temperature(2.0), TopK(5)],
        [Temperature(1.5), TopK(8), TopP(0.7)],
    ],
)
def test_it_draws_from_our_distribution(filters: list[Filter], tmp_path: Path) -> None:
    language = model_of("rotary")
    writer = writer_of(language, tmp_path / "export")
    ids, count = language.language.prompt("3 "), 4_000
    with torch.no_grad():
        logits = language.model(torch.tensor([ids]))[:, -1]
    allowed = torch.full_like(logits, -torch.inf)
    allowed[:, list(language.language.writable)] = 0
    changed = logits + allowed
    for one in filters:
        changed = one(changed, None)  # type: ignore[arg-type]  # these look at the logits alone
    writer.begin(5)
    drawn = Counter(token for _, token in writer.write([ids] * count, most=1, filters=filters))
    found = torch.tensor([drawn[number] / count for number in range(logits.shape[-1])])
    expected = changed.softmax(-1)[0]
    assert (found - expected).abs().max() < 4 * (0.25 / count) ** 0.5  # four standard deviations of a share
    assert (found[expected == 0] == 0).all()


def test_a_seed_draws_one_text_however_often(tmp_path: Path) -> None:
    language = model_of("rotary")
    language.writer = writer_of(language, tmp_path / "export")
    told = ["".join(language.generate("3", seed=seed, max_tokens=30)) for seed in (1, 2, 1, 2**32 + 1)]
    assert told[0] == told[2] == told[3] != told[1]
    some = list(language.samples("3", count=3, seed=1, max_tokens=20))
    assert len(set(some)) == 3
    assert list(language.samples("3", count=3, seed=1, max_tokens=20)) == some


def test_a_text_that_is_left_stops_the_writer(tmp_path: Path) -> None:
    language = model_of("rotary")
    language.writer = writer_of(language, tmp_path / "export")
    text = language.generate("3", max_tokens=100_000)
    assert next(text)
    text.close()  # type: ignore[attr-defined]  # it is a generator


@pytest.mark.parametrize("filters", [[MinP(0.1)], [TopP(0.9), TopK(3)], [TopK(3), TopK(2)]])
def test_other_filters_are_refused(filters: list[Filter]) -> None:
    with pytest.raises(ArgumentError, match="in this order"):
        sampling_of(filters)


# -- the command line ----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "text").write_text(TEXT)
    config = LanguageModelConfig(
        data=(folder / "text",), out=folder / "run", model=SMALL, tokenizer="characters", block_length=24,
        fit=FitConfig(steps=60, validate_every=60, save_every=60), batch_tokens=240, warmup_steps=5, device="cpu",
        precision="float32", learning_rate=1e-2,
    )  # fmt: skip
    train_language_model(config)
    return folder / "run"


def written(capsys: pytest.CaptureFixture[str], *command: object) -> tuple[str, str]:
    assert run_command([*map(str, command), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    return said.out, said.err


def test_generate_writes_by_it_and_keeps_the_export(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    greedy = ("generate", run, "3 times", "--temperature", 0, "--max-tokens", 50)
    ours, said = written(capsys, *greedy, "--engine", "regard")
    assert said == ""
    assert not (run / ENGINE).exists()
    assert written(capsys, *greedy) == (ours, "")
    first = {path.name: path.stat().st_mtime_ns for path in (run / ENGINE).iterdir()}
    assert {"engine.json", "model.bin", "config.json", "vocabulary.json"} <= set(first)
    written(capsys, *greedy, "--precision", "int8")
    assert {path.name: path.stat().st_mtime_ns for path in (run / ENGINE).iterdir()} == first
    drawn = ("generate", run, "3 times", "--seed", 4, "--samples", 3, "--max-tokens", 20, "--temperature", 0.8)
    assert written(capsys, *drawn) == written(capsys, *drawn)


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        (("--min-p", "0.1"), "does not draw by a least share"),
        (("--repetition-penalty", "1.2"), "does not see the prompt when it weakens repetitions"),
    ],
)
def test_sampling_that_it_lacks_goes_by_ours(
    more: tuple[str, ...], reason: str, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = ("generate", run, "3", "--max-tokens", 9, *more)
    found, said = written(capsys, *command)
    assert said == f"regard's own search: CTranslate2 {reason} ({more[0]})\n"
    assert written(capsys, *command, "--engine", "regard") == (found, "")
    for insisting in (("--engine", "ctranslate2"), ("--precision", "int8")):
        assert run_command([*map(str, command), *insisting]) == 2
        assert f"{reason}: leave out {more[0]}" in capsys.readouterr().err


def test_without_the_package_ours_writes_and_says_nothing(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = written(capsys, "generate", run, "3", "--engine", "regard")
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    assert written(capsys, "generate", run, "3") == expected
    assert run_command(["generate", str(run), "3", "--engine", "ctranslate2"]) == 2
    assert "pip install 'regard[train]'" in capsys.readouterr().err


def test_a_model_that_is_more_than_its_weights_is_not_exported(run: Path) -> None:
    model = LanguageModel.load(run, device="cpu")
    model.model.layers[0].register_forward_hook(lambda *_: None)
    with (
        pytest.raises(ArgumentError, match="another model than the one that was loaded"),
        writing_by_ctranslate2(model, run, precision="float32"),
    ):
        pass
    assert model.writer is None


def test_a_model_that_changes_under_its_writer_is_not_written_by_it(run: Path) -> None:
    model = LanguageModel.load(run, device="cpu")
    with writing_by_ctranslate2(model, run, precision="float32"):
        assert list(model.generate("3", max_tokens=2))
        model.model.load_state_dict({name: 2 * tensor for name, tensor in model.model.state_dict().items()})
        with pytest.raises(ArgumentError, match="its weights were written or replaced: write with regard"):
            list(model.generate("3", max_tokens=2))


def test_a_processor_that_lacks_a_precision_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> None:
        raise ValueError("not here")

    monkeypatch.setattr(ctranslate2, "Generator", refuse)
    assert run_command(["generate", str(run), "3", "--precision", "int8", "--device", "cpu"]) == 2
    assert "CTranslate2 cannot write on cpu in int8: not here" in capsys.readouterr().err


def test_the_process_ends_well(run: Path) -> None:
    """A generator that is still there when Python ends aborts the process."""
    command = [sys.executable, "-m", "regard", "generate", str(run), "3", "--max-tokens", "5", "--device", "cpu"]
    done = subprocess.run([*command, "--engine", "ctranslate2"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "parts",
    [
        {"layers": "sliding", "window": 4}, {"rotary_fraction": 0.5}, {"no_positions_every": 2}, {"qk_norm": True},
        {"gate": "head"}, {"sink": True}, {"layers": "1 mamba2, 1 full"},
    ],
    ids=str,
)  # fmt: skip
def test_parts_that_it_lacks_are_refused(parts: dict[str, Any], tmp_path: Path) -> None:
    config = LanguageModelConfig(data=(tmp_path,), out=tmp_path, model=replace(SMALL, **parts))
    model = LanguageModel(DecoderOnly(config.model, vocab_size=9), Characters().train([TEXT]), block_length=24)
    with pytest.raises(ArgumentError, match=f"cannot express {next(iter(parts))}=.*: --engine regard writes"):
        exported_text(model, config)
