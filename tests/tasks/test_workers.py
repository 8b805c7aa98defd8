"""Processes that share the sentences of a file."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from regard.errors import ArgumentError, WorkerError
from regard.generation.config import Beam
from regard.tasks.translation.bulk.worker_pool import Workers, sharing
from regard.tasks.translation.search_job import SearchJob
from regard.tasks.translation.train import train_translation
from regard.tasks.translation.translator import Translator
from tests.tasks.small_runs import PAIRS, small_config

LINES = [source for source, _ in PAIRS] + ["", "we see nine trees we see ten cats"]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("workers")
    train_translation(small_config(folder, model="transformer"))
    return folder / "run"


@pytest.fixture(scope="module")
def alone(run: Path) -> Translator:
    return Translator.load(run, device="cpu")


def children(process: int) -> list[int]:
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(process)], capture_output=True, text=True).stdout
    return [int(line) for line in found.split()]


def test_two_workers_answer_as_one_process_does_and_in_order(
    run: Path, alone: Translator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.tasks.translation.translator.CPU_SEARCH_PLACES", 200)  # many small batches
    expected = [one.candidates for one in alone.translate(LINES, beam=Beam(3, num_best=2))]
    words = alone.vocabulary(["on y voit dix chats"])
    kept = [one.text for one in alone.translate(LINES, vocabulary=words, beam=Beam(2))]
    sharer = Translator.load(run, device="cpu")
    with sharing(sharer, run, 2):
        found = [one.candidates for one in sharer.translate(LINES, beam=Beam(3, num_best=2))]
        assert [one.text for one in sharer.translate(LINES, vocabulary=words, beam=Beam(2))] == kept
        processes = [worker._process for worker in sharer.searcher._all]
        # An error of ours keeps its class and its words; whoever asks gets it, and the workers end.
        with pytest.raises(ArgumentError, match="max_steps must be at least 1, got 0"):
            sharer.searcher.search([SearchJob(sources=[[4, 2]], begin_id=1, end_id=2, max_steps=0)])
    assert sharer.searcher is None
    assert all(process.poll() is not None for process in processes)
    for some, others in zip(found, expected, strict=True):
        assert [one.text for one in some] == [other.text for other in others]
        assert [one.score for one in some] == pytest.approx([other.score for other in others], abs=1e-5)


def test_a_worker_that_dies_is_one_line(run: Path) -> None:
    with Workers(run, 1) as workers:
        workers._all[0]._process.kill()
        with pytest.raises(WorkerError, match="worker 1 of 1 ended by signal 9"):
            workers.search([SearchJob(sources=[[4, 2]], begin_id=1, end_id=2, max_steps=5)])


def test_a_run_that_cannot_be_loaded_is_that_error(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="nowhere") as caught:
        Workers(tmp_path / "nowhere", 1)
    assert type(caught.value).__name__ == "RunFolderError"
    with pytest.raises(ArgumentError, match="workers must be at least 1, got 0"):
        Workers(tmp_path, 0)


def test_ctrl_c_leaves_one_line_and_no_process(run: Path, tmp_path: Path) -> None:
    lines = tmp_path / "lines.txt"
    lines.write_text("".join(f"{line}\n" for line in LINES * 2_000))
    command = [sys.executable, "-m", "regard", "translate", str(run), "--input", str(lines), "--workers", "2"]
    process = subprocess.Popen(
        [*command, "--device", "cpu"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip
    assert process.stdout.readline()  # at work
    workers = children(process.pid)
    assert len(workers) == 2
    process.send_signal(signal.SIGINT)
    _, complaint = process.communicate(timeout=30)
    assert process.returncode == 130
    assert [line for line in complaint.splitlines() if line] == ["regard: interrupted"]
    for _ in range(50):
        if not any(os.path.exists(f"/proc/{worker}") for worker in workers):
            break
        time.sleep(0.1)
    assert not any(os.path.exists(f"/proc/{worker}") for worker in workers)
