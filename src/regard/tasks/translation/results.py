"""The answers of a translator: how hypotheses become texts, labels and alignments; their attention, and scores."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.pictures.token_maps import Alternative, Axis, LabelsEach, axis, merge
from regard.tasks.text.batches import collate
from regard.tasks.text.codec import Codec, finished_text, unknown_texts
from regard.tasks.training.metrics import CorpusScore
from regard.tasks.translation.translation_model import AlignmentOf, Draft, Model, TranslationModel, TranslationOptions


@displayed
class Candidate(NamedTuple):
    text: str
    score: float
    """Log-probability: the plain sum with greedy search; with beam search as `Beam` says, by default
    divided by the number of tokens."""
    labels: list[str]
    """The tokens of the translation as they are printed, end mark included; none if they were not asked for."""
    alignment: Tensor | None
    """(T, S) on the CPU, if asked for: the weight of each label on each label of the source; rows sum to 1."""
    finished: bool = True
    """Whether the model ended it; otherwise it was cut off at the most steps."""
    limited: bool = False
    """Whether it ended, and one that was cut off at the most steps scored higher."""


@displayed
class Translation(NamedTuple):
    """A sentence and its translations: those that the model ended, best first, then those cut off, too."""

    source: str
    source_labels: list[str]
    candidates: list[Candidate]
    problem: str | None = None
    """Why the sentence could not be translated (its translation is then empty)."""
    unknown: Sequence[str] = ()
    """The stretches of the sentence that the vocabulary lacks: the model reads each as the same unknown token."""

    @property
    def text(self) -> str:
        """The best translation."""
        return self.candidates[0].text


@displayed
class Attention(NamedTuple):
    source_labels: list[str]
    target_labels: list[str]
    read_labels: list[str]
    """The labels of the decoder's input for `target_labels`: the begin mark, then all but the last."""
    maps: dict[str, Any]
    """The maps by name, each (H, T, S): "encoder.0", "decoder.0.self", "decoder.0.cross", ..."""
    alignment_names: list[str]
    """The names of the maps that align the translation with the source."""
    choices: list[list[Alternative]] | None = None
    """For each target label the most probable tokens in its place, apart from its own; None: not asked for."""

    @property
    def shown(self) -> str:
        return self.alignment_names[-1]

    def labels(self, name: str) -> tuple[list[str], list[str]]:
        if name.startswith("encoder"):
            return self.source_labels, self.source_labels
        return self.target_labels, self.source_labels if name in self.alignment_names else self.read_labels

    def alternatives(self, name: str) -> list[list[Alternative]] | None:
        return None if name.startswith("encoder") else self.choices


@displayed
class Evaluation(NamedTuple):
    bleu: CorpusScore
    chrf: CorpusScore
    exact_match: float
    """Percentage of translations that equal their reference, 0..100."""
    loss: float
    """Mean cross-entropy of the references' tokens, in nats."""
    pairs: int
    cut_off: int = 0
    """Translations that were cut off before their end, or are the best because better ones were."""
    unknown: float = 0.0
    """The share (0..1) of the references' tokens that are unknown: the loss counts each as one word that may be hit."""


@torch.no_grad()
def forced_attention(
    model: Model,
    source_tokenizer: Codec,
    target_tokenizer: Codec,
    source: Sequence[int],
    ids: Sequence[int],
    *,
    alternatives: int = 0,
) -> Attention:
    marks = source_tokenizer.marks, target_tokenizer.marks
    arrays = [np.asarray(source, dtype=np.int64)], [np.asarray(ids[:-1], dtype=np.int64)]
    batch, device = collate(*arrays, source_marks=marks[0], target_marks=marks[1]), next(model.parameters()).device
    given = [part.to(device) for part in (batch.source, batch.source_lengths, batch.target_input)]
    maps = model.attend(*given)
    looked_at, written, read = (
        axis(source_tokenizer, [*source, marks[0].end_id]),
        axis(target_tokenizer, ids),
        axis(target_tokenizer, [marks[1].begin_id, *ids[:-1]]),
    )
    alignments, within_source = list(model.alignment_names), model.source_names
    merged = {}
    for name, weights in maps.items():
        encoder = name in within_source
        rows, columns = looked_at if encoder else written, looked_at if encoder or name in alignments else read
        merged[name] = merge(cast(AttentionMap, weights[0]), rows, columns)
    choices = None
    if alternatives:
        probable = probable_others(model(*given)[0].float().softmax(-1), target_tokenizer, ids, alternatives)
        # A label of several tokens stands where its first one does.
        choices = [probable[first] for first, _ in written.spans]
    return Attention(looked_at.texts, written.texts, read.texts, merged, alignments, choices)


def probable_others(
    probabilities: Tensor, tokenizer: LabelsEach, written: Sequence[int], count: int
) -> list[list[Alternative]]:
    """For each place the most probable tokens apart from the one that stands there, with their probabilities."""
    others = probabilities.clone()
    others[torch.arange(len(written)), torch.as_tensor(written, device=others.device)] = 0.0
    values, ids = others.topk(min(count, others.shape[-1] - 1))
    return [
        [Alternative(text, value) for text, value in zip(tokenizer.label_of_each(one), some, strict=True)]
        for one, some in zip(ids.tolist(), values.tolist(), strict=True)
    ]


