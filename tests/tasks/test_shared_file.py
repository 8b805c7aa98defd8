"""Ranks that share a file: one output in order, whoever translates what, and nothing lost when one of them ends."""

import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from itertools import islice
from pathlib import Path

import pytest
from torch._C._distributed_c10d import HashStore

from regard.cli.main import run_command
from regard.errors import DataError, RegardError, RendezvousError, WorkerError
from regard.generation.config import Beam
from regard.tasks.translation.bulk import shared_file
from regard.tasks.translation.bulk.lines import Answered, BulkTranslation
from regard.tasks.translation.bulk.resumable_output import opened
from regard.tasks.translation.bulk.shared_file import AHEAD, SharedFile
from regard.tasks.translation.results import Candidate, Translation
from regard.tasks.translation.train import train_translation
from regard.text.lines import BadLines, Line
from tests.tasks.small_runs import PAIRS, small_config
from tests.torchrun import environment, rank_of, torchrun

WINDOW = 4


class Killed(BaseException):
    """What ends the first rank."""


def lines_of(count: int) -> list[Line]:
    return [Line(f"in:{n}", f"{n}".encode()) for n in range(1, count + 1)]


def windows(lines: Iterable[Line], before: Callable[[Line], object]) -> Iterator[list[Answered]]:
    """Upper windows: a line's answer names it; a line that ends with 7 is bad."""
    iterator = iter(lines)
    while window := list(islice(iterator, WINDOW)):
        answers = []
        for line in window:
            before(line)
            text = line.raw.decode()
            problem = f"{line.place}: a seven" if text.endswith("7") else None
            answers.append(Answered(line, Translation(text, [], [Candidate(f"<{text}>", 0.0, [], None)], problem)))
        yield answers


def show(number: int, translation: Translation) -> str:
    return f"{number} {translation.text}"


def whole(count: int) -> str:
    return "".join(f"{n} <{n}>\n" for n in range(1, count + 1))


class Ranks:
    """Threads as ranks, around one store."""

    def __init__(self, target: Path, world_size: int, count: int, *, bad_lines: BadLines = "skip") -> None:
        self.store, self.target, self.count, self.bad_lines = HashStore(), target, count, bad_lines
        self.shares = [SharedFile(self.store, rank, world_size, window_lines=WINDOW) for rank in range(world_size)]
        self.translated: list[list[str]] = [[] for _ in self.shares]
        self.before: Callable[[int, Line], object] = lambda rank, line: None
        self.lines = [lines_of(count) for _ in self.shares]
        self.tell: Callable[[int], None] = lambda lines: None
        self.errors: dict[int, BaseException] = {}

    def run(self, *, resume: bool = False) -> BulkTranslation:
        threads = [threading.Thread(target=self._follow, args=(share,), daemon=True) for share in self.shares[1:]]
        for thread in threads:
            thread.start()
        work = self._work(self.shares[0])
        with opened(self.target, {"x": 1}, resume=resume, overwrite=False) as unfinished:
            assert unfinished is not None
            lines = iter(self.lines[0])
            unfinished.pass_over(lines)
            self.shares[0].lead(work, unfinished, lines, self.tell)
        for thread in threads:
            thread.join(10)
            assert not thread.is_alive()
        return work

    def _follow(self, share: SharedFile) -> None:
        try:
            if share.begin():
                share.translate(self._work(share))
        except Exception as error:
            self.errors[share.rank] = error
            share.fail(error)

    def _work(self, share: SharedFile) -> BulkTranslation:
        def before(line: Line) -> None:
            self.translated[share.rank].append(line.raw.decode())
            self.before(share.rank, line)

        picked = share.picked(iter(self.lines[share.rank]))
        return BulkTranslation(picked, windows(picked, before), show, self.bad_lines)


@pytest.mark.parametrize("count", [0, 3, 4, 41, 400])
@pytest.mark.parametrize("world_size", [2, 3])
def test_one_output_in_order_and_each_window_once(count: int, world_size: int, tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "out", world_size, count)
    ranks.before = lambda rank, line: time.sleep(1e-4)
    work = ranks.run()
    assert (tmp_path / "out").read_text() == whole(count)
    everything = [line for translated in ranks.translated for line in translated]
    assert sorted(everything, key=int) == [str(n) for n in range(1, count + 1)]
    assert count < 400 or all(ranks.translated), "one rank did it all"
    assert work.bad.lines == len([n for n in everything if n.endswith("7")])
    assert work.bad.first == (None if count < 7 else "in:7: a seven")
    assert ranks.store.num_keys() <= 6  # no answer stays behind


