"""Ctrl-C and SIGTERM at odd moments: 130 or 143, one line that says how to go on, and the same end after --resume."""

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from regard.training.checkpoints import Checkpoints

sys.path.insert(0, str(Path(__file__).parent))
from test_cli import TINY, environment, losses, regard

# Sends itself a signal when something happens for the n-th time: a moment that no clock could hit.
AT_A_MOMENT = """
import os, signal, sys
moment, number = sys.argv.pop(1), int(sys.argv.pop(1))
count = 0
def hook(event, arguments):
    global count
    path = str(arguments[0]) if arguments else ""
    if event in ("open", "os.rename", "os.remove") and moment in f"{event} {path}":
        count += 1
        if count == int(os.environ.get("NTH", "1")):
            os.kill(os.getpid(), number)
sys.addaudithook(hook)
if moment == "validation":
    from regard.training import loop
    real = loop._Run.judge
    def noisy(run, metrics):
        os.kill(os.getpid(), number)
        return real(run, metrics)
    loop._Run.judge = noisy
from regard.cli import main
main()
"""

MOMENTS = {
    "reading the data": "pairs.tsv",
    "learning a vocabulary": "pairs.tsv",
    "writing a tokenizer": "source_tokenizer.json",
    "writing tokens": "train.tokens.",
    "writing a checkpoint": "open .model-",
    "naming a checkpoint": "os.rename",
    "validation": "validation",
}
# The first time a file is opened, it is counted; the second time it is inside the library's trainer.
NTH = {"learning a vocabulary": "2", "naming a checkpoint": "9"}


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("signals") / "pairs.tsv"
    path.write_text("".join(f"{n} times {m}\t{m} mal {n}\n" for n in range(10) for m in range(10)))
    return path


@pytest.fixture(scope="module")
def undisturbed(data: Path) -> Path:
    out = data.parent / "run"
    done = regard("train", "--data", str(data), "--out", str(out), "--steps", "20", *TINY)
    assert done.returncode == 0, done.stderr
    return out


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", MOMENTS)
def test_it_ends_and_says_how_to_go_on(
    data: Path, undisturbed: Path, tmp_path: Path, moment: str, number: signal.Signals
) -> None:
    if (list(MOMENTS).index(moment) + (number == signal.SIGTERM)) % 2:
        pytest.skip("each moment with one of the signals, in turn: a process takes seconds to start")
    out = tmp_path / "run"
    command = ["train", "--data", str(data), "--out", str(out), "--steps", "20", *TINY]
    what = MOMENTS[moment].removeprefix("open ") if moment == "writing a checkpoint" else MOMENTS[moment]
    ended = subprocess.run(
        [sys.executable, "-c", AT_A_MOMENT, what, str(int(number)), *command],
        env=environment(NTH=NTH.get(moment, "1")),
        capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 128 + number, ended.stderr
    last = ended.stderr.splitlines()[-1]
    assert last.startswith("regard: ")
    assert "Traceback" not in ended.stderr
    assert re.search(rf"; go on with: regard train --out {re.escape(str(out))} --resume$", last)
    assert not list(out.rglob("*.tmp"))
    if saved := re.search(r"after step (\d+), which is saved", last):
        assert Checkpoints(out).position("last").step == int(saved[1])
    resumed = regard("train", "--out", str(out), "--resume")
    assert resumed.returncode == 0, resumed.stderr
    assert losses(out) == losses(undisturbed)


def test_before_anything_is_written_there_is_nothing_to_go_on_with(data: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    command = ["train", "--data", str(data), "--out", str(out), "--steps", "20", *TINY]
    ended = subprocess.run(
        [sys.executable, "-c", AT_A_MOMENT, ".config.json", str(int(signal.SIGTERM)), *command],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=180, check=False,
    )  # fmt: skip
    assert ended.returncode == 143, ended.stderr
    assert ended.stderr.splitlines()[-1] == "regard: stopped by SIGTERM"
    done = regard("train", *command[1:])
    assert done.returncode == 0, done.stderr
