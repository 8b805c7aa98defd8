"""One batch of sentences to translate, as an object, so that another engine can do the search."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from regard.tasks.generation.beam import beam_search, greedy
from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import Constraint, ForcedPrefix, StillWanted
from regard.tasks.generation.protocol import Decodable, Hypothesis, SearchOf
from regard.tasks.text.batches import padded_rows


@dataclass(frozen=True, slots=True, kw_only=True)
class SearchJob:
    sources: Sequence[Sequence[int]]
    """Token ids, end marks included."""
    begin_id: int
    end_id: int
    max_steps: int
    beam: Beam = Beam()
    prefixes: Sequence[Sequence[int]] = ()
    """The tokens with which each answer begins; empty, or one prefix for each source."""
    wanted: Sequence[Callable[[], bool] | None] = ()
    """Asked at each step; an answer that is no longer wanted ends. Empty, or one or None for each source."""


class Searcher(Protocol):
    """Another engine, which searches in place of the model."""

    longest: int | None
    """The most tokens of a source or of an answer, end mark counted; None if only the model decides."""

    def search(self, jobs: Iterable[SearchJob]) -> list[list[list[Hypothesis]]]:
        """The hypotheses of each job's sentences, in the order of the jobs."""


def search(model: Decodable, job: SearchJob) -> list[list[Hypothesis]]:
    """Find the hypotheses of each sentence, best first.

    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> job = SearchJob(sources=[[4, 5, 2], [6, 2]], begin_id=1, end_id=2, max_steps=7, beam=Beam(3, num_best=2))
    >>> [len(best) for best in search(model, job)]
    [2, 2]
    """
    source, lengths = padded_rows(job.sources, 0)
    device = next(iter(model.parameters())).device if isinstance(model, torch.nn.Module) else torch.device("cpu")
    asked = SearchOf(
        source.to(device), lengths.to(device), bos_id=job.begin_id, eos_id=job.end_id, max_steps=job.max_steps,
        constraints=_constraints(job),
    )  # fmt: skip
    with torch.inference_mode():
        if job.beam.size == 1:
            return [[one] for one in greedy(model, asked)]
        return beam_search(model, asked, beam=job.beam)


def _constraints(job: SearchJob) -> list[Constraint]:
    forced = ForcedPrefix(job.prefixes) if any(job.prefixes) else None
    wanted = StillWanted(job.wanted, job.end_id) if job.wanted else None
    return [one for one in (forced, wanted) if one is not None]
