"""CTranslate2 as the one that searches: the hypotheses and scores of our search, by an export that the run keeps."""

import errno
import os
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.cli.main import run_command
from regard.errors import RunFolderError
from regard.tasks.config import TRANSLATION
from regard.tasks.exports import engine
from regard.tasks.exports.engine import searching_by_ctranslate2
from regard.tasks.generation.config import Beam
from regard.tasks.runs.run_folder import ENGINE, RunFolder
from regard.tasks.translation.bulk import Unfinished
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.translation_model import AlignmentOf, Request, SearchJob, search
from regard.tasks.translation.translator import Translator
from tests.exports.exported_runs import LINES, TINY, Runs

pytest.importorskip("ctranslate2", reason="CTranslate2 is not installed")
BEAMS = (Beam(1), Beam(4, num_best=2), Beam(3, num_best=3, length_penalty=0.0), Beam(5, length_penalty=2.0))


def use(run: Path, **changes: Any) -> Any:
    settings: dict[str, Any] = {"precision": "float32", "threads": 2}
    with searching_by_ctranslate2(Translator.load(run, device="cpu"), run, **settings | changes) as engine:
        return engine


def told(translator: Translator, asked: list[Any], **options: Any) -> list[Any]:
    found = translator.translate(asked, **options)
    return [[(one.text, one.finished, one.labels, one.score) for one in each.candidates] for each in found]


def check_same(ours: list[Any], theirs: list[Any]) -> None:
    for some, others in zip(ours, theirs, strict=True):
        assert [one[:3] for one in others] == [one[:3] for one in some]
        assert [one[3] for one in others] == pytest.approx([one[3] for one in some], abs=2e-5)


@pytest.mark.parametrize("name", ["pre", "pre, modern"])
def test_its_hypotheses_and_scores_are_those_of_our_search(name: str, run_of: Runs) -> None:
    run, asked = run_of(name), [*LINES[:-2], "", "1 times 2"]
    translator = Translator.load(run, device="cpu")
    prefixed = [Request("1 times 2", "das 2-fache"), "3 times 4", Request("5 times 0", "das"), Request("2 times 2")]
    ours = [told(translator, asked, beam=beam) for beam in BEAMS]
    begun = [told(translator, prefixed, beam=beam) for beam in BEAMS[:2]]
    assert len({each[0][0] for each in ours[1]}) > 4, "every line has one answer: nothing is compared"
    with searching_by_ctranslate2(translator, run, precision="float32", threads=2):
        for beam, expected in zip(BEAMS, ours, strict=True):
            check_same(expected, told(translator, asked, beam=beam))
        for beam, expected in zip(BEAMS, begun, strict=False):
            check_same(expected, told(translator, prefixed, beam=beam))
    assert translator.searcher is None


def test_answers_that_are_cut_off_come_last_with_the_scores_of_ours(run_of: Runs) -> None:
    translator = Translator.load(run_of("pre"), device="cpu")
    ids = [[*one, 2] for one in translator.source_tokenizer.encode_batch(LINES[:3])]
    job = SearchJob(sources=ids, begin_id=1, end_id=2, max_steps=6, beam=Beam(3, num_best=3))
    ours = search(translator.model, job)
    theirs = use(run_of("pre")).search([job])[0]
    assert all(one.tokens[-1] != 2 and len(one.tokens) == 6 for best in theirs for one in best)
    for some, others in zip(ours, theirs, strict=True):
        assert [one.tokens for one in some] == [other.tokens for other in others]
        assert [one.score for one in some] == pytest.approx([other.score for other in others], abs=2e-5)


def test_an_answer_that_ended_comes_before_better_ones_that_were_cut_off(run_of: Runs) -> None:
    """In one search for the best, and both say that the limit decided."""
    translator = Translator.load(run_of("pre"), device="cpu")
    sources = [[*one, 2] for one in translator.source_tokenizer.encode_batch(LINES[:3])]
    (ended, *_) = search(translator.model, SearchJob(sources=sources, begin_id=1, end_id=2, max_steps=90))[0]
    job = SearchJob(sources=sources, begin_id=1, end_id=2, max_steps=1, beam=Beam(5, num_best=1))
    engine = use(run_of("pre"))
    for most in range(1, len(ended.tokens) + 3):
        one = replace(job, max_steps=most)
        for ours, theirs in zip(search(translator.model, one), engine.search([one])[0], strict=True):
            assert (ours[0].tokens, ours[0].limited) == (theirs[0].tokens, theirs[0].limited)
    assert not ended.limited


