"""The command line as users meet it: its output, its exit status, and that nothing is lost on the way."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import stat
import subprocess
import sys
import time
from dataclasses import fields
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest

from regard.cli.generate import GenerateCommand
from regard.tasks.registry import TASKS
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.training.fit_config import FitConfig
from tests import forked
from tests.conftest import Call, check_one_line
from tests.forked import Forked
from tests.torchrun import environment, rank_of, torchrun

PAIRS = [(f"{n} times {m}", f"{m} mal {n}") for n in range(10) for m in range(10)]
TINY = [
    *("--transformer.dim", "8", "--transformer.num-heads", "2", "--transformer.feed-forward-dim", "8"),
    *("--transformer.encoder-layers", "1", "--transformer.decoder-layers", "1", "--tokenizer", "characters"),
    *("--batch-tokens", "400", "--warmup-steps", "5", "--device", "cpu"),
    *("--log-every", "1", "--validate-every", "10", "--save-every", "10", "--pictures", "0"),
]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "pairs.tsv"
    path.write_text("".join(f"{source}\t{target}\n" for source, target in PAIRS))
    return path


@pytest.fixture(scope="module")
def run(data: Path) -> Path:
    folder = data.parent / "run"
    done = forked.run("train", "--data", str(data), "--out", str(folder), "--steps", "40", *TINY)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    return folder


def losses(folder: Path) -> list[tuple[int, float]]:
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [(record["step"], record["loss"]) for record in records if record["event"] == "train"]


def wait_for(folder: Path, step: int, process: subprocess.Popen[str] | Forked) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        assert process.poll() is None, "training ended before it could be stopped"
        path = folder / "metrics.jsonl"
        if path.exists() and f'"step": {step},' in path.read_text():
            return
        time.sleep(0.005)
    raise AssertionError(f"step {step} did not come")


def test_kill_9_and_resume_give_the_same_losses(data: Path, run: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    process = Forked("train", "--data", str(data), "--out", str(out), "--steps", "40", *TINY)
    wait_for(out, 23, process)
    process.kill()
    assert process.wait() == -signal.SIGKILL
    assert Checkpoints(out).position("last").step >= 20
    resumed = forked.run("train", "--out", str(out), "--resume")  # every other setting stays what it was
    assert resumed.returncode == 0, resumed.stderr
    assert "resuming after step" in resumed.stderr
    assert losses(out) == losses(run)


@pytest.mark.slow
def test_a_killed_rank_is_restarted_by_the_command_of_the_first_start(call: Call, data: Path, tmp_path: Path) -> None:
    """torchrun starts both again, which go on from the last checkpoint.

    Two ranks with the same global batches give the losses of one, and one of them writes and speaks.
    """
    out = tmp_path / "run"
    exact = ("--transformer.dropout", "0", "--precision", "float32")  # bf16 would round sums of other order apart
    command = ("train", "--data", str(data), "--steps", "40", *exact, *TINY)
    here = ("-m", "regard", *command, "--out", str(out), "--gradient-checkpointing", "--resume")
    ranks = torchrun("--max-restarts", "2", *here)
    # Without it the torch of 2.13 lets restarted ranks find the addresses of dead ones (pytorch/pytorch#135712).
    variables = {**environment(), "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    process = subprocess.Popen(ranks, env=variables, stderr=subprocess.PIPE, text=True)
    wait_for(out, 23, process)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    _, stderr = process.communicate(timeout=120)
    assert process.returncode == 0, stderr
    assert stderr.count("resuming after step") == 1
    assert stderr.count("step      40/40") == stderr.count("the best model is in") == 1
    assert "Warning" not in stderr
    assert "deprecated" not in stderr
    assert call(*command, "--out", str(tmp_path / "one"))[0] == 0
    ours, theirs = losses(tmp_path / "one"), losses(out)
    assert [step for step, _ in theirs] == list(range(1, 41))
    assert max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)) < 1e-5
    for run in (out, tmp_path / "one"):
        assert call("translate", str(run), "1 times 2")[0] == 0
    status, text, _ = call("train", "--out", str(out), "--resume", "--steps", "41")
    assert (status, text) == (0, "")
    assert losses(out)[-1][0] == 41


def test_the_command_of_a_start_is_that_of_a_restart(call: Call, data: Path, tmp_path: Path) -> None:
    """Also with a file of settings and a size; changes by these are refused."""
    (tmp_path / "run.toml").write_text(f'task = "translation"\ndata = ["{data}"]\nfit.accumulate = 2\n')
    arguments = ("--config", str(tmp_path / "run.toml"), "--out", str(tmp_path / "run"), "--resume", *TINY)
    for _ in range(2):
        status, _, stderr = call("train", *arguments, "--steps", "2")
        assert status == 0, stderr
    assert "already" not in stderr
    (tmp_path / "run.toml").write_text(f'task = "translation"\ndata = ["{data}"]\nfit.accumulate = 3\n')
    check_one_line(call("train", *arguments, "--steps", "2"), "has accumulate 2, not 3")
    check_one_line(call("train", "--out", str(tmp_path / "run"), "--resume", "--size", "base"), "has transformer")


def test_a_full_disk_is_one_line_and_nothing_is_lost(data: Path, run: Path, tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)]
    if os.geteuid() != 0 or subprocess.run(mount, capture_output=True, check=False).returncode != 0:
        pytest.skip("mounting a small tmpfs needs root and a system that lets it")
    try:
        out = disk / "run"
        # In processes of their own, as the run was: what this one has loaded and run may change last bits.
        assert forked.run("train", "--data", str(data), "--out", str(out), "--steps", "10", *TINY).returncode == 0
        ballast = disk / "ballast"
        with contextlib.suppress(OSError):
            ballast.write_bytes(bytes(2**20))
        full = forked.run("train", "--out", str(out), "--resume", "--steps", "40")
        assert full.returncode == 2
        assert full.stderr.splitlines()[-1].startswith("regard: the disk is full: ")
        assert "the checkpoint of step 10 is whole: go on with: regard train --out" in full.stderr
        assert Checkpoints(out).position("last").step == 10
        ballast.unlink()
        assert forked.run("train", "--out", str(out), "--resume", "--steps", "40").returncode == 0
        assert losses(out) == losses(run)
    finally:
        subprocess.run(["umount", str(disk)], check=True)


def test_a_file_a_pipe_and_a_sentence_take_the_same_path(call: Call, run: Path, tmp_path: Path) -> None:
    lines = [source for source, _ in PAIRS[:7]] + [""]
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in lines))
    status, from_file, _ = call("translate", str(run), "--input", str(path), "--beam", "2")
    _, from_pipe, _ = call("translate", str(run), "--beam", "2", stdin=path.read_bytes())
    alone = [call("translate", str(run), line, "--beam", "2")[1] for line in lines[:3]]
    assert status == 0
    assert from_file == from_pipe
    assert from_file.splitlines()[:3] == [one.rstrip("\n") for one in alone]
    assert call("translate", str(run), *lines[:3], "--beam", "2")[:2] == (0, "".join(alone))
    assert from_file.count("\n") == len(lines)
    assert from_file.endswith("\n\n")


def test_translate_tells_text_that_the_vocabulary_lacks(call: Call, run: Path) -> None:
    status, out, err = call("translate", str(run), "2 times 3", "\u0968 times 3", "--beam", "1")
    assert (status, out.count("\n")) == (0, 2)
    said = "lines with text that the vocabulary lacks, read as unknown: 1; the first: line 2: \u0968"
    assert said in err.splitlines()


def test_view_writes_a_picture_and_a_page(call: Call, run: Path, tmp_path: Path) -> None:
    status, out, _ = call("view", str(run), "2 times 3", "--out", str(tmp_path))
    assert status == 0
    assert out.splitlines() == [str(tmp_path / "attention.png"), str(tmp_path / "attention.html")]
    assert all(Path(line).stat().st_size > 1000 for line in out.splitlines())
    page = (tmp_path / "attention.html").read_text(encoding="utf-8")
    assert f"<title>Attention of {run.name} (translation)</title>" in page


def test_view_leaves_out_an_empty_sentence_and_says_so(call: Call, run: Path, tmp_path: Path) -> None:
    status, out, err = call("view", str(run), "", "2 times 3", "--out", str(tmp_path))
    assert (status, len(out.splitlines())) == (0, 2)
    assert err == "regard: sentence 1 of 2 is not shown: there is nothing to look at in an empty sentence\n"
    assert call("view", str(run), "", "--out", str(tmp_path))[::2] == (
        2, "regard: there is nothing to look at in an empty sentence\n"
    )  # fmt: skip


def test_view_writes_one_file_that_is_named(call: Call, run: Path, tmp_path: Path) -> None:
    for name, begins in (("v.png", b"\x89PNG"), ("v.svg", b"<?xml"), ("v.html", b"<!doctype html>")):
        path = tmp_path / "new" / name
        assert call("view", str(run), "2 times 3", "--out", str(path))[:2] == (0, f"{path}\n")
        assert path.read_bytes().startswith(begins)
    other = call("view", str(run), "2 times 3", "--out", str(tmp_path / "v.jpg"))
    check_one_line(other, ".png, .svg, .pdf, .html, .htm, .json are written")
    below_a_file = tmp_path / "new" / "v.png" / "x.png"
    check_one_line(call("view", str(run), "2 times 3", "--out", str(below_a_file)), "x.png")
    assert (tmp_path / "new" / "v.png").read_bytes().startswith(b"\x89PNG")


def test_whoever_stops_reading_is_not_an_error(run: Path, tmp_path: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "regard", "translate", str(run), "--beam", "1"],
        env=environment(), stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    process.stdout.close()
    _, stderr = process.communicate(b"2 times 3\n" * 50, timeout=60)
    assert process.returncode == 0
    assert stderr == b""


@pytest.mark.parametrize("task", TASKS)
def test_every_setting_is_a_flag_under_a_heading(call: Call, task: str) -> None:
    status, out, _ = call("train", task, "--help-all")
    assert status == 0
    settings = {field.name for field in [*fields(TASKS[task].config), *fields(FitConfig)]} - {"fit"}
    nested = {"transformer", "rnn"} | ({"model"} if task != "translation" else set())
    flags = {name: f"--{name.replace('_', '-')}" for name in settings - nested}
    assert [name for name, flag in flags.items() if f"{flag} " not in out and f"{flag}," not in out] == []
    parts = ("data", "model", "output", "optimisation", "beginning")
    headings = ["options", *(f"{part} options" for part in parts)]
    places = [out.index(f"─ {heading} ─") for heading in headings]
    assert places == sorted(places)
    under = {heading: out[place:end] for heading, place, end in zip(headings, places, [*places[1:], None], strict=True)}
    for heading, flag in (
        *(("beginning options", flag) for flag in ("--size", "--config", "--resume", "--overwrite")),
        *(("data options", flag) for flag in ("--data", "--valid", "--tokenizer", "--vocab-size")),
        *(("output options", flag) for flag in ("--out", "--validate-every", "--pictures")),
        *(
            ("optimisation options", flag)
            for flag in ("--steps", "--epochs", "--learning-rate", "--batch-tokens", "--device")
        ),
    ):
        assert f" {flag}" in under[heading], (heading, flag)


@pytest.mark.parametrize("task", TASKS)
def test_help_shows_the_flags_of_a_first_run(call: Call, task: str) -> None:
    status, out, _ = call("train", task, "--help")
    assert status == 0
    flags = re.findall(r"^│ (--[a-z.-]+)", out, re.M)
    assert {"--data", "--out", "--size", "--resume", "--epochs", "--device"} <= set(flags)
    assert len(flags) <= 25
    assert "--help-all shows all" in " ".join(out.split())
    whole = call("train", task, "--help-all")[1]
    assert set(flags) < set(re.findall(r"^│ (--[a-z.-]+)", whole, re.M))
    assert call("train", task, "--seed", "3", "--muon-rate", "1", "-h")[1] == out


def test_help_of_all_is_that_of_a_command_without_settings(call: Call) -> None:
    assert call("evaluate", "--help-all") == call("evaluate", "--help")


def test_a_bare_train_trains_a_translator_and_says_what_else_there_is(call: Call) -> None:
    status, out, _ = call("train", "--help")
    assert status == 0
    assert "[{translation,language-model}]" in out
    assert "(default: translation)" in out


def test_the_environment_names_versions_and_the_folder_of_compiled_code(call: Call) -> None:
    status, out, err = call("--version", "--verbose")
    assert (status, err) == (0, "")
    assert out == call("--verbose", "--version")[1]
    first, *lines = out.splitlines()
    assert call("--version") == (0, f"{first}\n", "")
    assert first == "regard 0.1.0"
    assert f"torch {version('torch')}" in lines
    if find_spec("numba"):
        assert Path(lines[-1].removeprefix("compiled code: ")).is_dir()


def test_no_command_says_which_there_are(call: Call) -> None:
    status, out, err = call()
    assert (status, out) == (2, "")
    assert "translate" in err


# -- errors: one line, status 2 ------------------------------------------------------------------------------


def test_a_folder_that_cannot_be_written_to(call: Call, data: Path, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        # Root may write anywhere but where there is no file system to write to.
        check_one_line(call("train", "--data", str(data), "--out", "/proc/regard", *TINY), "/proc/regard")
        return
    tmp_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    check_one_line(call("train", "--data", str(data), "--out", str(tmp_path / "run"), *TINY), "Permission denied")


def test_debug_shows_where_it_happened(call: Call, tmp_path: Path) -> None:
    from regard.errors import RunFolderError

    with pytest.raises(RunFolderError, match="is not a run folder"):
        call("translate", str(tmp_path), "x", "--debug")


def test_a_setting_that_may_be_left_out_has_no_choice_of_that_name(call: Call) -> None:
    _, _, err = call("translate", "x", "y", "--precision", "int4")
    assert "expected one of float32, int8, got 'int4'" in err


def test_overwrite_keeps_the_old_run_until_the_new_data_are_read(
    call: Call, run: Path, data: Path, tmp_path: Path
) -> None:
    out = shutil.copytree(run, tmp_path / "run")
    (out / "notes.txt").write_text("mine")
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    bad = tmp_path / "bad.tsv"
    bad.write_bytes(data.read_bytes() + b"no tab\n")
    check_one_line(
        call("train", "--data", str(bad), "--out", str(out), "--overwrite", *TINY), "bad.tsv:101: expected a source"
    )
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    status, _, err = call("train", "--data", str(data), "--out", str(out), "--overwrite", "--steps", "2", *TINY)
    assert status == 0, err
    assert [step for step, _ in losses(out)] == [1, 2]
    assert (out / "notes.txt").read_text() == "mine"
    assert not (out / ".new").exists()


def test_a_file_is_translated_into_a_file(call: Call, run: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("".join(f"{line}\n" for line, _ in PAIRS[:30]))
    command = ("translate", str(run), "--input", str(source), "--beam", "2", "--nbest", "2")
    status, printed, err = call(*command)
    cut_off = sum(line.endswith("\tcut off") for line in printed.splitlines()[::2])
    said = f"translations cut off by the limit of their tokens: {cut_off}; " if cut_off else ""
    assert (status, err[: len(said)], len(err.splitlines())) == (0, said, bool(said))
    written = call(*command, "--output", str(target))
    engine, _, rest = written[2].partition("\n")
    assert ("float32 on cpu" in engine, engine.endswith("(it is installed)")) == (True, True)
    assert (*written[:2], rest) == (0, "", err)
    assert target.read_text() == printed
    check_one_line(call(*command, "--output", str(target)), "is there already: replace it (--overwrite)")
    check_one_line(call(*command, "--output", str(source), "--overwrite"), "--input and --output are both")
    check_one_line(call(*command, "--resume"), "give --output")
    check_one_line(call(*command, "--output", str(target), "--resume", "--overwrite"), "give one of them")
    assert call(*command, "--output", str(target), "--overwrite") == written
    check_one_line(call(*command, "--output", str(tmp_path / "absent" / "x")), "there is no folder for")


def test_ctrl_c_says_how_to_go_on(run: Path, tmp_path: Path) -> None:
    source, target = tmp_path / "in.txt", tmp_path / "out.txt"
    source.write_text("2 times 3\n" * 200_000)
    command = ("translate", str(run), "--input", str(source), "--output", str(target), "--beam", "1")
    process = Forked(*command)
    record = tmp_path / "out.txt.partial.json"
    deadline = time.monotonic() + 120
    while not (record.exists() and json.loads(record.read_text())["lines"]):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, stderr = process.communicate(timeout=60)
    kept = json.loads(record.read_text())["lines"]
    assert process.returncode == 130
    said = f"regard: interrupted; {kept:,} lines are kept: go on with the same command and --resume"
    assert stderr.splitlines()[1:] == [said], "after the line of the engine"
    assert (tmp_path / "out.txt.partial").read_text().count("\n") >= kept


def test_evaluate_with_several_references(call: Call, run: Path, tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("in", "one", "two")]
    for path, lines in zip(files, (["2 times 3", "4 times 5"], ["3 mal 2", "x"], ["y", ""]), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines))
    source, *references = map(str, files)
    command = ("evaluate", str(run), "--beam", "1", "--data", source, "--references")
    status, out, _ = call(*command, *references)
    assert status == 0
    assert "nrefs:var" in out
    assert "nrefs:1" in call(*command, references[0])[1]
    check_one_line(call(*command, references[1]), "expected a reference in one of the files, got an empty line")
    files[2].write_text("y\n")
    check_one_line(call(*command, *references), "ends after line 1")
    check_one_line(call("evaluate", str(run), "--data", source, source, "--references", source), "one file of sources")
    records = tmp_path / "in.jsonl"
    records.write_text('{"source": "2 times 3", "target": ["3 mal 2", "y"]}\n{"source": "4 times 5", "target": "x"}\n')
    files[2].write_text("y\n\n")
    assert call("evaluate", str(run), "--beam", "1", "--data", str(records))[1] == out
    records.write_text('{"source": "2 times 3", "target": ["", "y"]}\n')
    check_one_line(call("evaluate", str(run), "--data", str(records)), 'in.jsonl:1: expected {"source": text, "target"')


TINY_TEXT = [
    *("--model.dim", "8", "--model.num-heads", "2", "--model.feed-forward-dim", "8", "--model.num-layers", "1"),
    *("--tokenizer", "characters", "--block-length", "16", "--batch-tokens", "64", "--warmup-steps", "5"),
    *("--log-every", "1", "--validate-every", "10", "--save-every", "10", "--device", "cpu"),
]


@pytest.fixture(scope="module")
def text(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text("".join(f"{n} times {m} is {n * m}\n" for n in range(12) for m in range(12)))
    return path


@pytest.fixture(scope="module")
def text_run(text: Path) -> Path:
    run = text.parent / "run"
    done = forked.run("train", "language-model", "--data", str(text), "--out", str(run), "--steps", "40", *TINY_TEXT)
    assert done.returncode == 0, done.stderr
    assert done.stdout == ""
    assert f"the best model is in {run}" in done.stderr
    return run


def test_two_ranks_train_a_language_model_as_one_does(text: Path, tmp_path: Path) -> None:
    exact = ("--model.dropout", "0", "--precision", "float32", "--steps", "6")
    command = ("train", "language-model", "--data", str(text), *exact, *TINY_TEXT)
    one = forked.run(*command, "--out", str(tmp_path / "one"))
    two = forked.run_ranks(2, *command, "--out", str(tmp_path / "two"))
    assert [done.returncode for done in (one, *two)] == [0, 0, 0], two
    ours, theirs = losses(tmp_path / "one"), losses(tmp_path / "two")
    assert max(abs(a - b) for (_, a), (_, b) in zip(ours, theirs, strict=True)) < 1e-5


def test_generated_text_is_printed_as_it_comes(text_run: Path) -> None:
    flushed: list[str] = []

    class Terminal(io.StringIO):
        def flush(self) -> None:
            flushed.append(self.getvalue())

    with contextlib.redirect_stdout(Terminal()):
        GenerateCommand(text_run, "3", max_tokens=9, device="cpu")()
    assert [len(one) for one in flushed[:9]] == list(range(2, 11))


def test_settings_as_a_file(call: Call, text: Path, text_run: Path, tmp_path: Path) -> None:
    """The settings of a run folder can be passed again, whole or in part, and flags go before it."""
    first = text_run
    again = tmp_path / "again"
    done = forked.run("train", "--config", str(first / "run.toml"), "--out", str(again))  # a process, as the first was
    assert done.returncode == 0, done.stderr
    assert losses(again) == losses(first)
    part = tmp_path / "part.toml"
    lines = (first / "run.toml").read_text().splitlines()
    part.write_text("\n".join(line for line in lines if not line.startswith(("out", "steps"))))
    flags = ("--out", str(tmp_path / "other"), "--steps", "7", "--model.dim", "4")
    assert call("train", "--config", str(part), *flags)[0] == 0
    record = json.loads((tmp_path / "other" / "config.json").read_text())["config"]
    assert (record["fit"]["steps"], record["model"]["dim"], record["block_length"]) == (7, 4, 16)
    status, _, err = call("train", "--config", str(part))
    assert status == 2
    assert "--out" in err


def test_named_sizes_are_the_defaults_of_flags(call: Call) -> None:
    for task, words in (("translation", "default: 0.3"), ("language-model", "default: 16")):
        status, out, _ = call("train", task, "--size", "tiny", "--help-all")
        assert status == 0
        assert words in " ".join(out.replace("│", "").split())
