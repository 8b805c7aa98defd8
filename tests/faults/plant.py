"""Plant faults, one at a time, in a copy of the project, and see whether the tests notice: make faults ONLY=maps

The lists beside this file name the faults: the text that is replaced, what takes its place, the tests that should see
it, and why it matters. The checkout is never changed: each of two workers has a copy of the tree in a folder of
its own, which is removed at the end, also after Ctrl-C. Before any fault is planted the tests run once as the tree
is, because a test that fails anyway sees nothing.

seen      a test failed, the process died, or it did not end in time
missed    every test passed; one is enough for exit status 1
broken    the text is not in the file exactly once, or pytest could not run the tests; exit status 1 too
"""

import argparse
import asyncio
import os
import re
import shutil
import signal
import sys
import tempfile
import time
import tomllib
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Literal, NamedTuple

from tests import ROOT

LISTS = Path(__file__).parent
AT_ONCE = 2
LONGEST_S = 180.0
"""After so many seconds the tests of a fault are stopped."""
COPIED = (
    "src",
    "tests",
    "docs",
    "benchmarks",
    "conftest.py",
    "pyproject.toml",
    "package.json",
    "eslint.config.js",
    "Makefile",
    "*.md",
    "*.cff",
)
PYTEST = (
    "-m",
    "pytest",
    "--nightly",
    "-x",
    "-n",
    "0",
    "-p",
    "no:cacheprovider",
    "--hypothesis-profile",
    "first failure",
)


@dataclass(frozen=True)
class Fault:
    name: str
    file: str
    old: str
    new: str
    tests: list[str]
    why: str


class Outcome(NamedTuple):
    fault: Fault
    verdict: Literal["seen", "missed", "broken"]
    by: str
    """The test that failed, or another finding."""
    seconds: float


def listed(folder: Path = LISTS) -> list[Fault]:
    tables = {path.stem: tomllib.loads(path.read_text(encoding="utf-8")) for path in sorted(folder.glob("*.toml"))}
    return [Fault(f"{part}/{name}", **fields) for part, table in tables.items() for name, fields in table.items()]


class Tree:
    def __init__(self, root: Path, folder: Path) -> None:
        self.folder = folder
        for path in (path for pattern in COPIED for path in root.glob(pattern)):
            if path.is_dir():
                shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                folder.mkdir(exist_ok=True)
                shutil.copy2(path, folder)
        if (modules := root / "node_modules").is_dir():  # Tests of the page are passed over without them.
            (folder / "node_modules").symlink_to(modules.resolve())

    async def look(self, fault: Fault) -> Outcome:
        """Plant a fault, run its tests, and take it out again."""
        start = time.monotonic()
        try:
            with planted(self.folder, fault):
                code, said = await self.test(fault.tests, longest_s=LONGEST_S)
        except ValueError as error:
            return Outcome(fault, "broken", str(error), 0.0)
        verdict: Literal["seen", "missed", "broken"] = "seen"
        if code in (None, 1) or code < 0:
            failed = re.search(r"^(?:FAILED|ERROR) (.+?)(?: - |$)", said, re.MULTILINE)
            by = failed[1] if failed else "it did not end in time" if code is None else f"the process ended with {code}"
        elif code == 0:
            verdict, by = "missed", fault.why
        else:
            verdict, by = "broken", "\n".join(said.splitlines()[-12:])
        return Outcome(fault, verdict, by, time.monotonic() - start)

    async def test(self, tests: Iterable[str], *, longest_s: float | None) -> tuple[int | None, str]:
        """The exit status of pytest, None if it was stopped, and what it printed."""
        env = os.environ | {"PYTHONPATH": str(self.folder / "src"), "OMP_NUM_THREADS": "1"}
        process = await asyncio.create_subprocess_exec(
            sys.executable, *PYTEST, *tests, cwd=self.folder, env=env, start_new_session=True,
            stdin=asyncio.subprocess.DEVNULL, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
        )  # fmt: skip
        try:
            async with asyncio.timeout(longest_s):
                said, _ = await process.communicate()
        except TimeoutError:
            return None, ""
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # and what the tests have started
            await process.wait()
        return process.returncode, said.decode(errors="replace")


_SECONDS = count(1)
"""Times of planted files, each of which is taken once."""


@contextmanager
def planted(root: Path, fault: Fault) -> Iterator[None]:
    """The file with the fault in it while the block runs, and as it was afterwards.

    Raises:
        ValueError: the file is absent, or the text is not in it exactly once.
    """
    path = root / fault.file
    sound = path.read_bytes() if path.is_file() else b""
    if (times := sound.decode().count(fault.old)) != 1:
        raise ValueError(f"{fault.file} holds the text {times} times: {fault.old!r}")
    path.write_bytes(sound.replace(fault.old.encode(), fault.new.encode()))
    # Python takes a compiled file for fresh if time (in seconds) and size agree, and a fault may keep both.
    os.utime(path, (0, next(_SECONDS)))
    try:
        yield
    finally:
        path.write_bytes(sound)


async def plant(root: Path, faults: Sequence[Fault]) -> bool:
    """Plant the faults in copies of a project, and print the result of each; False unless all are seen."""
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="regard-faults-") as place:
        trees = [Tree(root, Path(place, str(number))) for number in range(AT_ONCE)]
        if not await _passes(trees, sorted({test for fault in faults for test in fault.tests})):
            return False
        waiting = deque(faults)

        async def work(tree: Tree) -> None:
            while waiting:
                outcomes.append(await tree.look(waiting.popleft()))
                fault, verdict, by, seconds = outcomes[-1]
                print(f"{verdict:6} {seconds:5.1f} s  {fault.name}: {by}", flush=True)

        async with asyncio.TaskGroup() as group:
            for tree in trees:
                group.create_task(work(tree))
    counts = Counter(outcome.verdict for outcome in outcomes)
    print(", ".join(f"{counts[verdict]} {verdict}" for verdict in ("seen", "missed", "broken")))
    return counts["seen"] == len(outcomes)


async def _passes(trees: Sequence[Tree], tests: Sequence[str]) -> bool:
    """Whether the tests pass where no fault is planted."""
    shares = [tests[number :: len(trees)] for number in range(len(trees))]
    ran = await asyncio.gather(
        *(tree.test(share, longest_s=None) for tree, share in zip(trees, shares, strict=True) if share)
    )
    for code, said in ran:
        if code != 0:
            print(said, "\nThe tests do not pass as the tree is: no fault was planted.", sep="")
    return all(code == 0 for code, _ in ran)


def main() -> None:
    parser = argparse.ArgumentParser(description="Plant faults in a copy of the project, and see the tests notice.")
    parser.add_argument("words", nargs="*", help="only faults whose name or file holds one of these words")
    words = parser.parse_args().words
    chosen = [fault for fault in listed() if not words or any(w in fault.name or w in fault.file for w in words)]
    if not chosen:
        parser.error(f"no fault has {' or '.join(words)} in its name or file")
    try:
        sys.exit(0 if asyncio.run(plant(ROOT, chosen)) else 1)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    main()
