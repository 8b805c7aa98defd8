"""A trained translator: it translates, says how well, and shows what it attended to."""

from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, Literal, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.decoding import Hypothesis, beam_search, greedy
from regard.errors import ArgumentError, DataError
from regard.tasks.attention import Axis, axis, merge
from regard.tasks.config import Model, TranslationConfig, make_model
from regard.tasks.corpus import load_tokenizers
from regard.tasks.likelihood import Likelihood, likelihoods
from regard.tasks.pretrained import is_huggingface, load_pretrained
from regard.tasks.run_folder import RunFolder
from regard.text.batches import Batch, collate
from regard.text.marks import Codec
from regard.text.unicode import normalise
from regard.training.checkpoints import fill_model
from regard.training.devices import find_device
from regard.training.losses import cross_entropy
from regard.training.metrics import Score, bleu, chrf, exact_match
from regard.weights import AttentionMap

TASK = "translation"

# Lines that are read, sorted by length and translated together; and the places of one batch of a beam.
WINDOW_LINES = 1_024
BATCH_PLACES = 4_096


class Candidate(NamedTuple):
    """One translation of a sentence."""

    text: str
    score: float
    """Log-probability divided by the number of tokens with beam search; the plain sum when greedy."""
    labels: list[str]
    """The tokens of the translation as one prints them, end mark included."""
    alignment: Tensor | None
    """(T, S) on the CPU, if it was asked for: what each label looked at among the source's; rows sum to 1."""


class Translation(NamedTuple):
    """A sentence and its translations, best first."""

    source: str
    source_labels: list[str]
    candidates: list[Candidate]

    @property
    def text(self) -> str:
        """The best translation."""
        return self.candidates[0].text


class Attention(NamedTuple):
    """What a model attended to while it wrote a translation."""

    source_labels: list[str]
    target_labels: list[str]
    read_labels: list[str]
    """What the decoder read while it wrote `target_labels`: the begin mark, and all but the last of them."""
    maps: dict[str, AttentionMap | Tensor]
    """By name, each (H, T, S): "encoder.0", "decoder.0.self", "decoder.0.cross", ..."""
    alignment_names: list[str]
    """Which of them align the translation with the source."""

    @property
    def shown(self) -> str:
        """The last layer's alignment."""
        return self.alignment_names[-1]

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        """The labels of a map's rows, which look, and of its columns, which are looked at."""
        if name.startswith("encoder"):
            return self.source_labels, self.source_labels
        return self.target_labels, self.source_labels if name in self.alignment_names else self.read_labels


class Evaluation(NamedTuple):
    """How well sentences were translated."""

    bleu: Score
    chrf: Score
    exact_match: float
    """Percentage of translations that equal their reference, 0..100."""
    loss: float
    """Mean cross-entropy of the references' tokens, in nats."""
    pairs: int


@torch.no_grad()
def forced_attention(
    model: Model, source_tokenizer: Codec, target_tokenizer: Codec, source: Sequence[int], tokens: Sequence[int]
) -> Attention:
    """What every layer and head of a model in evaluation mode attends to while it is told to write `tokens`.

    Args:
        model: is not changed.
        source_tokenizer: of the source's ids.
        target_tokenizer: of the target's.
        source: ids of the source, without its end mark.
        tokens: ids to be written, at least one; usually with the end mark.
    """
    marks = source_tokenizer.marks, target_tokenizer.marks
    arrays = [np.asarray(source, dtype=np.int64)], [np.asarray(tokens[:-1], dtype=np.int64)]
    batch, device = collate(*arrays, source_marks=marks[0], target_marks=marks[1]), next(model.parameters()).device
    maps = model.attend(*(part.to(device) for part in (batch.source, batch.source_lengths, batch.target_input)))
    looked_at, written, read = (
        axis(source_tokenizer, [*source, marks[0].end_id]),
        axis(target_tokenizer, tokens),
        axis(target_tokenizer, [marks[1].begin_id, *tokens[:-1]]),
    )
    alignments = list(model.alignment_names)
    merged = {}
    for name, weights in maps.items():
        encoder = name.startswith("encoder")
        rows, columns = looked_at if encoder else written, looked_at if encoder or name in alignments else read
        merged[name] = merge(cast(AttentionMap, weights[0]), rows, columns)
    return Attention(looked_at.texts, written.texts, read.texts, merged, alignments)


