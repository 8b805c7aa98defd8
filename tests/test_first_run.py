"""A newcomer's first commands: runs of a few steps, epochs, long lines, progress, help that fits."""

import io
import os
import re
import shutil
import subprocess
import time
import tomllib
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import replace
from pathlib import Path

import pytest

from regard.cli import main as program
from regard.cli import progress
from regard.cli.arguments import EXAMPLES
from regard.tasks.config import make_schedule
from regard.tasks.registry import TASKS
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.training.checkpoints import Checkpoints
from tests import ROOT

TINY = {
    "translation": (
        *("--transformer.dim", "8", "--transformer.num-heads", "2", "--transformer.feed-forward-dim", "8"),
        *("--transformer.encoder-layers", "1", "--transformer.decoder-layers", "1"),
    ),
    "language-model": ("--model.dim", "8", "--model.num-heads", "2", "--model.num-layers", "1"),
}


class Terminal(io.TextIOWrapper):
    def isatty(self) -> bool:
        return True


def typed(*arguments: str, kind: type[io.TextIOWrapper] = io.TextIOWrapper) -> tuple[int, str, str]:
    out, err = (kind(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with redirect_stdout(out), redirect_stderr(err):
        status = program.run_command(list(arguments))
    texts = []
    for stream in (out, err):
        stream.seek(0)
        texts.append(stream.read())
    return status, texts[0], texts[1]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("first")
    (path / "pairs.tsv").write_text("".join(f"{n} times {m}\t{m} mal {n}\n" for n in range(20) for m in range(20)))
    (path / "book.txt").write_text("".join(f"line {n} of a book, not two of them alike: {n * n}\n" for n in range(300)))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "_keep_freed_memory", lambda: None)
        for task, flags in TINY.items():
            data = path / ("pairs.tsv" if task == "translation" else "book.txt")
            status, _, err = typed(
                *("train", task, "--data", str(data), "--out", str(path / task), "--steps", "5", "--device", "cpu"),
                *flags,
            )
            (path / f"{task}.err").write_text(err)
            assert status == 0, err
    return path


@pytest.fixture(autouse=True)
def _no_allocator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "_keep_freed_memory", lambda: None)


@pytest.mark.parametrize("task", TASKS)
def test_a_run_of_a_few_steps_works_and_its_rate_rises_and_falls(folder: Path, task: str) -> None:
    err = (folder / f"{task}.err").read_text()
    assert "the learning rate rises" not in err
    assert "Using" not in err
    assert Checkpoints(folder / task).position("last").step == 5
    config = RunFolder(folder / task).read_config(task, TASKS[task].config)
    rate = make_schedule(config)
    longest = 1_000 if task == "translation" else 100
    assert [rate(step) <= rate(1) == config.learning_rate for step in range(1, 6)] == [True] * 5
    for steps, warmup in ((30, 3), (950, 95), (100_000, longest)):
        assert replace(config, fit=replace(config.fit, steps=steps)).warmup == warmup


def test_a_warm_up_longer_than_its_run_is_said(folder: Path, tmp_path: Path) -> None:
    command = ("train", "--data", str(folder / "pairs.tsv"), "--out", str(tmp_path / "run"), "--steps", "2")
    status, _, err = typed(*command, "--warmup-steps", "1000", "--device", "cpu", *TINY["translation"])
    assert status == 0
    said = re.findall(
        r"^the learning rate rises for ([\d,]+) steps to 0.001, and training ends after 2, at (\S+):", err, re.M
    )
    assert said == [("1,000", "2e-06")]
    assert "the learning rate rises" in (tmp_path / "run/train.log").read_text()


