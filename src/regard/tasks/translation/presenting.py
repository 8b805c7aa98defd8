"""The stages behind a search: hypotheses get the attention of their tokens, and become texts and labels."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import cast

import torch
from torch import Tensor

from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.pictures.token_maps import Axis, axis, merge
from regard.tasks.text.codec import Codec, finished_text, unknown_texts
from regard.tasks.translation.options import AlignmentOf, TranslationOptions
from regard.tasks.translation.results import Candidate, Translation
from regard.tasks.translation.translation_model import Draft, TranslationModel


@dataclass(frozen=True, slots=True)
class Align:
    """Adds alignments to the hypotheses for which the options need them.

    They come from one teacher-forced pass, which gives every layer and head, so that the search keeps no attention.
    """

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
        candidates = [self._candidate(draft, one, source) for one in found] or [self._unsearched(draft)]
        unknown = unknown_texts(tokenizer, draft.asked.source, draft.ids)
        return Translation(draft.asked.source, source.texts, candidates, draft.problem, unknown)

    def _unsearched(self, draft: Draft) -> Candidate:
        """A blank line as it is; nothing for a line that cannot be translated."""
        return Candidate("" if draft.problem else draft.asked.source, 0.0, [], None)

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
    """For each unknown token of a translation, the text of the source token it attends to most.

    Marks and spaces are never copied: their columns are ignored, whatever their weight.

    Args:
        ids: the tokens of the translation.
        unknown_id: the token to replace.
        alignment: (T, S), one row for each token; columns beyond the surfaces belong to marks.
        surfaces: the text that each of the source's tokens stands for.

    Source: Luong et al. 2015 (arXiv:1410.8206), section 3.3; Jean et al. 2015 (arXiv:1412.2007), section 4.4,
    who take the alignment from the attention.
    """
    columns = [column for column, surface in enumerate(surfaces) if surface.strip()]
    if not columns:
        return []
    rows = [row for row, token in enumerate(ids) if token == unknown_id]
    best = alignment[rows][:, columns].argmax(-1).tolist()
    return [surfaces[columns[column]] for column in best]
