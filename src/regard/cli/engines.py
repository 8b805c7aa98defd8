"""The flags of a search: its beam, and the engine (`--engine`, `--precision`)."""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.loading import speaks
from regard.cli.shared import Command, below, refuse_first
from regard.errors import ArgumentError, MissingExtraError, RunFolderError
from regard.tasks.generation.config import LARGEST, Beam, Engine, SearchPrecision

if TYPE_CHECKING:
    import torch

    from regard.tasks.translation.translator import Translator

OWN = "regard"


@dataclass(frozen=True, slots=True)
class OwnSearch:
    reason: str | None = None
    """Why CTranslate2 does not search: a line on standard error says so once the search begins."""

    def settings(self) -> dict[str, str]:
        return {"engine": OWN, "precision": "float32"}

    @contextmanager
    def searching(self, translator: "Translator", run: Path, workers: int | None = None) -> Iterator[str]:
        _say(self.reason)
        yield OWN


@dataclass(frozen=True, slots=True)
class CTranslate2Search:
    precision: SearchPrecision
    insists: bool
    """Whether an error is told; otherwise regard searches in its place, and a line says why."""

    def settings(self) -> dict[str, str]:
        from regard.tasks.exports.ctranslate2 import library

        return {"engine": f"ctranslate2 {library().__version__}", "precision": self.precision}

    @contextmanager
    def searching(self, translator: "Translator", run: Path, workers: int | None = None) -> Iterator[str]:
        """Search by threads of this process, one for each batch; or where the engine fails and nothing insists on it,
        with regard's own search."""
        from regard.tasks.exports.engine import searching_by_ctranslate2
        from regard.tasks.training.distributed import usable_cores

        threads = workers
        if threads is None:
            threads = usable_cores() if translator.device.type == "cpu" else 1
        or_own = None if self.insists else _say
        engine = searching_by_ctranslate2(translator, run, precision=self.precision, threads=threads, or_own=or_own)
        with ExitStack() as stack:
            try:
                name = str(stack.enter_context(engine))
            except (OSError, RunFolderError, ArgumentError) as error:
                if self.insists:
                    raise
                _say(str(error))
                name = OWN
            yield name


SearchBy = OwnSearch | CTranslate2Search


def _say(reason: str | None) -> None:
    if reason is not None and speaks():
        print(f"regard's own search: {reason}", file=sys.stderr)


class SearchCommand(Command):
    __slots__ = ()
    beam: int | None
    nbest: int = 1
    length_penalty: float
    engine: Engine | None
    """None for CTranslate2 where it is installed and can."""
    precision: SearchPrecision | None
    """None for float32."""

    @property
    def size(self) -> int:
        return Beam().size if self.beam is None else self.beam

    @property
    def search(self) -> Beam:
        return Beam(self.size, num_best=self.nbest, length_penalty=self.length_penalty)

    def refuse_search(self) -> None:
        penalty = self.length_penalty
        refuse_first(
            below("--beam", self.size),
            (not 0 <= penalty < inf, f"--length-penalty must be at least 0, got {penalty}"),
            (penalty > LARGEST, f"--length-penalty must be at most {LARGEST}, got {penalty}"),
        )
        if self.engine == "regard" and self.precision == "int8":
            raise ArgumentError("--precision int8 is CTranslate2's, and --engine regard searches in float32")

    def chosen_search(self, device: "torch.device", check: Callable[[], None]) -> SearchBy:
        """The one who searches; if it is regard, where CTranslate2 is installed, it says why on standard error."""
        if self.engine == "regard":
            return OwnSearch()
        insists = self.engine == "ctranslate2" or self.precision == "int8"  # which is in no other search
        by_ctranslate2 = CTranslate2Search(self.precision or "float32", insists)
        if insists:
            check()
            return by_ctranslate2
        try:
            check()
        except MissingExtraError:
            return OwnSearch()
        except ArgumentError as error:
            return OwnSearch(str(error))
        if device.type != "cpu":
            return OwnSearch(f"CTranslate2 searches on {device} only by --engine ctranslate2")
        return by_ctranslate2
