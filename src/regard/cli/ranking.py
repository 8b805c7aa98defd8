"""The flags of `translate` and `evaluate` that rank the translations of a sentence."""

from dataclasses import dataclass
from math import inf
from pathlib import Path
from typing import TYPE_CHECKING

from regard.cli.engines import EngineFlags
from regard.cli.shared import Command, Mean, alignment_of, refuse_first, require_task
from regard.errors import ArgumentError
from regard.tasks.generation.config import LARGEST, Beam
from regard.tasks.names import TRANSLATION

if TYPE_CHECKING:
    from regard.tasks.translation.alignments import AlignmentOf
    from regard.tasks.translation.reverse import Reverse

WEIGHT = 0.3
"""The weight of a reverse translator unless another is given."""
REWARD = 0.4
"""The length reward beside a reverse translator unless length flags are given: both favour short translations."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranking:
    """The flags of the same names; None for an absent flag."""

    length_penalty: float | None
    length_reward: float | None
    reverse: Path | None
    reverse_weight: float | None

    def refuse(self, run: Path, size: int) -> None:
        """Refuse impossible flags, for a run and a beam of the size."""
        penalty, reward, weight = self.length_penalty, self.length_reward, self.reverse_weight
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
            (weight is not None and self.reverse is None, "--reverse-weight goes with --reverse"),
            (weight is not None and not 0 < weight < inf, f"--reverse-weight must be above 0, got {weight}"),
            (
                self.reverse is not None and size == 1,
                "--reverse chooses among the hypotheses of a beam: give a --beam of 2 at least",
            ),
        )
        if self.reverse is not None:
            refuse_reverse(run, self.reverse)

    def beam(self, size: int, *, num_best: int = 1) -> Beam:
        is_usual = self.length_penalty is None and self.length_reward is None
        reward = REWARD if is_usual and self.reverse is not None else self.length_reward or 0.0
        penalty = (0.0 if reward else 1.0) if self.length_penalty is None else self.length_penalty
        return Beam(size, num_best=num_best, length_penalty=penalty, length_reward=reward)

    def loaded(self, device: str) -> "Reverse | None":
        """The reverse translator, read from its folder; None if there is none."""
        if self.reverse is None:
            return None
        from regard.tasks.translation.reverse import Reverse
        from regard.tasks.translation.translator import Translator

        weight = WEIGHT if self.reverse_weight is None else self.reverse_weight
        return Reverse(Translator.load(self.reverse, device=device), weight)


class SearchCommand(Command):
    """A search for translations, with the flags of `Ranking`, `EngineFlags` and `AlignmentOf`."""

    __slots__ = ()
    beam: int | None
    nbest: int = 1
    alignment_layer: int | Mean | None
    alignment_head: int | Mean | None

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

    @property
    def names_alignment(self) -> bool:
        return bool(self.given("--alignment-layer", "--alignment-head"))

    def alignment(self, usual: "AlignmentOf") -> "AlignmentOf":
        return alignment_of(self.alignment_layer, self.alignment_head, usual)


def refuse_reverse(run: Path, reverse: Path) -> None:
    """Refuse all but a translator of the other direction."""
    require_task(reverse, TRANSLATION)
    if run.exists() and reverse.exists() and run.samefile(reverse):
        raise ArgumentError(f"--reverse: {reverse} is the run itself: name a translator of the other direction")