@dataclass(frozen=True, slots=True)
class Align:
    """Alignments come from one teacher-forced pass, which gives every layer and head, so that the search keeps no
    attention."""

    model: TranslationModel
    options: TranslationOptions

    def __call__(self, begun: Sequence[Draft], found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
        rows = [(n, k) for n, best in enumerate(found) for k, one in enumerate(best) if self._is_due(one)]
        if not rows:
            return found
        model, tokens = self.model.model, [found[n][k].tokens for n, k in rows]
        batch = self.model.collate([begun[n].ids for n, _ in rows], [written[:-1] for written in tokens])
        with torch.inference_mode():
            maps = model.attend(batch.source, batch.source_lengths, batch.target_input)
            weights = (self.options.alignments or AlignmentOf()).of(maps, model.alignment_names).cpu()
        for (n, k), row, written in zip(rows, weights, tokens, strict=True):
            # The slices leave out the padding of the batch.
            alignment = row[: len(written), : len(begun[n].ids) + 1].clone()
            found[n][k] = replace(found[n][k], alignment=alignment)
        return found

    def _is_due(self, one: Hypothesis) -> bool:
        asked = self.options
        if asked.alignments is not None:
            return True
        return asked.copy_unknown and self.model.target_tokenizer.unknown_id in one.tokens


@dataclass(frozen=True, slots=True)
class Present:
    model: TranslationModel
    options: TranslationOptions

    def __call__(self, draft: Draft, found: Sequence[Hypothesis]) -> Translation:
        tokenizer = self.model.source_tokenizer
        is_labelled = bool(draft.ids) and self.options.has_labels
        source = axis(tokenizer, [*draft.ids, tokenizer.marks.end_id] if is_labelled else [])
        candidates = [self._candidate(draft, one, source) for one in found]
        # A blank line stays as it is; one that cannot be translated is answered by nothing.
        candidates = candidates or [Candidate("" if draft.problem else draft.asked.source, 0.0, [], None)]
        unknown = unknown_texts(tokenizer, draft.asked.source, draft.ids)
        return Translation(draft.asked.source, source.texts, candidates, draft.problem, unknown)

    def _candidate(self, draft: Draft, one: Hypothesis, source: Axis) -> Candidate:
        tokenizer = self.model.target_tokenizer
        tokens, weights, alignment = one.tokens, one.alignment, None
        written = axis(tokenizer, tokens if self.options.has_labels else [])
        if self.options.alignments is not None and weights is not None:
            alignment = cast(Tensor, merge(weights, written, source))
        is_finished = tokens[-1:] == [tokenizer.marks.end_id]
        return Candidate(self._text(draft, one), one.score, written.texts, alignment, is_finished, one.limited)

    def _text(self, draft: Draft, one: Hypothesis) -> str:
        unknown = self._unknown(draft, one)
        if not draft.prefix:
            return finished_text(self.model.target_tokenizer, one.tokens, unknown=unknown)
        pieces = added_texts(self.model.target_tokenizer, one.tokens, unknown)
        _write(pieces, 0, len(draft.prefix), draft.asked.prefix)
        return "".join(pieces)

    def _unknown(self, draft: Draft, one: Hypothesis) -> list[str]:
        unknown = self.model.target_tokenizer.unknown_id
        if unknown is None or not self.options.copy_unknown or one.alignment is None:
            return []
        return copies(one.tokens, unknown, one.alignment, self.model.source_tokenizer.surfaces(draft.asked.source))


def added_texts(codec: Codec, ids: Sequence[int], unknown: Sequence[str] = ()) -> list[str]:
    """The text that each token adds; of tokens that share a character the first adds it."""
    text = finished_text(codec, ids, unknown=unknown)
    ends = [min(len(codec.decode(ids[:n], unknown=unknown)), len(text)) for n in range(len(ids))]
    return [text[begin:end] for begin, end in pairwise(accumulate([*ends, len(text)], max))]


def _write(pieces: list[str], first: int, end: int, given: str) -> None:
    """Put given words, as they were given, into the place of the text of some tokens, and keep the spaces around it."""
    text = "".join(pieces[first:end])
    if text.strip():
        pieces[first:end] = [text.replace(text.strip(), given.strip(), 1), *[""] * (end - first - 1)]


def copies(ids: Sequence[int], unknown_id: int, alignment: Tensor, surfaces: Sequence[str]) -> list[str]:
    """For each unknown token of a translation, the text of the source token it attends to most by `alignment` (T, S);
    columns beyond the surfaces belong to marks, which are never copied, as spaces are not.

    Source: Luong et al. 2015 (arXiv:1410.8206), section 3.3; Jean et al. 2015 (arXiv:1412.2007), section 4.4, who take
    the alignment from the attention.
    """
    columns = [column for column, surface in enumerate(surfaces) if surface.strip()]
    if not columns:
        return []
    rows = [row for row, token in enumerate(ids) if token == unknown_id]
    best = alignment[rows][:, columns].argmax(-1).tolist()
    return [surfaces[columns[column]] for column in best]