def test_epochs_are_passes_over_the_data(folder: Path, tmp_path: Path) -> None:
    """Counted by what the loop says of itself; --steps goes on with such a run."""
    for task in ("translation", "language-model"):
        data, out = folder / ("pairs.tsv" if task == "translation" else "book.txt"), tmp_path / task
        command = ("train", task, "--out", str(out), "--batch-tokens", "1024", "--device", "cpu", "--log-every", "1")
        status, _, err = typed(*command, "--data", str(data), "--epochs", "3", "--warmup-steps", "2", *TINY[task])
        assert status == 0, err
        assert "the learning rate rises" not in err
        position = Checkpoints(out).position("last")
        config = RunFolder(out).read_config(task, TASKS[task].config)
        assert config.fit.epochs == 3
        assert position.epoch == 2, "the last batch is of the third pass"
        assert position.step > 3
        assert f"/{position.step}" in err
    more = position.step + 2
    assert typed("train", "--out", str(out), "--resume", "--steps", str(more))[0] == 0
    assert Checkpoints(out).position("last").step == more


def test_a_long_line_is_a_bad_line(folder: Path, tmp_path: Path) -> None:
    """Its limit is that of training; a flag moves it."""
    run, long = str(folder / "translation"), " ".join(f"{n} times" for n in range(1_000))
    (tmp_path / "in.txt").write_text(f"1 times 2\n{long}\n3 times 4\n")
    command = ("translate", run, "--input", str(tmp_path / "in.txt"), "--beam", "1", "--device", "cpu")
    status, out, err = typed(*command)
    assert status == 2
    assert re.search(
        r"in\.txt:2: [\d,]+ tokens, and the limit is 256: cut it, or raise the limit \(--max-length\)", err
    )
    status, out, err = typed(*command, "--bad-lines", "skip")
    assert (status, len(out.split("\n")), out.split("\n")[1]) == (0, 4, "")
    assert "bad lines left empty: 1; the first: " in err
    assert "the limit is 3" in typed(*command, "--max-length", "3")[2]


def test_a_log_counts_from_the_first_word(monkeypatch: pytest.MonkeyPatch) -> None:
    """The imports before it may take longer than ten seconds."""
    seconds, log = [0.0], io.StringIO()
    monkeypatch.setattr(time, "monotonic", lambda: seconds[0])
    with progress.showing_progress(log, first="reading") as tell:
        for at in (60.0, 69.0, 71.0, 72.0):
            seconds[0] = at
            tell("bytes", int(at), None)
    assert log.getvalue() == "bytes: 71\n"


def test_evaluate_says_how_far_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress, "PLAIN_SECONDS", 0.0)
    for task, words in (
        ("translation", "sentences translated: 0 of 400"),
        ("language-model", "blocks of tokens read: 1 of"),
    ):
        data = str(folder / ("pairs.tsv" if task == "translation" else "book.txt"))
        beam = ("--beam", "1") if task == "translation" else ()
        assert words in typed("evaluate", str(folder / task), "--data", data, "--device", "cpu", *beam)[2]


def test_cut_off_hypotheses_are_told_apart(folder: Path) -> None:
    """After five steps of training, none of them ends by itself."""
    run = str(folder / "translation")
    table = typed("translate", run, "1 times 2", "--nbest", "2", "--beam", "2", "--device", "cpu")[1]
    assert all(line.endswith("\tcut off") for line in table.splitlines())
    text = typed("translate", run, "1 times 2", "--alignments", "--beam", "2", "--device", "cpu")[1]
    assert '"finished": false' in text


def test_one_pair_is_enough_beside_pairs_for_validation(tmp_path: Path) -> None:
    (tmp_path / "one.tsv").write_text("a cat\tun chat\n")
    (tmp_path / "two.tsv").write_text("a dog\tun chien\n")
    data = ("--data", str(tmp_path / "one.tsv"), "--valid", str(tmp_path / "two.tsv"))
    how = ("--steps", "1", "--device", "cpu", *TINY["translation"])
    assert typed("train", *data, "--out", str(tmp_path / "run"), *how)[0] == 0


