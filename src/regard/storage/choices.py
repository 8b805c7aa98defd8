"""Which of several ways is the fastest on this machine: measured once, and kept in a file of the user.

A rule by the name of a processor is wrong on the next one. A second process should decide the same as the first; so
what was found is kept, in a file named after the processor and the version of torch.
"""

import os
import platform
import time
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import RunFolderError

Way = Callable[[Tensor], Tensor]
BUDGET_S = 0.1
"""The time that all measurements of one process may take."""
ROUNDS = 3
"""Each way is timed so often, in turn, and its shortest time counts."""
FOLDER = "REGARD_CACHE"
"""The environment variable that names another folder for what was measured."""
OFF = "off"
"""What that variable says where nothing shall be measured: every process then computes alike, to the last bit."""


class Choices:
    """What was measured, by kind of work; kinds that are not in it are measured while there is time left.

    Args:
        path: the file of this machine; None keeps nothing.
        budget_s: the seconds that measurements may take.
    """

    def __init__(self, path: Path | None, budget_s: float = BUDGET_S) -> None:
        self.path, self.left_s = path, budget_s
        self.known = {} if path is None else _read(path)
        """The microseconds of each way, by kind."""
        self.told: dict[str, str] = {}
        """What was chosen in this process, and why: a line for each kind."""
        self._is_new = False

    def fastest(self, kind: str, ways: Mapping[str, Callable[[], Way | None]], x: Tensor) -> str:
        """The name of the fastest way for x.

        Args:
            kind: what decides about it on one machine.
            ways: make each way, or None where this machine does not have it. The first one that there is is taken if
                there is no time left.
            x: what each way is called with.
        """
        times = self.known.get(kind, {})
        if not times or not set(times) <= set(ways):
            made = {name: way for name, make in ways.items() if (way := make()) is not None}
            if len(made) == 1 or self.left_s <= 0:
                late = f"{FOLDER} is {OFF}" if is_off() else "the time for it was over"
                why = "the only way here" if len(made) == 1 else f"not measured, {late}"
                self.told[kind] = f"{kind}: {next(iter(made))} ({why})"
                return next(iter(made))
            times = self.known[kind] = self._measured(made, x)
            self._is_new = True
        best = min(times, key=lambda way: times[way])
        said = ", ".join(f"{way} {spent:g}" for way, spent in times.items())
        self.told[kind] = f"{kind}: {best} (us: {said})"
        return best

    def _measured(self, ways: Mapping[str, Way], x: Tensor) -> dict[str, float]:
        start, times = time.perf_counter(), dict.fromkeys(ways, float("inf"))
        for number in range(ROUNDS + 1):
            for name, way in ways.items():
                before = time.perf_counter()
                way(x)
                # The first round warms up.
                if number:
                    times[name] = min(times[name], 1e6 * (time.perf_counter() - before))
        self.left_s -= time.perf_counter() - start
        return {name: round(spent, 1) for name, spent in times.items()}

    def allow(self, seconds: float) -> None:
        """Let measurements take so much time from now on, unless nothing shall be measured."""
        if os.environ.get(FOLDER) != OFF:
            self.left_s = max(self.left_s, seconds)

    def keep(self) -> None:
        """Write what was measured into the file. What another process has written there meanwhile stays.

        Without a file, or where it cannot be written, each process measures for itself.
        """
        if self.path is None or not self._is_new:
            return
        from regard.storage.atomic import write_json

        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            theirs = _read(self.path).items()
            self.known |= {k: t for k, t in theirs if k not in self.known or set(t) == set(self.known[k])}
            write_json(self.path, dict(self.known))
        except OSError:
            self.path = None
        self._is_new = False


@cache
def choices() -> Choices:
    """The choices of this machine."""
    return Choices(None, budget_s=0.0) if is_off() else Choices(_path())


def is_off() -> bool:
    """Whether nothing shall be measured, so that every process computes alike."""
    return os.environ.get(FOLDER) == OFF


def said_of_choices() -> list[str]:
    """What this process has chosen, and why: a line for each kind of product, after one that names the file."""
    found = choices()
    kept = "not kept: there is no folder to write to"
    if found.path is not None:
        kept = f"kept in {found.path}; remove that file to measure again"
    told = list(found.told.values()) or ["none: no model was made ready for decoding on the CPU"]
    return [f"products ({kept}):", *(f"  {line}" for line in told)]


def _path() -> Path | None:
    """The file of this machine: what was measured holds for its processor and this torch."""
    own = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    folder = os.environ.get(FOLDER) or os.path.join(own, "regard")
    if not os.path.isabs(folder):
        return None
    name = "".join(c if c.isalnum() else "-" for c in f"{_processor()}-{torch.__version__}")
    return Path(folder, f"products-{name}.json")


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    told = [line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "model\t", "stepping"))]
    return " ".join(dict.fromkeys(told)) or platform.machine()


def _read(path: Path) -> dict[str, dict[str, float]]:
    """What a file holds; nothing if it is absent or damaged."""
    from regard.storage.atomic import read_json

    try:
        found = read_json(path)
    except (OSError, RunFolderError):
        return {}
    return {kind: times for kind, times in found.items() if _are_times(times)}


def _are_times(times: Any) -> bool:
    return isinstance(times, dict) and bool(times) and all(isinstance(t, int | float) and t > 0 for t in times.values())