class Translator:
    """A model with its tokenizers, ready to use."""

    def __init__(self, model: Model, source_tokenizer: Codec, target_tokenizer: Codec) -> None:
        self.model = model.eval().requires_grad_(False)
        self.source_tokenizer = source_tokenizer
        self.target_tokenizer = target_tokenizer

    @classmethod
    def load(
        cls, folder: Path | str, *, device: str = "auto", checkpoint: Literal["best", "last"] = "best"
    ) -> "Translator":
        """Read a run folder, or a downloaded folder of Hugging Face's with a translator in it.

        Raises:
            RunFolderError: it is neither, is cut short, or its parts do not fit together.
            ArgumentError: the device is not here.
            MissingExtraError: a library that reads the folder's tokenizer is not installed.
        """
        if is_huggingface(Path(folder)):
            parts = load_pretrained(Path(folder))
            return cls(parts.model.to(find_device(device)), parts.source_tokenizer, parts.target_tokenizer)
        run = RunFolder(Path(folder))
        config = run.read_config(TASK, TranslationConfig)
        source_tokenizer, target_tokenizer = load_tokenizers(config, run)
        sizes = {"source_vocab_size": len(source_tokenizer), "target_vocab_size": len(target_tokenizer)}
        model = make_model(config, **sizes)
        fill_model(model, run.checkpoints.load_model(checkpoint), source=run.path / checkpoint)
        return cls(model.to(find_device(device)), source_tokenizer, target_tokenizer)

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        return next(self.model.parameters()).device

    def translate(
        self,
        lines: Iterable[str],
        *,
        beam_size: int = 5,
        num_best: int = 1,
        alignments: bool = False,
        window_lines: int = WINDOW_LINES,
    ) -> Iterator[Translation]:
        """Translate sentences in order, in memory that does not grow with their number.

        A window of lines is read, translated in batches of about one length, and handed out before the
        next is read. A blank line stays a blank line.

        Args:
            lines: sentences, one each.
            beam_size: hypotheses kept; 1 takes the most probable token at every step.
            num_best: translations of each sentence, at most `beam_size`.
            alignments: whether the candidates say what each token looked at.
            window_lines: lines that are read before the first is answered; 1 answers each at once.

        Raises:
            ArgumentError: `beam_size`, `num_best` or `window_lines` makes no sense.
            DataError: a sentence is longer than the model's positions; those before it are handed out first.
        """
        if not 1 <= num_best <= beam_size or window_lines < 1:
            raise ArgumentError(
                f"num_best must be in 1..beam_size and window_lines at least 1, "
                f"got {num_best}, {beam_size} and {window_lines}"
            )
        numbered = enumerate(lines, start=1)
        while window := list(islice(numbered, window_lines)):
            ids, too_long = self._encode([line for _, line in window])
            found = self._search(ids, beam_size=beam_size, num_best=num_best, alignments=alignments)
            for (_, line), source, hypotheses in zip(window, ids, found, strict=False):
                yield self._present(line, source, hypotheses)
            if too_long is not None:
                number, length = window[len(ids)][0], too_long
                raise DataError(f"line {number}: {length} tokens, and the model takes {self.model.max_length} at most")

    def evaluate(self, pairs: Iterable[tuple[str, str]], *, beam_size: int = 5) -> Evaluation:
        """Translate the sources and compare with the references.

        Raises:
            DataError: there are no pairs, or one is longer than the model's positions.
        """
        pairs = list(pairs)
        if not pairs:
            raise DataError("there are no pairs to evaluate on")
        references = [normalise(target) for _, target in pairs]
        found = [one.text for one in self.translate((source for source, _ in pairs), beam_size=beam_size)]
        return Evaluation(
            bleu(found, references),
            chrf(found, references),
            exact_match(found, references),
            self.loss(pairs),
            len(pairs),
        )

    @torch.no_grad()
    def loss(self, pairs: Sequence[tuple[str, str]]) -> float:
        """Mean cross-entropy of the targets' tokens and end marks given their sources, in nats.

        Raises:
            DataError: a sentence is longer than the model's positions.
        """
        sources = self.source_tokenizer.encode_batch([source for source, _ in pairs])
        targets = self.target_tokenizer.encode_batch([target for _, target in pairs])
        self._check_lengths(sources, targets)
        total, count = 0.0, 0
        for rows in _by_length([len(s) + len(t) for s, t in zip(sources, targets, strict=True)], BATCH_PLACES):
            batch = self._collate([sources[i] for i in rows], [targets[i] for i in rows])
            logits = self.model(batch.source, batch.source_lengths, batch.target_input)
            loss = cross_entropy(logits, batch.target_output, ignore_index=self.target_tokenizer.marks.pad_id)
            total, count = total + float(loss.total), count + int(loss.count)
        return total / count

    @torch.no_grad()
    def score(self, pairs: Iterable[tuple[str, str]]) -> Iterator[Likelihood]:
        """How probable each target is, given its source: token by token, end mark included.

        Read, scored and handed out by windows, in order.

        Raises:
            DataError: a sentence is longer than the model's positions.
        """
        iterator = iter(pairs)
        while window := list(islice(iterator, WINDOW_LINES)):
            sources = self.source_tokenizer.encode_batch([source for source, _ in window])
            targets = self.target_tokenizer.encode_batch([target for _, target in window])
            self._check_lengths(sources, targets)
            found = [Likelihood(0.0, 0)] * len(window)
            for rows in _by_length([len(s) + len(t) for s, t in zip(sources, targets, strict=True)], BATCH_PLACES):
                batch = self._collate([sources[i] for i in rows], [targets[i] for i in rows])
                logits = self.model(batch.source, batch.source_lengths, batch.target_input)
                scored = likelihoods(logits, batch.target_output, pad_id=self.target_tokenizer.marks.pad_id)
                for row, likelihood in zip(rows, scored, strict=True):
                    found[row] = likelihood
            yield from found

    @torch.no_grad()
    def attend(self, sentence: str, *, beam_size: int = 5) -> Attention:
        """Translate a sentence and look at what every layer and head attended to.

        Raises:
            DataError: the sentence is empty or longer than the model's positions.
        """
        ids, too_long = self._encode([sentence])
        if too_long is not None:
            raise DataError(f"the sentence has {too_long} tokens, and the model takes {self.model.max_length} at most")
        if not ids[0]:
            raise DataError("there is nothing to look at in an empty sentence")
        (found,) = self._search(ids, beam_size=beam_size, num_best=1, alignments=False)
        tokens = found[0].tokens  # with the end mark, unless the translation was cut off before it
        return forced_attention(self.model, self.source_tokenizer, self.target_tokenizer, ids[0], tokens)

    # -- inside ------------------------------------------------------------------------------------

    def _encode(self, sentences: Sequence[str]) -> tuple[list[list[int]], int | None]:
        """Token ids up to the first sentence that is too long, and that one's length."""
        ids = self.source_tokenizer.encode_batch(list(sentences))
        limit = self.model.max_length
        if limit is not None:
            for index, tokens in enumerate(ids):
                if len(tokens) + 1 > limit:  # with the end mark
                    return ids[:index], len(tokens) + 1
        return ids, None

    def _check_lengths(self, sources: list[list[int]], targets: list[list[int]]) -> None:
        limit = self.model.max_length
        for number, (source, target) in enumerate(zip(sources, targets, strict=True), start=1):
            longest = max(len(source), len(target)) + 1
            if limit is not None and longest > limit:
                raise DataError(f"pair {number}: {longest} tokens, and the model takes {limit} at most")

    def _search(
        self, ids: list[list[int]], *, beam_size: int, num_best: int, alignments: bool
    ) -> list[list[Hypothesis]]:
        """The hypotheses of each sentence, in the order given; none for an empty one."""
        found: list[list[Hypothesis]] = [[] for _ in ids]
        full = [i for i, tokens in enumerate(ids) if tokens]
        for rows in _by_length([len(ids[i]) for i in full], max(BATCH_PLACES // beam_size, 1)):
            chosen = [full[row] for row in rows]
            batch = self._collate([ids[i] for i in chosen], [[] for _ in chosen])
            hypotheses = self._decode(batch, beam_size=beam_size, num_best=num_best, alignments=alignments)
            for i, best in zip(chosen, hypotheses, strict=True):
                found[i] = best
        return found

    def _decode(self, batch: Batch, *, beam_size: int, num_best: int, alignments: bool) -> list[list[Hypothesis]]:
        longest = 2 * batch.source.shape[1] + 50  # a translation much longer than this has lost its way
        steps = min(longest, self.model.max_length or longest)
        marks = self.target_tokenizer.marks
        common: dict[str, Any] = {"bos_id": marks.begin_id, "eos_id": marks.end_id, "max_steps": steps}
        with torch.inference_mode():
            if beam_size == 1:
                best = greedy(self.model, batch.source, batch.source_lengths, alignments=alignments, **common)
                return [[one] for one in best]
            return beam_search(
                self.model,
                batch.source,
                batch.source_lengths,
                beam_size=beam_size,
                num_best=num_best,
                alignments=alignments,
                **common,
            )

    def _present(self, line: str, ids: list[int], hypotheses: list[Hypothesis]) -> Translation:
        source = axis(self.source_tokenizer, [*ids, self.source_tokenizer.marks.end_id] if ids else [])
        candidates = [self._candidate(source, hypothesis) for hypothesis in hypotheses]
        return Translation(line, source.texts, candidates or [Candidate("", 0.0, [], None)])

    def _candidate(self, source: Axis, hypothesis: Hypothesis) -> Candidate:
        text, written = self.target_tokenizer.decode(hypothesis.tokens), axis(self.target_tokenizer, hypothesis.tokens)
        alignment = None
        if hypothesis.alignment is not None:
            width = source.spans[-1][1] + 1  # without the padding of the batch
            alignment = cast(Tensor, merge(hypothesis.alignment[:, :width].cpu(), written, source))
        return Candidate(text, hypothesis.score, written.texts, alignment)

    def _collate(self, sources: Sequence[Sequence[int]], targets: Sequence[Sequence[int]]) -> Batch:
        arrays = ([np.asarray(ids, dtype=np.int64) for ids in side] for side in (sources, targets))
        marks = self.source_tokenizer.marks, self.target_tokenizer.marks
        batch = collate(*arrays, source_marks=marks[0], target_marks=marks[1])
        return Batch(*(part.to(self.device) for part in batch))


def _by_length(lengths: Sequence[int], places: int) -> Iterator[list[int]]:
    """Indices in batches of like length, each at most `places` with padding (or one sentence), longest first."""
    batch: list[int] = []
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        if batch and (len(batch) + 1) * (lengths[batch[0]] + 1) > places:
            yield batch
            batch = []
        batch.append(index)
    if batch:
        yield batch
