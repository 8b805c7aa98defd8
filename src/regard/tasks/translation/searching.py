"""The search stage: sentences as batches of similar length, and the stages that each batch of answers goes through."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from regard.tasks.generation.config import Beam
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.translation.search_job import SearchJob, search
from regard.tasks.translation.translation_model import BATCH_PLACES, TranslationModel, by_length

CPU_SEARCH_PLACES = 2_048
"""`BATCH_PLACES` of a search on the CPU: larger batches make its products no faster, and exceed its caches."""
LIMIT_STEP = 32
"""Limits of translations are multiples of it: sentences of one limit are searched together, so that limits are few."""


class SearchInput(NamedTuple):
    ids: Sequence[int]
    prefix: Sequence[int] = ()
    is_wanted: Callable[[], bool] | None = None


class AfterSearch(Protocol):
    def __call__(self, begun: Sequence[SearchInput], found: list[list[Hypothesis]]) -> list[list[Hypothesis]]: ...


@dataclass(frozen=True, slots=True)
class Search:
    """Finds the hypotheses of sentences, best first, in the order given; none for a sentence without tokens."""

    model: TranslationModel
    beam: Beam
    after: Sequence[AfterSearch] = ()
    longest: int | None = None
    """The most tokens of a translation; None for twice the sentence's and some."""

    def limit_of(self, begun: SearchInput) -> int:
        """The most tokens of a sentence's translation, end mark counted: a longer one is cut off."""
        # A longer answer is surely wrong.
        own = 2 * (len(begun.ids) + 1) + 50 + len(begun.prefix)
        longest = -(-own // LIMIT_STEP) * LIMIT_STEP if self.longest is None else self.longest
        return min(longest, self.model.limit or longest)

    def __call__(self, begun: Sequence[SearchInput]) -> list[list[Hypothesis]]:
        model, found = self.model, list[list[Hypothesis]]([] for _ in begun)
        by_limit: dict[int, list[int]] = {}
        for n, one in enumerate(begun):
            if one.ids:
                by_limit.setdefault(self.limit_of(one), []).append(n)
        places = max((CPU_SEARCH_PLACES if model.device.type == "cpu" else BATCH_PLACES) // self.beam.size, 1)
        batches = [
            [same[row] for row in rows]
            for same in by_limit.values()
            for rows in by_length([len(begun[n].ids) for n in same], places)
        ]
        jobs = [self._job([begun[n] for n in rows]) for rows in batches]
        answers = (search(model.model, job) for job in jobs) if model.searcher is None else model.searcher.search(jobs)
        for rows, answer in zip(batches, answers, strict=True):
            for stage in self.after:
                answer = stage([begun[n] for n in rows], answer)
            for n, best in zip(rows, answer, strict=True):
                found[n] = best
        return found

    def _job(self, begun: Sequence[SearchInput]) -> SearchJob:
        prefixes = [one.prefix for one in begun]
        marks, end_id = self.model.target_tokenizer.marks, self.model.source_tokenizer.marks.end_id
        return SearchJob(
            sources=[[*one.ids, end_id] for one in begun],
            begin_id=marks.begin_id,
            end_id=marks.end_id,
            max_steps=self.limit_of(begun[0]),
            beam=self.beam,
            prefixes=prefixes if any(prefixes) else (),
            wanted=[one.is_wanted for one in begun] if any(one.is_wanted for one in begun) else (),
        )