def test_no_window_is_taken_far_ahead_of_what_is_written(tmp_path: Path) -> None:
    """Rank 0 is slow: the other must wait for it, or the store would fill."""
    ranks, farthest = Ranks(tmp_path / "out", 2, 240), 0
    written = 0

    def before(rank: int, line: Line) -> None:
        nonlocal farthest
        if rank:
            farthest = max(farthest, int(line.raw) - written)
        else:
            time.sleep(2e-3)

    def tell(lines: int) -> None:
        nonlocal written
        written = lines

    ranks.before, ranks.tell = before, tell
    ranks.run()
    assert WINDOW < farthest <= (AHEAD * 2 + 2) * WINDOW


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_any_number_of_ranks_goes_on_where_others_were_killed(world_size: int, tmp_path: Path) -> None:
    def kill(lines: int) -> None:
        if lines >= 24:
            raise Killed

    first = Ranks(tmp_path / "out", 2, 90)
    first.tell = kill
    with pytest.raises(Killed):
        first.run()
    record = json.loads((tmp_path / "out.partial.json").read_text())
    assert record["lines"] == 24
    second = Ranks(tmp_path / "out", world_size, 90)
    second.run(resume=True)
    assert (tmp_path / "out").read_text() == whole(90)
    assert sum(map(len, second.translated)) == 90 - 24


def test_a_bad_line_ends_the_work_and_the_windows_before_it_are_kept(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="in:7: a seven"):
        Ranks(tmp_path / "out", 2, 90, bad_lines="stop").run()
    assert (tmp_path / "out.partial").read_text() == whole(4)


def test_a_rank_that_fails_says_why_by_the_first(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "out", 2, 400)

    def before(rank: int, line: Line) -> None:
        if rank == 1:
            raise RegardError("no memory is left")
        time.sleep(1e-4)

    ranks.before = before
    with pytest.raises(WorkerError, match="rank 1: no memory is left"):
        ranks.run()
    assert ranks.store.check(["told"])


def test_a_rank_that_reads_another_file_is_named(tmp_path: Path) -> None:
    ranks = Ranks(tmp_path / "out", 2, 400)
    ranks.before = lambda rank, line: time.sleep(1e-3 * (rank == 0))
    ranks.lines[1] = [line._replace(raw=b"0" + line.raw) for line in ranks.lines[1]]
    with pytest.raises(DataError, match=r"rank 1 reads other lines after line .*give every rank the same --input"):
        ranks.run()


def test_a_rank_that_is_silent_is_not_waited_for_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_file, "PATIENCE", timedelta(seconds=0.1))
    ranks = Ranks(tmp_path / "out", 2, 40)
    ranks.store.add("next", 1)  # somebody took the first window and was gone
    ranks.shares = ranks.shares[:1]
    with pytest.raises(RendezvousError, match=r"rank 0 waited .* start the ranks again with --resume"):
        ranks.run()
    with pytest.raises(RendezvousError, match="for the first rank"):
        SharedFile(HashStore(), 1, 2, window_lines=WINDOW).begin()


# -- real processes ------------------------------------------------------------------------------------------


def test_a_killed_rank_is_restarted_and_the_file_is_that_of_one_process(tmp_path: Path) -> None:
    enough = {"steps": 60, "validate_every": 60, "save_every": 60}  # answers end, instead of being cut off
    translator = train_translation(small_config(tmp_path, model="transformer", **enough))
    given, target = tmp_path / "in", tmp_path / "two"
    given.write_text("".join(f"{source}\n" for source, _ in PAIRS * 240))
    command = ["translate", str(tmp_path / "run"), "--input", str(given), "--device", "cpu", "--beam", "1"]
    command += ["--workers", "1"]
    launcher = torchrun("--max-restarts", "1", "-m", "regard", *command, "--output", str(target), "--resume")
    process = subprocess.Popen(launcher, env=environment(), stderr=subprocess.PIPE, text=True)
    record = Path(f"{target}.partial.json")
    deadline = time.monotonic() + 120
    while not (record.exists() and json.loads(record.read_text())["lines"]):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.01)
    os.kill(rank_of(process, 1), signal.SIGKILL)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 0, said
    assert said.count("going on after line") == 1
    answers = [one.text for one in translator.translate([source for source, _ in PAIRS], beam=Beam(1))]
    assert len(set(answers)) > 10
    assert target.read_text().splitlines() == answers * 240
    assert sorted(path.name for path in tmp_path.glob("two*")) == ["two"]


@pytest.mark.parametrize("more", ["a", "--input {data}", "--output {out}", "--input /dev/null --output {out}"])
def test_ranks_need_a_file_and_an_output(
    more: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "in").write_text("x\n")
    monkeypatch.setenv("WORLD_SIZE", "2")
    given = [part.format(data=tmp_path / "in", out=tmp_path / "out") for part in more.split()]
    assert run_command(["translate", str(tmp_path), *given]) == 2
    said = capsys.readouterr().err
    assert "torchrun shares out a file: give --input, a file that every rank can read, and --output" in said