def test_int8_is_near_and_our_own_model_shows_its_attention(run_of: Runs) -> None:
    translator = Translator.load(run_of("pre"), device="cpu")
    options: dict[str, Any] = {"alignments": AlignmentOf()}
    ours = next(translator.translate(["1 times 2"], **options)).candidates[0]
    with searching_by_ctranslate2(translator, run_of("pre"), precision="int8", threads=1) as engine:
        assert "int8" in str(engine)
        theirs = next(translator.translate(["1 times 2"], **options)).candidates[0]
    assert (theirs.text, theirs.labels) == (ours.text, ours.labels)
    assert theirs.score != ours.score
    # Without VNNI, pairs of products are added in 16 bits, which saturate: -0.39 for -0.22.
    cpu = Path("/proc/cpuinfo")
    is_exact = cpu.exists() and "vnni" in cpu.read_text() and "ONEDNN_MAX_CPU_ISA" not in os.environ
    assert theirs.score == pytest.approx(ours.score, abs=0.05 if is_exact else 0.5)
    torch.testing.assert_close(theirs.alignment, ours.alignment)


def kept(run: Path) -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in (run / ENGINE).iterdir()}


def test_the_export_is_made_once_and_anew_for_other_weights_whatever_its_date(run: Path) -> None:
    use(run)
    first = kept(run)
    assert {"model.bin", "engine.json", "config.json"} < set(first)
    for path in (run / ENGINE, run / "best.safetensors"):
        os.utime(path)
    use(run, precision="int8")
    assert kept(run) == first
    before = (run / ENGINE / "model.bin").read_bytes()
    checkpoints = RunFolder(run).checkpoints
    weights = {name: tensor * 1.01 for name, tensor in checkpoints.load_model("best").items()}
    checkpoints.save_model("best", weights, checkpoints.position("best"))
    os.utime(run / "best.safetensors", (0, 0))
    use(run)
    assert (run / ENGINE / "model.bin").read_bytes() != before
    assert not list(run.rglob("*.new*"))


def flip_a_bit(folder: Path) -> None:
    content = bytearray((folder / "model.bin").read_bytes())
    content[len(content) // 2] ^= 16
    (folder / "model.bin").write_bytes(content)


def as_after_a_kill(folder: Path) -> None:
    (folder / "engine.json").unlink()
    (folder / "model.bin").unlink()
    (folder / ".new").mkdir()
    (folder / ".new" / "model.bin").write_bytes(b"half")


def cut_the_record(folder: Path) -> None:
    (folder / "engine.json").write_text('{"files": ')


@pytest.mark.parametrize("damage", [flip_a_bit, as_after_a_kill, cut_the_record])
def test_an_export_that_is_not_whole_is_made_anew(damage: Callable[[Path], None], run: Path) -> None:
    use(run)
    whole = (run / ENGINE / "model.bin").read_bytes()
    damage(run / ENGINE)
    use(run)
    assert (run / ENGINE / "model.bin").read_bytes() == whole
    assert not (run / ENGINE / ".new").exists()


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt()])
@pytest.mark.parametrize("step", ["to_ctranslate2", "rename", "write_checksummed"])
def test_a_full_disk_or_ctrl_c_leaves_nothing_half(
    error: BaseException, step: str, run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*arguments: Any) -> None:
        if step == "to_ctranslate2":
            (arguments[1] / "model.bin").write_bytes(b"half")
        raise error

    with monkeypatch.context() as patch:
        patch.setattr(engine, step, fail)
        with pytest.raises(type(error)):
            use(run)
    left = run / ENGINE
    assert not (left / "engine.json").exists()
    assert not (left / ".new").exists()
    assert step == "write_checksummed" or not left.exists()
    use(run)
    assert (left / "engine.json").exists()


