"""The answers of a translator: translations, their attention, and scores."""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor

from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import Alternative, LabelsEach, axis, merge
from regard.tasks.text.batches import collate
from regard.tasks.text.codec import Codec
from regard.tasks.training.metrics import CorpusScore
from regard.tasks.translation.translation_model import Model


@displayed
class Candidate(NamedTuple):
    text: str
    score: float
    """Log-probability: the plain sum with greedy search; with beam search as `Beam` says, by default
    divided by the number of tokens."""
    labels: list[str]
    """The tokens of the translation as they are printed, end mark included; none if they were not asked for."""
    alignment: Tensor | None
    """(T, S) on the CPU, if it was asked for: how much each label attended to each label of the source; rows sum
    to 1."""
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
