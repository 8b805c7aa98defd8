"""CTranslate2 searches unless told otherwise, where it is installed and can; a line says where it cannot."""

import errno
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

from regard.cli.engines import CTranslate2Search, OwnSearch
from regard.cli.main import run_command
from regard.cli.translate import TranslateCommand
from regard.errors import ArgumentError
from regard.tasks.exports import engine
from regard.tasks.exports.engine import refuse_run, searching_by_ctranslate2
from regard.tasks.generation.config import Beam
from regard.tasks.runs.run_folder import ENGINE
from regard.tasks.training.distributed import usable_cores
from regard.tasks.translation.translator import Translator
from tests.exports.exported_runs import LINES, PAIRS, Runs

pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
Capture = pytest.CaptureFixture[str]
SAYS = "regard's own search: "


def answered(capsys: Capture, *command: object) -> tuple[str, list[str]]:
    assert run_command([*map(str, command), "--device", "cpu"]) == 0
    said = capsys.readouterr()
    return said.out, said.err.splitlines()


def test_it_searches_where_it_is_installed_with_the_tokens_of_ours(run: Path, tmp_path: Path, capsys: Capture) -> None:
    given = tmp_path / "in.txt"
    given.write_text("".join(f"{line}\n" for line in [*LINES, *(source for source, _ in PAIRS)]))
    for beam in (1, 5):
        command = ("translate", run, "--input", given, "--beam", beam, "--nbest", min(beam, 2))
        found, said = answered(capsys, *command)
        assert said == []
        assert (run / ENGINE / "engine.json").exists()
        own, said = answered(capsys, *command, "--engine", "regard")
        assert said == []
        assert len(set(own.splitlines())) > 9, "every line has one answer: nothing is compared"
        for ours, theirs in zip(own.splitlines(), found.splitlines(), strict=True):
            *ours_text, ours_score = reversed(ours.split("\t")) if beam == 1 else _score_last(ours)
            *theirs_text, theirs_score = reversed(theirs.split("\t")) if beam == 1 else _score_last(theirs)
            assert ours_text == theirs_text
            assert ours_score == theirs_score or float(theirs_score) == pytest.approx(float(ours_score), abs=1e-4)


def _score_last(line: str) -> list[str]:
    number, score, *text = line.split("\t")
    return [number, *text, score]


def test_the_verbose_line_names_the_engine_and_its_precision(run: Path, capsys: Capture) -> None:
    for more, name in (((), "float32"), (("--precision", "int8"), "int8")):
        _, said = answered(capsys, "translate", run, "1 times 2", "--verbose", *more)
        assert said[0].startswith("CTranslate2 ")
        assert name in said[0]
        assert said[0].endswith(" (it is installed)")
    _, said = answered(capsys, "translate", run, "1 times 2", "--verbose", "--engine", "regard")
    assert said == [f"regard's own search: float32 on cpu, threads: {torch.get_num_threads()} (--engine)"]


