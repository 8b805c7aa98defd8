"""A process that searches seed after seed of one ground, within limits of memory and time.

It is its own process, since a fault may end the process that it is in, take all memory, or never come back.
"""

import argparse
import contextlib
import faulthandler
import json
import os
import resource
import signal
import time
from collections.abc import Iterator
from types import FrameType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

import torch

from tests.fuzz.grounds import ALL
from tests.fuzz.search import Case, search


class TooSlowError(Exception):
    """A case took longer than its ground allows."""


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("ground", choices=ALL)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--fd", type=int, required=True)
    parser.add_argument("--known", default="[]")
    options = parser.parse_args()
    faulthandler.enable()
    ground = ALL[options.ground]
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (ground.memory_bytes, ground.memory_bytes))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    known, end = set(json.loads(options.known)), time.monotonic() + options.seconds
    with os.fdopen(options.fd, "w") as out:

        def tell(**what: Any) -> None:
            out.write(json.dumps(what) + "\n")
            out.flush()

        case = limited(ground.load(), ground.seconds)
        for seed in range(options.seed, options.seed + options.rounds):
            if time.monotonic() > end:
                break
            tell(begins=seed)
            runs, failure = search(ground.name, case, seed, ground.cases, known)
            known |= {failure.kind} if failure else set()
            tell(ended=seed, cases=runs, failure=failure and failure.as_json())


def limited(case: Case, seconds: float) -> Case:

    @contextlib.contextmanager
    def alarmed() -> Iterator[None]:
        def ring(signum: int, frame: FrameType | None) -> None:
            raise TooSlowError(f"a case took longer than {seconds:g} seconds")

        before = signal.signal(signal.SIGALRM, ring)
        signal.setitimer(signal.ITIMER_REAL, seconds)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)

    def run(drawn: Any) -> None:
        with alarmed():
            case(drawn)

    return run


if __name__ == "__main__":
    main()
