"""The present stage: tokens become texts, labels, alignments over labels, and figures of confidence."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import cast

from torch import Tensor

from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.pictures.token_maps import Axis, axis, merge
from regard.tasks.text.tokenizers import REPLACEMENT
from regard.tasks.translation.confidence import Confidence, confidence_of
from regard.tasks.translation.copy_unknown import copies
from regard.tasks.translation.drafts import Draft, Written
from regard.tasks.translation.options import TranslationOptions
from regard.tasks.translation.results import Candidate, TermLabels, Translation
from regard.tasks.translation.tags import aligned_units, put_back, stretches
from regard.tasks.translation.terms import PlacedTerm
from regard.tasks.translation.translation_model import TranslationModel


@dataclass(frozen=True, slots=True)
class Present:
    """Makes the answer of a draft, with as much beside its texts as the options ask for."""

    model: TranslationModel
    options: TranslationOptions

    def __call__(self, draft: Draft) -> Translation:
        tokenizer = self.model.source_tokenizer
        is_labelled = bool(draft.ids) and self.options.has_labels
        source = axis(tokenizer, [*draft.ids, tokenizer.marks.end_id] if is_labelled else [])
        candidates = [self._candidate(draft, one, source) for one in draft.found]
        return Translation(draft.asked.source, source.texts, candidates or [self._empty(draft)], draft.problem)

    def _empty(self, draft: Draft) -> Candidate:
        sure = Confidence([], [], [], []) if self.options.confidence else None
        terms = self._labels_of_terms((), Axis([], []))
        return Candidate(put_back("", draft.tags, []), 0.0, [], None, confidence=sure, terms=terms)

    def _candidate(self, draft: Draft, one: Written, source: Axis) -> Candidate:
        hypothesis, tokenizer = one.hypothesis, self.model.target_tokenizer
        tokens, weights, alignment = hypothesis.tokens, hypothesis.alignment, None
        written = axis(tokenizer, tokens if self.options.has_labels else [])
        if self.options.alignments is not None and weights is not None:
            alignment = cast(Tensor, merge(weights, written, source))
        unknown = self._unknown(draft, one)
        text = tokenizer.decode(tokens, unknown=unknown)
        if draft.tags and weights is not None:
            text = put_back(text, draft.tags, self._aligned_units(draft, hypothesis, unknown, text))
        is_finished, terms = tokens[-1:] == [tokenizer.marks.end_id], self._labels_of_terms(one.placed, written)
        sure = self._confidence(draft, hypothesis, written, source)
        labels, limited = written.texts, hypothesis.limited
        return Candidate(text, hypothesis.score, labels, alignment, is_finished, sure, terms, limited)

    def _confidence(self, draft: Draft, one: Hypothesis, written: Axis, source: Axis) -> Confidence | None:
        if one.log_probabilities is None or one.alignment is None:
            return None
        surfaces = self.model.source_tokenizer.surfaces(draft.text)
        return confidence_of(one.log_probabilities, one.alignment, written, draft.text, surfaces, source)

    def _labels_of_terms(self, placed: Sequence[PlacedTerm], written: Axis) -> list[TermLabels] | None:
        if self.options.terms is None or not self.options.has_labels:
            return None
        owner = [label for label, (first, last) in enumerate(written.spans) for _ in range(first, last + 1)]
        return [TermLabels(*one.occurrence.term, owner[one.first], owner[one.last]) for one in placed]

    def _aligned_units(self, draft: Draft, one: Hypothesis, unknown: Sequence[str], text: str) -> list[int]:
        """For each unit of a translation the unit of its source that it attends to most."""
        assert one.alignment is not None
        tokens, decode = one.tokens, self.model.target_tokenizer.decode
        ends = [min(len(decode(tokens[:n], unknown=unknown)), len(text)) for n in range(len(tokens) + 1)]
        source = stretches(self.model.source_tokenizer.surfaces(draft.text), draft.text)
        return aligned_units(one.alignment, source, list(pairwise(ends)), draft.text, text)

    def _unknown(self, draft: Draft, one: Written) -> list[str]:
        """The words to print for the unknown tokens of a translation; given words print as they were given."""
        tokenizer, tokens, alignment = self.model.target_tokenizer, one.hypothesis.tokens, one.hypothesis.alignment
        unknown = tokenizer.unknown_id
        if unknown is None or unknown not in tokens:
            return []
        given = dict(zip(range(len(draft.prefix)), tokenizer.surfaces(draft.asked.prefix), strict=False))
        for term in one.placed:
            surfaces = tokenizer.surfaces(term.occurrence.term.target)
            given |= zip(range(term.last, term.first - 1, -1), reversed(surfaces), strict=False)
        places = [n for n, token in enumerate(tokens) if token == unknown]
        words = [REPLACEMENT] * len(places)
        if self.options.copy_unknown and alignment is not None:
            words = copies(tokens, unknown, alignment, self.model.source_tokenizer.surfaces(draft.text)) or words
        return [given.get(place, word) for place, word in zip(places, words, strict=True)]