def test_without_the_package_ours_searches_and_says_nothing(
    run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = run.parent / "pairs.tsv"
    data.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    for command in (("translate", run, "1 times 2"), ("evaluate", run, "--data", data)):
        expected, said = answered(capsys, *command, "--engine", "regard")
        with monkeypatch.context() as patch:
            patch.setitem(sys.modules, "ctranslate2", None)
            assert answered(capsys, *command) == (expected, said)
    assert not (run / ENGINE).exists()


def test_a_model_that_it_cannot_express_goes_by_ours(run_of: Runs, capsys: Capture) -> None:
    _, said = answered(capsys, "translate", run_of("pre, rotary"), "1 times 2")
    assert len(said) == 1
    assert said[0].startswith(f"{SAYS}ctranslate2 cannot express")


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), ArgumentError("not here")])
def test_an_export_that_cannot_be_made_goes_by_ours_unless_it_is_insisted_on(
    error: Exception, run: Path, capsys: Capture, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, _ = answered(capsys, "translate", run, "1 times 2", "--engine", "regard")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(engine, "_make", fail)
    assert answered(capsys, "translate", run, "1 times 2") == (expected, [f"{SAYS}{error}"])
    assert run_command(["translate", str(run), "1 times 2", "--engine", "ctranslate2", "--device", "cpu"]) != 0


def test_other_devices_are_ours_unless_it_is_insisted_on(run: Path, capsys: Capture) -> None:
    cuda, check = torch.device("cuda"), lambda: refuse_run(run)
    own = TranslateCommand(Path("run")).chosen_search(cuda, check)
    assert own == OwnSearch("CTranslate2 searches on cuda only by --engine ctranslate2")
    with own.searching(Translator.load(run, device="cpu"), run):
        assert capsys.readouterr().err == f"{SAYS}CTranslate2 searches on cuda only by --engine ctranslate2\n"
    chosen = TranslateCommand(Path("run"), engine="ctranslate2").chosen_search(cuda, check)
    assert chosen == CTranslate2Search("float32", insists=True)
    assert TranslateCommand(Path("run")).chosen_search(torch.device("cpu"), check) == CTranslate2Search(
        "float32", insists=False
    )


def test_one_thread_for_each_core_with_one_batch_each(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import ctranslate2

    seen = []
    monkeypatch.setattr(ctranslate2, "Translator", lambda *_, **options: seen.append(options))
    translator = Translator.load(run, device="cpu")
    with pytest.raises(AttributeError), CTranslate2Search("float32", insists=True).searching(translator, run):
        pass
    assert (seen[0]["inter_threads"], seen[0]["intra_threads"]) == (usable_cores(), 1)


def test_a_sentence_beyond_the_exports_positions_goes_by_ours_and_is_told_once(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Capture
) -> None:
    monkeypatch.setattr("regard.tasks.exports.trained.LONGEST", 80)
    long = " ".join(["1 times 2"] * 30)
    (tmp_path / "in.txt").write_text(f"1 times 2\n{long}\n3 times 4\n{long}\n")
    command = ("translate", run, "--input", tmp_path / "in.txt", "--max-length", 500)
    found, said = answered(capsys, *command)
    assert said == [f"{SAYS}CTranslate2 takes and writes 80 tokens at most"]
    assert found == answered(capsys, *command, "--engine", "regard")[0]
    assert run_command([*map(str, command), "--engine", "ctranslate2", "--device", "cpu"]) == 2
    assert "the model takes 80 at most" in capsys.readouterr().err


class Doubling(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2 * weight


class Subclassed(nn.LayerNorm):
    """A layer of a class of one's own."""


class LoRA(nn.Module):
    def __init__(self, base_layer: nn.Linear) -> None:
        super().__init__()
        self.base_layer, width = base_layer, (base_layer.in_features, base_layer.out_features)
        self.down, self.up = nn.Parameter(torch.randn(2, width[0])), nn.Parameter(torch.randn(width[1], 2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base: torch.Tensor = self.base_layer(x)
        return base + x @ self.down.mT @ self.up.mT


def injected(model: Any) -> None:
    model.decoder[0].feed_forward.up = LoRA(model.decoder[0].feed_forward.up)


CHANGES: dict[str, Callable[[Any], object]] = {
    "hooked": lambda model: model.decoder[0].feed_forward.register_forward_hook(lambda *_: None),
    "parametrised": lambda model: parametrize.register_parametrization(
        model.decoder[0].feed_forward.up, "weight", Doubling()
    ),
    "subclassed": lambda model: setattr(model.decoder_norm, "__class__", Subclassed),
    "adapted": lambda model: setattr(model.decoder[0].feed_forward, "adapter", nn.Linear(2, 2)),
    "injected": injected,
    "rescaled": lambda model: setattr(model.source_embedding, "scale", 7.0),
    "another epsilon": lambda model: setattr(model.decoder_norm, "eps", 0.5),
    "another forward": lambda model: setattr(model.encoder[0], "forward", model.encoder[0].forward),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_model_that_is_more_than_its_weights_is_not_exported(name: str, run: Path) -> None:
    translator = Translator.load(run, device="cpu")
    CHANGES[name](translator.model)
    with (
        pytest.raises(ArgumentError, match="another model than the one that was loaded"),
        searching_by_ctranslate2(translator, run, precision="float32", threads=1),
    ):
        pass
    assert translator.searcher is None
    assert not (run / ENGINE).exists()


def stepped(model: Any) -> None:
    weight = model.decoder[0].feed_forward.up.weight
    weight.requires_grad_().grad = torch.ones_like(weight)
    torch.optim.AdamW([weight], lr=0.1, fused=True).step()
    weight.requires_grad_(False).grad = None


def replaced(model: Any) -> None:
    model.load_state_dict({name: 2 * tensor for name, tensor in model.state_dict().items()})


@pytest.mark.parametrize(
    "change", [*(CHANGES[name] for name in ("hooked", "parametrised", "subclassed", "injected")), stepped, replaced]
)
def test_a_model_that_changes_under_its_engine_goes_by_its_modules_and_says_so(
    change: Callable[[Any], object], run: Path
) -> None:
    translator, told = Translator.load(run, device="cpu"), list[str]()
    with searching_by_ctranslate2(translator, run, precision="float32", threads=1, or_own=told.append):
        list(translator.translate(["1 times 2"]))
        assert not told
        change(translator.model)
        found = list(translator.translate(["3 times 4", "5 times 6"]))
    assert len(told) == 1
    assert told[0].startswith("CTranslate2 has an older model than the one that is asked: its ")
    assert [one.text for one in found] == [one.text for one in translator.translate(["3 times 4", "5 times 6"])]
    with searching_by_ctranslate2(kept := Translator.load(run, device="cpu"), run, precision="float32", threads=1):
        change(kept.model)
        with pytest.raises(ArgumentError, match=r"an older model than the one that is asked.*: search with regard"):
            list(kept.translate(["3 times 4"]))


def test_hooks_on_all_modules_are_seen(run: Path) -> None:
    translator = Translator.load(run, device="cpu")
    handle = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        with (
            pytest.raises(ArgumentError, match="hooks on all modules"),
            searching_by_ctranslate2(translator, run, precision="float32", threads=1),
        ):
            pass
    finally:
        handle.remove()
    with searching_by_ctranslate2(translator, run, precision="float32", threads=1):
        assert next(translator.translate(["1 times 2"], beam=Beam(2))).text


def test_python_searches_with_the_model_itself_unless_told(run: Path) -> None:
    assert Translator.load(run, device="cpu").searcher is None
    assert engine.EngineOrOwn.longest is None
