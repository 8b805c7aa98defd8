"""Who searches for translations: what `--engine` and `--precision` mean together."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from regard.errors import ArgumentError
from regard.exports.formats import Engine, SearchPrecision

if TYPE_CHECKING:
    from regard.tasks.translation.translator import Translator


@dataclass(frozen=True, slots=True)
class SearchBy:
    """An engine, and the precision of its products.

    Raises:
        ArgumentError: another precision than float32 is asked of regard's own search.
    """

    engine: Engine
    wanted: SearchPrecision | None = None
    """None for the engine's own choice."""

    def __post_init__(self) -> None:
        """Check that the two go together."""
        if self.is_own and self.wanted not in (None, "float32"):
            raise ArgumentError(f"--precision {self.wanted} is for --engine ctranslate2; regard searches in float32")

    @property
    def is_own(self) -> bool:
        """Whether regard searches."""
        return self.engine == "regard"

    @property
    def precision(self) -> SearchPrecision:
        """The precision of the search."""
        return self.wanted or ("float32" if self.is_own else "int8")

    def settings(self) -> dict[str, str]:
        """What decides the answers, as values that JSON can hold."""
        if self.is_own:
            return {"engine": self.engine, "precision": self.precision}
        from regard.exports.ctranslate2 import library

        return {"engine": f"{self.engine} {library().__version__}", "precision": self.precision}

    def refuse(self, run: Path) -> None:
        """Check that the engine is here and can search for a run, before its model is loaded.

        Raises:
            ArgumentError: it cannot express the run's model.
            MissingExtraError: it is not installed.
        """
        if not self.is_own:
            from regard.exports.engine import refuse_run

            refuse_run(run)

    @contextmanager
    def searching(self, translator: "Translator", run: Path, workers: int | None = None) -> Iterator[str]:
        """Let the engine search for a translator that was loaded from `run`, and give the engine's name.

        Args:
            translator: the translator.
            run: the run folder.
            workers: batches that another engine searches at a time; unless given one for each core.
        """
        if self.is_own:
            yield self.engine
            return
        from regard.exports.engine import searching_by_ctranslate2

        threads = workers or (cores() if translator.device.type == "cpu" else 1)
        with searching_by_ctranslate2(translator, run, precision=self.precision, threads=threads) as engine:
            yield str(engine)


def cores() -> int:
    """How many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
