"""The flags of a search: the engine (`--engine`, `--precision`), and the ranking of the translations of a sentence."""

import os
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING, Self

from regard.cli.loading import speaks
from regard.cli.shared import Command, refuse_first
from regard.errors import ArgumentError, MissingExtraError, RunFolderError
from regard.tasks.exports.formats import Engine, SearchPrecision
from regard.tasks.generation.config import LARGEST, Beam

if TYPE_CHECKING:
    import torch

    from regard.tasks.translation.translator import Translator

OWN = "regard"
LACKS: Mapping[str, str] = {
    "--vocabulary": "keeps to no vocabulary",
    "--length-reward": "has no length reward",
}
"""Why CTranslate2 cannot follow a flag."""


@dataclass(frozen=True, slots=True)
class OwnSearch:
    """Regard's own search, in float32."""

    reason: str | None = None
    """Why CTranslate2 does not search: a line on standard error says so once the search begins."""

    def settings(self) -> dict[str, str]:
        return {"engine": OWN, "precision": "float32"}

    @contextmanager
    def searching(self, translator: "Translator", run: Path, workers: int | None = None) -> Iterator[str]:
        """Search for a translator in the block, and give the name of the engine."""
        _say(self.reason)
        yield OWN


@dataclass(frozen=True, slots=True)
class CTranslate2Search:
    """CTranslate2's search, by the export in a run."""

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


@dataclass(frozen=True, slots=True)
class EngineFlags:
    """The flags of the engine."""

    engine: Engine | None
    """None for CTranslate2 where it is installed and can."""
    precision: SearchPrecision | None
    """None for float32."""
    asked: Collection[str] = ()
    """The given flags of `LACKS`."""

    @classmethod
    def of(cls, command: Command, *, rewards: bool = False) -> Self:
        """The flags of a command; `rewards` says whether its search rewards length."""
        asked = command.given(*LACKS)
        return command.part(cls, asked=asked if rewards else set(asked) - {"--length-reward"})

    def refuse(self) -> None:
        if self.engine == "regard" and self.precision == "int8":
            raise ArgumentError("--precision int8 is CTranslate2's, and --engine regard searches in float32")
        flag = self._lacked()
        if self.insisting is not None and flag is not None:
            raise ArgumentError(f"{self.insisting} {LACKS[flag]}: leave out {flag}")

    @property
    def insisting(self) -> str | None:
        """The flag by which CTranslate2 was insisted on; int8 is in no other search."""
        if self.engine == "ctranslate2":
            return "--engine ctranslate2"
        return "--precision int8 goes by CTranslate2, which" if self.precision == "int8" else None

    def chosen(self, device: "torch.device", check: Callable[[], None]) -> SearchBy:
        """The one who searches; if it is regard, where CTranslate2 is installed, it says why on standard error."""
        if self.engine == "regard":
            return OwnSearch()
        by_ctranslate2 = CTranslate2Search(self.precision or "float32", self.insisting is not None)
        if by_ctranslate2.insists:
            check()
            return by_ctranslate2
        try:
            check()
        except MissingExtraError:
            return OwnSearch()
        except ArgumentError as error:
            return OwnSearch(str(error))
        reason = None if device.type == "cpu" else f"CTranslate2 searches on {device} only by --engine ctranslate2"
        if flag := self._lacked():
            reason = f"CTranslate2 {LACKS[flag]} ({flag})"
        return by_ctranslate2 if reason is None else OwnSearch(reason)

    def _lacked(self) -> str | None:
        return next((flag for flag in LACKS if flag in self.asked), None)


def usable_cores() -> int:
    """How many cores this process may use: ranks on one machine share its cores."""
    here = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(here // int(os.environ.get("LOCAL_WORLD_SIZE", "1")), 1)


def _say(reason: str | None) -> None:
    if reason is not None and speaks():
        print(f"regard's own search: {reason}", file=sys.stderr)


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The flags of the same names; None for an absent flag."""

    length_penalty: float | None
    length_reward: float | None

    def refuse(self, size: int) -> None:
        """Refuse impossible flags, for a beam of the size."""
        penalty, reward = self.length_penalty, self.length_reward
        refuse_first(
            (penalty is not None and not 0 <= penalty < inf, f"--length-penalty must be at least 0, got {penalty}"),
            (reward is not None and not 0 <= reward < inf, f"--length-reward must be at least 0, got {reward}"),
            (
                max(penalty or 0, reward or 0) > LARGEST,
                f"--length-penalty and --length-reward must be at most {LARGEST}, got {max(penalty or 0, reward or 0)}",
            ),
            (
                bool(reward) and size == 1,
                "--length-reward is for a beam, and --beam 1 takes the most probable token: leave one of them out",
            ),
            (
                bool(reward) and penalty == 1,
                "--length-reward changes nothing at a --length-penalty of 1: leave one of them out",
            ),
        )

    def beam(self, size: int, *, num_best: int = 1) -> Beam:
        reward = self.length_reward or 0.0
        penalty = (0.0 if reward else 1.0) if self.length_penalty is None else self.length_penalty
        return Beam(size, num_best=num_best, length_penalty=penalty, length_reward=reward)


class SearchCommand(Command):
    """A search for translations, with the flags of `Ranking` and `EngineFlags`."""

    __slots__ = ()
    beam: int | None
    nbest: int = 1

    @property
    def size(self) -> int:
        return Beam().size if self.beam is None else self.beam

    @property
    def ranking(self) -> Ranking:
        return self.part(Ranking)

    @property
    def search(self) -> Beam:
        return self.ranking.beam(self.size, num_best=self.nbest)

    @property
    def engine_flags(self) -> EngineFlags:
        return EngineFlags.of(self, rewards=self.search.length_reward > 0)
