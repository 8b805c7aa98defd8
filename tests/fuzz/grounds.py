"""The grounds on which faults are searched, and the limits of each."""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module

from tests.fuzz.search import Case


@dataclass(frozen=True)
class Ground:
    name: str
    where: str
    """The module and its function that draws and checks one."""
    cases: int = 25
    """Cases in a seed."""
    seconds: float = 60.0
    """The longest that a case may take."""
    memory_bytes: int = 12 << 30
    """The most address space of the process; torch alone maps some GiB."""

    def load(self) -> Case:
        module, _, name = self.where.partition(":")
        loaded: Callable[..., None] = getattr(import_module(module), name)
        return loaded


GROUNDS = {
    ground.name: ground
    for ground in (
        Ground("core", "tests.fuzz.core.ground:case"),
        Ground("maps", "tests.fuzz.maps.ground:case"),
        Ground("watch", "tests.fuzz.watch.ground:case", cases=10),
        Ground("paths", "tests.fuzz.paths.ground:case"),
        Ground("lifetimes", "tests.fuzz.lifetimes.ground:case"),
        Ground("files", "tests.fuzz.files.ground:case", memory_bytes=8 << 30),
        Ground("recurrences", "tests.fuzz.recurrences:case"),
        Ground("positions", "tests.fuzz.positions:case"),
        Ground("text", "tests.fuzz.text.ground:case"),
    )
}
BY_NAME = {"cards": Ground("cards", "tests.fuzz.cards:case")}
"""Grounds that need an environment of their own; they are run by name only."""
PRACTICE = {name: Ground(name, f"tests.fuzz.practice:{name}") for name in ("faulty", "deadly")}
"""Grounds on which the search itself is tested; they are run by name only."""
ALL = {**GROUNDS, **BY_NAME, **PRACTICE}
