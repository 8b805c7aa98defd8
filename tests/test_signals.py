"""Ctrl-C and SIGTERM at odd moments: 130 or 143, one line that says how to go on, and the same end after --resume."""

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from regard.tasks.text.spool import Spool
from regard.tasks.training import loop
from regard.tasks.training.checkpoints import Checkpoints
from tests.conftest import Call
from tests.test_cli import TINY, losses
from tests.test_cli import data as data

# What is done to which file: moments that no clock could hit. The pairs are opened once; the library's trainer and the
# encoding read them from the spool.
MOMENTS = {
    "counting the pairs": ("open", "pairs.tsv", 1),
    "learning a vocabulary": ("tests.iterate", "spool", 1),
    "writing a tokenizer": ("open", "source_tokenizer.json.", 1),
    "naming a tokenizer": ("os.rename", "target_tokenizer.json.", 1),
    "writing tokens": ("open", "tokens.npy.", 1),
    "naming the tokens": ("os.rename", "tokens.npy.", 1),
    "writing the best model": ("open", ".best.safetensors.", 1),
    "writing the last state": ("open", ".last.safetensors.", 1),
    "naming a checkpoint": ("os.rename", ".last.safetensors.", 2),
}
armed: dict[str, Any] = {}


def hook(event: str, arguments: tuple[Any, ...]) -> None:
    if armed and event == armed["event"] and armed["path"] in str(arguments[0]):
        armed["left"] -= 1
        if not armed["left"]:
            number = armed["number"]
            armed.clear()
            os.kill(os.getpid(), number)


@pytest.fixture(scope="module")
def hooked() -> None:
    sys.addaudithook(hook)  # there is no taking it off: it does nothing unless armed