@pytest.mark.parametrize("columns", [50, 100])
def test_help_has_colours_in_a_terminal_and_there_alone(columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", str(columns))
    command = ("train", "translation", "--help")
    plain, coloured = typed(*command)[1], typed(*command, kind=Terminal)[1]
    assert "\x1b[" not in plain
    assert len(re.findall(r"\x1b\[1m\[?PATH", coloured)) >= 3, "what a flag takes is bold"
    rest = [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", coloured).splitlines()]
    assert rest == plain.splitlines()


def test_the_examples_of_help_are_commands() -> None:
    """Each is understood: what is wrong with it is that its files are not there."""
    import shlex

    for examples in EXAMPLES.values():
        for example in examples:
            words = shlex.split(example)[1:]
            if "--help" in words or "demo" in words or "check" in words:
                continue
            status, _, err = typed(*words)
            assert status == 2
            assert re.search("cannot read|is not a folder|there is no run|there is no such file", err), (example, err)


def test_the_demo_installs_what_it_needs_and_the_tests_the_rest() -> None:
    def lines(target: str) -> list[str]:
        # These tests run under make themselves: what it hands down would make this one say which folder it enters.
        inherited = ("MAKELEVEL", "MAKEFLAGS", "MFLAGS")
        outside = {name: value for name, value in os.environ.items() if name not in inherited}
        made = subprocess.run(
            ("make", "-n", "-B", "VENV=/nowhere/venv", target),
            cwd=ROOT, env=outside, capture_output=True, text=True, check=True,
        )  # fmt: skip
        return made.stdout.splitlines()

    demo, test = lines("demo"), lines("test")
    first = next(line for line in demo if "python" not in line)
    assert first.startswith('echo "installing torch'), "words come before the first minute of waiting"
    demo, test = (
        [line.split("-c constraints.txt ")[1] for line in made if "pip install" in line] for made in (demo, test)
    )
    tools = ["'pip>=25.1'  # the first that knows groups of dependencies", "torch numpy"]
    assert (demo, test) == ([*tools, "-e '.[train,view]'"], [*tools, "-e '.[all]' --group dev"])
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert extras["all"][0].startswith("regard[train,view,"), "the demo runs from what the tests install too"


def _reading(run: Path, folder: Path, out: Path) -> dict[str, tuple[str, ...]]:
    pairs, of = str(folder / "pairs.tsv"), str(run)
    new = ("train", "--data", pairs, "--out", str(out), "--steps", "1", "--device", "cpu", *TINY["translation"])
    return {
        "translate": ("translate", of, "1 times 2"),
        "align": ("align", of, "--data", pairs),
        "evaluate": ("evaluate", of, "--data", pairs),
        "view": ("view", of, "1 times 2", "--out", str(out)),
        "measure": ("measure", of, "--data", str(folder / "book.txt"), "--out", str(out), "--workers", "1"),
        "serve": ("serve", of, "--port", "0"),
        "check": ("check", of),
        "export to huggingface": ("export", of, "--to", "huggingface", "--out", str(out)),
        "export to ctranslate2": ("export", of, "--to", "ctranslate2", "--out", str(out)),
        "train --resume": ("train", "--out", of, "--resume", "--steps", "6"),
        "train --warm-start": (*new, "--warm-start", of),
        "train --tokenizers-of": (*new, "--tokenizers-of", of),
    }


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("= broken\n", "not TOML"),
        ('out = "run"\nstepz = 5\n', "unknown setting stepz"),
        ('seed = "one"\n', "seed must"),
    ],
)
def test_a_broken_run_toml_is_said_by_every_command_that_reads_a_run(
    folder: Path, tmp_path: Path, text: str, said: str
) -> None:
    run, out = shutil.copytree(folder / "translation", tmp_path / "run"), tmp_path / "out"
    (run / "run.toml").write_text(text)
    before = sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file())
    for name, command in _reading(run, folder, out).items():
        status, printed, err = typed(*command)
        assert (status, printed) == (2, ""), name
        *told, last = err.splitlines()
        assert said in last, (name, err)
        assert str(run / "run.toml") in last, (name, err)
        assert all(line.startswith("regard: ") for line in told), (name, err)
        assert not out.exists(), name
    assert sorted((path, path.read_bytes()) for path in run.rglob("*") if path.is_file()) == before
