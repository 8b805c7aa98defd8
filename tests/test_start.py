"""The first seconds of the program: what it loads before its work, and Ctrl-C and SIGTERM in them."""

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest


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