def test_a_run_that_may_only_be_read_is_searched_all_the_same(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*arguments: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(engine, "_make", refuse)
    job = SearchJob(sources=[[5, 6, 2]], begin_id=1, end_id=2, max_steps=9)
    assert use(run).search([job])
    assert not (run / ENGINE).exists()


def test_links_and_strangers_in_the_place_of_the_export(run: Path, tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir()
    (run / ENGINE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(RunFolderError, match="is a link to"):
        use(run)
    assert not list((tmp_path / "elsewhere").iterdir())
    (run / ENGINE).unlink()
    (run / ENGINE).write_text("mine")
    with pytest.raises(RunFolderError, match="is a file where a run has a folder"):
        use(run)


def test_a_run_that_is_discarded_takes_its_export_along(run: Path) -> None:
    use(run)
    (run / ENGINE / ".new").mkdir()
    RunFolder(run).discard()
    assert not run.exists()


def test_a_file_in_order_with_blank_and_bad_lines_and_resumed(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("regard.tasks.translation.translator.WINDOW_LINES", 4)
    given = [b"1 times 2", b"", b"2 times 3", b"\xff", b"5 times 4", b"3 times 3", b"0 times 1"]
    (tmp_path / "in.txt").write_bytes(b"\n".join(given) + b"\n")
    command = ["translate", str(run), "--input", str(tmp_path / "in.txt"), "--bad-lines", "skip", "--device", "cpu"]
    command += ["--engine", "ctranslate2", "--precision", "float32", "--nbest", "2"]
    assert run_command([*command, "--output", str(tmp_path / "whole"), "--verbose"]) == 0
    assert "CTranslate2 " in capsys.readouterr().err
    numbers = [line.split("\t")[0] for line in (tmp_path / "whole").read_text().splitlines()]
    assert numbers == ["1", "1", "2", "3", "3", "4", "5", "5", "6", "6", "7", "7"]
    own = ["regard" if part == "ctranslate2" else part for part in command]
    assert run_command([*own, "--output", str(tmp_path / "ours")]) == 0
    without_score = [
        [line.split("\t")[::2] for line in (tmp_path / name).read_text().splitlines()] for name in ("whole", "ours")
    ]
    assert without_score[0] == without_score[1]

    finish = Unfinished.add
    with monkeypatch.context() as patch:
        patch.setattr(Unfinished, "add", lambda self, *a: (finish(self, *a), 1 / 0))
        with pytest.raises(ZeroDivisionError):
            run_command([*command, "--output", str(tmp_path / "again")])
    resumed = [*command, "--output", str(tmp_path / "again"), "--resume"]
    for other in (["--precision", "int8"], ["--engine", "regard"]):
        assert run_command([*resumed, *other]) == 2
    assert "was begun with engine ctranslate2" in capsys.readouterr().err
    assert run_command(resumed) == 0
    assert (tmp_path / "again").read_bytes() == (tmp_path / "whole").read_bytes()


def refuse_int8(*_: Any, **__: Any) -> None:
    raise ValueError("not here")


def test_a_library_or_a_processor_that_lacks_something_is_one_line(
    run: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    import ctranslate2

    command = ["translate", str(run), "1 times 2", "--device", "cpu"]
    with monkeypatch.context() as patch:
        patch.setattr(ctranslate2, "Translator", refuse_int8)
        assert run_command([*command, "--precision", "int8"]) == 2
        assert "CTranslate2 cannot search on cpu in int8: not here" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "ctranslate2", None)
    for insisting in (["--engine", "ctranslate2"], ["--precision", "int8"]):
        assert run_command([*command, *insisting]) == 2
        said = capsys.readouterr().err
        assert "pip install 'regard[train]'" in said
        assert len(said.splitlines()) == 1


def test_models_that_the_engine_cannot_express_are_refused_before_they_are_loaded(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    known = RunFolder(run).read_config(TRANSLATION, TranslationConfig)
    monkeypatch.setattr(Translator, "load", None)
    for other, message in (
        (replace(known, transformer=replace(TINY, positions="rotary")), "ctranslate2 cannot express positions=rotary"),
        (replace(known, model="rnn"), "only the Transformer"),
    ):
        monkeypatch.setattr(RunFolder, "read_config", lambda *_, other=other: other)
        assert run_command(["translate", str(run), "1 times 2", "--engine", "ctranslate2"]) == 2
        assert message in capsys.readouterr().err


def test_evaluate_searches_with_the_engine_too(run: Path, run_of: Runs, capsys: pytest.CaptureFixture[str]) -> None:
    data = str(run_of("pre").parent / "pairs.tsv")
    told = []
    for more in (["--engine", "regard"], ["--engine", "ctranslate2", "--precision", "float32"]):
        assert run_command(["evaluate", str(run), "--data", data, "--device", "cpu", *more]) == 0
        told.append(capsys.readouterr().out)
    assert told[0] == told[1]
    assert (run / ENGINE / "engine.json").exists()