@pytest.fixture
def moment(hooked: None, monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """What to arm. The interpreter tells of files; a vocabulary is learnt from a file that is open already."""
    iterate = Spool.__iter__

    def audited(spool: Spool) -> Iterator[Any]:
        sys.audit("tests.iterate", "spool")
        return iterate(spool)

    monkeypatch.setattr(Spool, "__iter__", audited)
    yield armed
    armed.clear()


def command(data: Path, out: Path) -> list[str]:
    return ["train", "--data", str(data), "--out", str(out), "--steps", "22", *TINY]


def check_it_can_be_gone_on_with(call: Call, data: Path, out: Path, err: str) -> None:
    last = err.splitlines()[-1]
    assert last.startswith("regard: ")
    assert "Traceback" not in err
    assert re.search(rf"; go on with: regard train --out {re.escape(str(out))} --resume$", last)
    assert not list(out.rglob("*.tmp"))
    if saved := re.search(r"after step (\d+), which is saved", last):
        assert Checkpoints(out).position("last").step == int(saved[1])
    assert call("train", "--out", str(out), "--resume")[0] == 0
    straight = data.parent / "straight"
    if not straight.exists():
        assert call(*command(data, straight))[0] == 0
    assert losses(out) == losses(straight)


@pytest.mark.parametrize("number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", MOMENTS)
def test_it_ends_and_says_how_to_go_on(
    call: Call, data: Path, tmp_path: Path, moment: dict[str, Any], name: str, number: signal.Signals
) -> None:
    out, (event, path, nth) = tmp_path / "run", MOMENTS[name]
    moment.update(event=event, path=path, left=nth, number=number)
    status, _, err = call(*command(data, out))
    assert not moment, "the moment did not come"
    assert status == 128 + number, err
    check_it_can_be_gone_on_with(call, data, out, err)


@pytest.mark.parametrize(
    ("numbers", "said"),
    [
        # The validation of step 10 is finished, and so is the next step.
        ([signal.SIGINT], "stopped by SIGINT after step 11, which is saved"),
        ([signal.SIGTERM], "stopped by SIGTERM after step 11, which is saved"),
        ([signal.SIGINT, signal.SIGINT], "interrupted; go on with: "),
    ],
)
def test_in_the_middle_of_a_validation(
    call: Call, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, numbers: list[signal.Signals], said: str
) -> None:
    real, before = loop._Run.judge, signal.getsignal(numbers[0])

    def noisy(run: Any, metrics: Any) -> bool:
        monkeypatch.setattr(loop._Run, "judge", real)
        for number in numbers:
            os.kill(os.getpid(), number)
        return real(run, metrics)

    monkeypatch.setattr(loop._Run, "judge", noisy)
    status, _, err = call(*command(data, tmp_path / "run"))
    assert status == 128 + numbers[0], err
    assert signal.getsignal(numbers[0]) is before
    assert err.splitlines()[-1].startswith(f"regard: {said}")
    check_it_can_be_gone_on_with(call, data, tmp_path / "run", err)


@pytest.mark.parametrize("name", [".run.toml", ".config.json"])
def test_before_anything_is_written_there_is_nothing_to_go_on_with(
    call: Call, data: Path, tmp_path: Path, moment: dict[str, Any], name: str
) -> None:
    moment.update(event="open", path=name, left=1, number=signal.SIGTERM)
    status, _, err = call(*command(data, tmp_path / "run"))
    assert status == 143
    assert err.splitlines()[-1] == "regard: stopped by SIGTERM"
    assert call(*command(data, tmp_path / "run"))[0] == 0


def begun(*arguments: str, cwd: Path) -> subprocess.Popen[str]:
    """The real program, which has got so far that it listens to signals: before that, Python itself is starting."""
    command = [sys.executable, "-m", "regard", *arguments]  # not of a shell's background, where SIGINT is ignored
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, cwd=cwd, env=environment, stderr=subprocess.PIPE, text=True)
    status, deadline = Path(f"/proc/{process.pid}/status"), time.monotonic() + 30
    listens = 1 << (signal.SIGTERM - 1)
    while time.monotonic() < deadline:
        caught = re.search(r"SigCgt:\s*(\w+)", status.read_text())
        if process.poll() is not None or (caught and int(caught[1], 16) & listens):
            return process
        time.sleep(0.001)
    raise AssertionError("the program does not listen to SIGTERM")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("start")
    pairs = "".join(f"{n} times {m}\t{m} mal {n}\n" for n in range(40) for m in range(40))
    (path / "pairs.tsv").write_text(pairs * 10)
    return path


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_ends_it_at_any_moment(folder: Path, number: signal.Signals) -> None:
    """While its commands, torch and the rest are imported, while the data are read, and in training: one line."""
    started = {}
    # The two share their handler: each has every other moment.
    for seconds in (0.0, 0.3, 2) if number == signal.SIGINT else (0.1, 1, 4):
        where = ("--data", "pairs.tsv", "--out", f"run-{seconds}-{number}", "--device", "cpu")
        started[begun("train", *where, cwd=folder)] = time.monotonic() + seconds
    for process, moment in started.items():
        time.sleep(max(moment - time.monotonic(), 0.0))
        process.send_signal(number)
    for process in started:
        _, err = process.communicate(timeout=60)
        assert process.returncode == 128 + number, err
        assert [line for line in err.splitlines() if line.startswith("regard: ")] == err.splitlines()[-1:], err
        assert re.match("regard: (interrupted|stopped by)", err.splitlines()[-1])
        assert "Traceback" not in err
        assert "Error" not in err


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_an_import_that_swallows_interrupts_is_ended_too(tmp_path: Path) -> None:
    """torch goes on without numpy if Ctrl-C comes while it imports it, and so do others whose imports are tried."""
    (tmp_path / "torch.py").write_text(
        "import time\nprint('importing', flush=True)\n"
        "while True:\n    try:\n        time.sleep(60)\n    except BaseException:\n        pass\n"
    )
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text('{"model_type": "gpt2"}')
    (tmp_path / "run" / "tokenizer.json").write_text("{}")
    for number in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen(
            [sys.executable, "-m", "regard", "generate", "run", "Once"],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        assert process.stdout is not None
        assert process.stdout.readline() == "importing\n"
        process.send_signal(number)
        _, err = process.communicate(timeout=30)
        line = "interrupted" if number == signal.SIGINT else "stopped by SIGTERM"
        assert (process.returncode, err) == (128 + number, f"regard: {line}\n")
