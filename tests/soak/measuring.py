"""Kill `regard measure` over and over, and see whether a byte is ever lost: python -m tests.soak.measuring --kills 20

For 1, 2 and 5 workers, and 2 and 5 ranks as of torchrun: a folder is begun, killed (SIGKILL) at a random moment of the
time that a whole run takes, gone on with and killed, until it is finished; then the next one, until there were so many
kills. Then the same with a disk that is full after a random number of files. Each finished folder must have the bytes
of an undisturbed run.
"""

import argparse
import errno
import os
import random
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from regard.cli.main import run_command
from regard.files import atomic
from tests import forked
from tests.corpus.conftest import SMALL, bytes_of, documents, measure_into, save_small_gpt2, write_jsonl

WORKERS, RANKS = ("1", "2", "5"), ("2", "5")
ENGINE = (*forked.IMPORTED, "regard.corpus.engine", "transformers.models.gpt2.modeling_gpt2")


Start = Callable[[Path], list[Any]]
"""Begins the processes of a run into a folder."""


def soak(start: Start, folder: Path, expected: dict[str, bytes], kills: int, draw: random.Random) -> int:
    """Kill so many runs; return how many folders were finished meanwhile, all with the expected bytes."""
    for name in ("first", "whole"):  # the first of them starts the server that forks
        began = time.monotonic()
        assert not any(one.wait() for one in start(folder / name))
    longest, finished, done = time.monotonic() - began, 0, 0
    while done < kills:
        out = folder / str(finished)
        processes = start(out)
        end = time.monotonic() + draw.random() * longest
        while time.monotonic() < end and any(one.poll() is None for one in processes):
            time.sleep(0.001)
        if any(one.poll() is None for one in processes):
            for one in processes:
                one.kill()
            done += 1
        assert {one.wait() for one in processes} <= {0, -9}, f"{out} cannot be gone on with"
        if (out / "_SUCCESS").exists():
            assert bytes_of(out) == expected, out
            finished += 1
    assert not any(one.wait() for one in start(folder / str(finished)))
    assert bytes_of(folder / str(finished)) == expected
    return finished + 1


def full_disks(words: list[str], folder: Path, expected: dict[str, bytes], times: int, draw: random.Random) -> None:
    """The disk is full after a random number of files, again and again, until the folder is finished."""
    to_disk = atomic.to_disk
    for number in range(times):
        out = folder / f"full{number}"
        while not (out / "_SUCCESS").exists():
            left = [draw.randint(1, 40)]

            def full(file: Any, left: list[int] = left) -> None:
                left[0] -= 1
                if left[0] <= 0:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                to_disk(file)

            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(atomic, "to_disk", full)
                assert run_command([*words, "--out", str(out)]) in (0, 2)
        assert bytes_of(out) == expected, out


def main() -> None:
    parser = argparse.ArgumentParser(description="Kill regard measure over and over, and compare the bytes.")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", nargs="*", choices=WORKERS, default=WORKERS)
    parser.add_argument("--ranks", nargs="*", choices=RANKS, default=RANKS)
    parser.add_argument("--disks", type=int, default=20)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder, draw = Path(name), random.Random(arguments.seed)
        model = save_small_gpt2(folder / "gpt2")
        docs = write_jsonl(folder / "docs.jsonl", documents(60))
        expected = bytes_of(measure_into(folder / "alone", model, docs))
        words = ["measure", str(model), "--data", str(docs), *SMALL, "--resume"]

        def start(kind: str, count: str, out: Path) -> list[Any]:
            if kind == "ranks":
                return forked.start_ranks(int(count), *words, "--out", str(out), imported=ENGINE)
            return [forked.Forked(*words, "--workers", count, "--out", str(out), imported=ENGINE)]

        for kind, count in (*(("workers", n) for n in arguments.workers), *(("ranks", n) for n in arguments.ranks)):
            place, began = folder / f"{count}{kind}", time.monotonic()
            place.mkdir()
            finished = soak(partial(start, kind, count), place, expected, arguments.kills, draw)
            told = f"{count} {kind}: {arguments.kills} kills, {finished} folders, the bytes of one run each"
            print(f"{told}, {time.monotonic() - began:.0f} s", flush=True)
        full_disks(words, folder, expected, arguments.disks, draw)
        print(f"full disks: {arguments.disks} folders, the bytes of one run each")


if __name__ == "__main__":
    main()
