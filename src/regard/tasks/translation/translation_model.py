"""A translation model, and one with its tokenizers: its batches, limits and searches, and how probable it finds pairs.

A search is a job, an object, so that another engine can do it.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from regard.errors import DataError
from regard.models.config import RNNConfig, TransformerConfig
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.generation.beam import beam_search, greedy
from regard.tasks.generation.config import Beam
from regard.tasks.generation.downloaded import Downloaded
from regard.tasks.generation.filters import Constraint, ForcedPrefix, StillWanted
from regard.tasks.generation.protocol import Decodable, Hypothesis, SearchOf
from regard.tasks.language_modelling.likelihood import Likelihood, likelihoods, together
from regard.tasks.text.batches import Batch, collate, padded_rows
from regard.tasks.text.codec import Codec
from regard.tasks.text.pair_store import chunks
from regard.tensors.fingerprint import fingerprint


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


Model = Transformer | RNNSeq2Seq | Downloaded


def build_model(
    sizes: TransformerConfig | RNNConfig, *, source_vocab_size: int, target_vocab_size: int
) -> Transformer | RNNSeq2Seq:
    if isinstance(sizes, RNNConfig):
        return RNNSeq2Seq(sizes, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)
    return Transformer(sizes, source_vocab_size=source_vocab_size, target_vocab_size=target_vocab_size)


BATCH_PLACES = 4_096
"""The most tokens of a batch, with the padding and counted for each hypothesis of a beam."""
SCORED_TOGETHER = 1_024
"""How many pairs are read, sorted by length and scored together."""


class TranslationModel:
    """A model in evaluation mode with its tokenizers; the stages of a `Translator` share it."""

    searcher: Searcher | None = None
    """The engine that searches in place of this process; None for this process alone. The caller who sets it ends
    it."""

    def __init__(
        self,
        model: Model,
        source_tokenizer: Codec,
        target_tokenizer: Codec,
        *,
        longest: int | None = None,
    ) -> None:
        self.model = model.eval()
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer
        self.longest = longest
        """The most tokens of a sentence in training, its end mark counted; None if that is not known."""

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    @property
    def limit(self) -> int | None:
        """The most tokens that the model or its searcher reads or writes, end mark counted; None for any number."""
        limits = (self.model.max_length, None if self.searcher is None else self.searcher.longest)
        return min((limit for limit in limits if limit is not None), default=None)

    def fingerprint(self) -> str:
        """Thirty-two hexadecimal digits, which differ for models whose weights differ."""
        return fingerprint(self.model)

    def collate(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
        """One batch of pairs of token lists, with the marks of the tokenizers, on the model's device."""
        marks = self.source_tokenizer.marks, self.target_tokenizer.marks
        batch = collate(sources, targets, source_marks=marks[0], target_marks=marks[1])
        return Batch(*(part.to(self.device) for part in batch))

    def problem(
        self,
        source: Sequence[int],
        prefix: Sequence[int] = (),
        longest: int | None = None,
        most: int | None = None,
    ) -> str | None:
        """Why a sentence cannot be translated; None if it can."""
        limit, count = self.limit, len(source) + 1
        if limit is not None and count > limit:
            return f"{count} tokens, and the model takes {limit} at most"
        longest = self.longest if longest is None else longest
        if longest is not None and count > longest:
            return f"{count} tokens, and the limit is {longest}: cut it, or raise the limit (--max-length)"
        most = min((one for one in (limit, most) if one is not None), default=None)
        if most is not None and len(prefix) + 1 > most:
            return f"a prefix of {len(prefix) + 1} tokens, and the model writes {most} at most"
        return None

    def encode_pairs(
        self, pairs: Sequence[tuple[str, str]], *, after: int = 0
    ) -> tuple[list[list[int]], list[list[int]]]:
        """The tokens of sources and of targets."""
        sources = self.source_tokenizer.encode_batch([source for source, _ in pairs])
        targets = self.target_tokenizer.encode_batch([target for _, target in pairs])
        limit = self.model.max_length
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=after + 1):
            longest = max(len(source), len(target)) + 1
            if limit is not None and longest > limit:
                raise DataError(f"pair {number}: {longest} tokens, and the model takes {limit} at most")
        return sources, targets

    @torch.no_grad()
    def score(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Likelihood]:
        """Say how probable each target is, given its source: the sum over its tokens, end mark included, in nats.

        Pairs are read and scored one window after the other, and their likelihoods come in the order of the pairs.
        """
        for number, window in enumerate(chunks(pairs, SCORED_TOGETHER)):
            sources, targets = self.encode_pairs(window, after=number * SCORED_TOGETHER)
            found = [Likelihood(0.0, 0)] * len(window)
            for rows in by_length([len(s) + len(t) for s, t in zip(sources, targets, strict=True)], BATCH_PLACES):
                batch = self.collate([sources[i] for i in rows], [targets[i] for i in rows])
                logits = self.model(batch.source, batch.source_lengths, batch.target_input)
                scored = likelihoods(logits, batch.expected, unknown=self.target_tokenizer.unknown_id)
                for row, likelihood in zip(rows, scored, strict=True):
                    found[row] = likelihood
            yield from found

    def loss(self, pairs: Iterable[tuple[str, str]]) -> float:
        """Mean cross-entropy of the targets' tokens and end marks given their sources, in nats."""
        whole = together(self.score(pairs))
        return -whole.log_probability / whole.tokens


