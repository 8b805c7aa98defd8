"""A translation model, and one with its tokenizers: its requests, batches, limits and searches, and its likelihoods.

A search is a job, an object, so that another engine can do it.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from regard.errors import ArgumentError, DataError
from regard.maps.attention_map import AttentionMap
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
from regard.tasks.text.unicode import is_blank
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
    """The engine that searches in place of this process, None for this process; the caller who sets it ends it."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class AlignmentOf:
    """One layer and head of the attention to the source, or the mean over them.

    Most toolkits print the mean over the heads of one layer. The layer that aligns best is not always the
    last: in deep Transformers it is often the last but one (Garg et al. 2019, arXiv:1909.02074, section 4.2).

    >>> AlignmentOf(layer=0, head=2)
    AlignmentOf(layer=0, head=2)
    """

    layer: int | None = -1
    """Index of the decoder's layer, from 0, or from -1 backwards; None: the mean over all of them."""
    head: int | None = None
    """Index of the head in that layer; None: the mean over all of them."""

    def of(self, maps: Mapping[str, AttentionMap], names: Sequence[str]) -> Tensor:
        """The alignment (B, T, S) from the maps (B, H, T, S) of a pass.

        Args:
            maps: the maps by name.
            names: the names of the maps whose keys are the source's tokens, first layer first.

        Raises:
            ArgumentError: the model has no such layer or head.
        """
        return torch.stack([self._in_layer(maps[name]) for name in self.chosen(names)]).mean(0)

    def chosen(self, names: Sequence[str]) -> Sequence[str]:
        """The names of the maps from which the alignment is made.

        Raises:
            ArgumentError: the model has no such layer.
        """
        return names if self.layer is None else [names[_index("layer", self.layer, len(names))]]

    def _in_layer(self, weights: AttentionMap) -> Tensor:
        if self.head is None:
            return weights.dense().mean(1)
        head = _index("head", self.head, weights.shape[1])
        return weights.only(heads=[head]).dense()[:, 0]


def _index(what: str, index: int, count: int) -> int:
    if not -count <= index < count:
        raise ArgumentError(f"expected a {what} from {-count} to {count - 1}, as the model has {count}, got {index}")
    return index % count


@dataclass(frozen=True, kw_only=True, slots=True)
class TranslationOptions:
    """How to translate, as an object that the stages of a `Translator` share."""

    beam: Beam = Beam()
    """How wide the search is, how many translations of each sentence come out, and which lengths it favours."""
    alignments: AlignmentOf | None = None
    """Which attention the candidates report as their alignment, as `AlignmentOf(layer=-1)`; None reports none. The
    fields below that need an alignment take this one, or the translator's `alignment`."""
    copy_unknown: bool = False
    """Whether each token that stands for a word outside the vocabulary is printed as the word of the source that it
    attends to most."""
    max_length: int | None = None
    """The most tokens of a sentence, its end mark counted; None means as many as the longest had in training. The model
    saw no longer ones, and a search takes a time that grows with their square."""
    max_target_length: int | None = None
    """The most tokens of a translation, its end mark counted: a longer one is cut off. None means 2 n + 50 for a
    sentence of n tokens, rounded up."""
    labels: bool = True
    """Whether the answers have labels; a text alone needs none, and they take as long as a fast search."""

    @property
    def has_labels(self) -> bool:
        return self.labels or self.alignments is not None

    def settings(self) -> dict[str, Any]:
        alignments = None if self.alignments is None else str(self.alignments)
        return {
            "beam": self.beam.size,
            "nbest": self.beam.num_best,
            "length-penalty": self.beam.length_penalty,
            "alignments": alignments,
            "copy-unknown": self.copy_unknown,
            "max-length": self.max_length,
            "max-target-length": self.max_target_length,
        }


def drafts_of(model: TranslationModel, lines: Sequence[str | Request], options: TranslationOptions) -> list[Draft]:
    asked = [Request(line) if isinstance(line, str) else line for line in lines]
    sources = model.source_tokenizer.encode_batch([one.source for one in asked])
    prefixes: list[list[int]] = [[] for _ in asked]
    if any(one.prefix for one in asked):
        prefixes = model.target_tokenizer.encode_batch([one.prefix for one in asked])
    drafts = []
    for one, ids, prefix in zip(asked, sources, prefixes, strict=True):
        problem = model.problem(ids, prefix, options.max_length, options.max_target_length)
        drafts.append(Draft(one, [] if problem or is_blank(one.source) else ids, prefix, problem))
    return drafts
