"""Examine all architectures, each in a process of its own, and write the page: `python docs/make_families.py`.

What is found is added to docs/families.jsonl, so that a run that was stopped goes on where it was.
"""

import argparse
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from pathlib import Path

from tests.families import table
from tests.families.architectures import architectures, library
from tests.families.examine import Row, examine, told

SECONDS, BYTES = 120, 8 << 30


def in_a_process(key: str, seconds: int = SECONDS, make: Callable[[str], Row] = examine) -> Row:
    """A row made in a fork of this process, which may crash, hang or take memory as it likes."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        _child(key, writing, make)
    os.close(writing)
    said, end = b"", time.monotonic() + seconds
    while select.select([reading], [], [], max(0, end - time.monotonic()))[0]:
        if not (piece := os.read(reading, 1 << 16)):
            break
        said += piece
    else:
        os.kill(pid, signal.SIGKILL)
    os.close(reading)
    _, status = os.waitpid(pid, 0)
    if said and status == 0:
        return json.loads(said)
    why = f"took more than {seconds} s" if time.monotonic() >= end else f"the process ended with {status}"
    return {"architecture": key, "model": architectures()[key], "why": f"not run: {why}"}


def _child(key: str, writing: int, make: Callable[[str], Row]) -> None:
    import torch

    torch.set_num_threads(1)  # a fork of a process that ran several threads would wait for them for ever
    resource.setrlimit(resource.RLIMIT_AS, (BYTES, BYTES))
    nothing = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 1)
    os.dup2(nothing, 2)
    try:
        row = make(key)
    except BaseException as error:
        row = {"architecture": key, "model": architectures()[key], "why": f"not examined: {told(error)}"}
    with os.fdopen(writing, "wb") as pipe:
        pipe.write(json.dumps(row).encode())
    os._exit(0)


def add_rows(path: Path, names: list[str], seconds: int = SECONDS, make: Callable[[str], Row] = examine) -> None:
    library()
    known = {json.loads(line)["architecture"] for line in path.open()} if path.exists() else set()
    with path.open("a", encoding="utf-8") as rows:
        for key in names or [key for key in architectures() if key not in known]:
            begun = time.monotonic()
            row = in_a_process(key, seconds, make)
            rows.write(json.dumps({**row, "seconds": round(time.monotonic() - begun, 1)}) + "\n")
            rows.flush()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--again", action="store_true", help="forget what is in the file")
    parser.add_argument("--page", action="store_true", help="write the page only")
    options = parser.parse_args()
    if not options.page:
        if options.again:
            table.ROWS.unlink(missing_ok=True)
        add_rows(table.ROWS, options.names)
    table.write()


if __name__ == "__main__":
    main()