def by_length(lengths: Sequence[int], places: int) -> Iterator[list[int]]:
    """Group indices by length, longest first; each batch has at most `places` tokens with padding, or one sentence."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * (lengths[batch[0]] + 1) > places:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch


CPU_SEARCH_PLACES = 2_048
"""`BATCH_PLACES` of a search on the CPU: larger batches make its products no faster, and exceed its caches."""
LIMIT_STEP = 32
"""Limits of translations are multiples of it: sentences of one limit are searched together, so that limits are few."""


class Request(NamedTuple):
    """A sentence, and the beginning of its translation."""

    source: str
    prefix: str = ""
    is_wanted: Callable[[], bool] | None = None
    """Asked before each step of a search; once it is False, the translation ends where it is."""


class Draft(NamedTuple):
    asked: Request
    ids: list[int]
    """Its tokens; none if it is blank or cannot be translated."""
    prefix: list[int]
    problem: str | None


AfterSearch = Callable[[Sequence[Draft], list[list[Hypothesis]]], list[list[Hypothesis]]]


@dataclass(frozen=True, slots=True)
class Search:
    """Finds the hypotheses of sentences, best first, in the order given; none for a sentence without tokens."""

    model: TranslationModel
    beam: Beam
    after: Sequence[AfterSearch] = ()
    longest: int | None = None
    """The most tokens of a translation; None for twice the sentence's and some."""

    def limit_of(self, begun: Draft) -> int:
        """The most tokens of a sentence's translation, end mark counted: a longer one is cut off."""
        # A longer answer is surely wrong.
        own = 2 * (len(begun.ids) + 1) + 50 + len(begun.prefix)
        longest = -(-own // LIMIT_STEP) * LIMIT_STEP if self.longest is None else self.longest
        return min(longest, self.model.limit or longest)

    def __call__(self, begun: Sequence[Draft]) -> list[list[Hypothesis]]:
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

    def _job(self, begun: Sequence[Draft]) -> SearchJob:
        prefixes, wanted = [one.prefix for one in begun], [one.asked.is_wanted for one in begun]
        marks, end_id = self.model.target_tokenizer.marks, self.model.source_tokenizer.marks.end_id
        return SearchJob(
            sources=[[*one.ids, end_id] for one in begun],
            begin_id=marks.begin_id,
            end_id=marks.end_id,
            max_steps=self.limit_of(begun[0]),
            beam=self.beam,
            prefixes=prefixes if any(prefixes) else (),
            wanted=wanted if any(wanted) else (),
        )
