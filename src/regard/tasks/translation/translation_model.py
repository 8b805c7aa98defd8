"""A translation model, and one with its tokenizers: its batches, its limits, and how probable it finds pairs."""

from collections.abc import Iterable, Iterator, Sequence

import torch

from regard.errors import DataError
from regard.models.config import RNNConfig, TransformerConfig
from regard.models.rnn import RNNSeq2Seq
from regard.models.transformer import Transformer
from regard.tasks.generation.downloaded import Downloaded
from regard.tasks.language_modelling.likelihood import Likelihood, likelihoods, together
from regard.tasks.text.batches import Batch, collate
from regard.tasks.text.codec import Codec
from regard.tasks.text.pair_store import chunks
from regard.tasks.translation.search_job import Searcher
from regard.tensors.fingerprint import fingerprint

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
