"""Search for faults at random: python -m tests.fuzz --minutes 60 --seed 1 --only core maps

Each failure is printed with its smallest case and the command that runs it again. The exit status is then 1.
"""

import argparse
import json
import os
import random
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from tests.fuzz.grounds import ALL, GROUNDS, Ground
from tests.fuzz.search import ROOT, Failure

TURN = 60.0
"""The seconds that one process searches before the next ground has its turn, in a process of its own."""
PATIENCE = 420.0
"""The longest that one seed may take with the search for its smallest case, until its process is ended."""


@dataclass
class Tally:
    seed: int
    seconds: float = 0.0
    cases: int = 0
    seeds: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def __str__(self) -> str:
        failures = f"{self.kinds.total()} failures of {len(self.kinds)} kinds" if self.kinds else "no failure"
        return f"{self.seeds} seeds, {self.cases} cases in {self.seconds:.0f} s: {failures}"


def main(arguments: list[str] | None = None) -> int:
    options = parsed(arguments)
    tallies = {name: Tally(options.seed) for name in options.only}
    end = time.monotonic() + 60 * options.minutes
    print(f"fuzz: seed {options.seed}, {options.minutes:g} minutes, {', '.join(options.only)}", flush=True)
    while waiting := [
        n
        for n in options.only
        if time.monotonic() < end and (options.rounds is None or tallies[n].seeds < options.rounds)
    ]:
        for name in waiting:
            seconds = min(TURN, max(1.0, (end - time.monotonic()) / len(waiting)))
            _take_turn(ALL[name], tallies[name], options.rounds, seconds)
    for name, tally in tallies.items():
        print(f"{name}: {tally}", *(f"  {n} x {kind}" for kind, n in tally.kinds.most_common()), sep="\n", flush=True)
    return int(any(tally.kinds for tally in tallies.values()))


def parsed(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__.splitlines()[0])
    parser.add_argument("--minutes", type=float, default=10.0, help="how long in all (10)")
    parser.add_argument("--seed", type=int, help="the first seed (random)")
    parser.add_argument("--rounds", type=int, help="stop after so many seeds of each ground")
    parser.add_argument("--only", nargs="+", default=list(GROUNDS), help=f"of {', '.join(GROUNDS)} (all)")
    options = parser.parse_args(arguments)
    options.only = [name for given in options.only for name in given.split(",") if name]
    if unknown := set(options.only) - ALL.keys():
        parser.error(f"--only knows {', '.join(GROUNDS)}; got {', '.join(sorted(unknown))}")
    options.seed = random.SystemRandom().randrange(10**9) if options.seed is None else options.seed
    return options


def _take_turn(ground: Ground, tally: Tally, rounds: int | None, seconds: float) -> None:
    start, running = time.monotonic(), None
    left = 10**9 if rounds is None else rounds - tally.seeds
    read, write = os.pipe()
    errors = tempfile.TemporaryFile()  # noqa: SIM115  (a pipe would hold the process up when it is full)
    process = subprocess.Popen(
        [
            sys.executable, "-m", "tests.fuzz.worker", ground.name, "--seed", str(tally.seed), "--rounds", str(left),
            "--seconds", str(seconds), "--fd", str(write), "--known", json.dumps(list(tally.kinds)),
        ],
        cwd=ROOT, pass_fds=[write], stdout=subprocess.DEVNULL, stderr=errors, start_new_session=True,
    )  # fmt: skip
    os.close(write)
    for message in _messages(read, process):
        if "begins" in message:
            running = message["begins"]
            continue
        running = None
        tally.seed, tally.seeds, tally.cases = message["ended"] + 1, tally.seeds + 1, tally.cases + message["cases"]
        if message["failure"]:
            _report(Failure(**message["failure"]), tally)
    status = process.wait()
    errors.seek(0)
    words = errors.read().decode(errors="replace")
    errors.close()
    if running is not None or status:
        seed = tally.seed if running is None else running
        tally.seed, tally.seeds = seed + 1, tally.seeds + 1
        ended = f"killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        _report(Failure(ground.name, seed, f"the process was {ended}", words[:3000]), tally)
    tally.seconds += time.monotonic() - start


def _messages(read: int, process: "subprocess.Popen[bytes]") -> Iterator[dict[str, Any]]:
    """The lines of a worker, until it ends; it is ended itself when it says nothing for too long."""
    waiting = b""
    with os.fdopen(read, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], PATIENCE)
            if not ready:
                os.killpg(process.pid, signal.SIGKILL)
                return
            if not (more := pipe.read(1 << 16)):
                return
            *lines, waiting = (waiting + more).split(b"\n")
            yield from map(json.loads, lines)


def _report(failure: Failure, tally: Tally) -> None:
    tally.kinds[failure.kind] += 1
    again = f"make fuzz ONLY={failure.ground} SEED={failure.seed} ROUNDS=1"
    if tally.kinds[failure.kind] == 1:
        print(f"\n-- {failure.ground}: {failure.kind}\n{failure.text}\nagain: {again}\n", flush=True)
    elif tally.kinds[failure.kind] < 20:
        print(f"-- {failure.ground}: once more {failure.kind}; again: {again}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
