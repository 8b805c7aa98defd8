"""The align stage: hypotheses get the attention of each of their tokens."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from regard.tasks.generation.protocol import Hypothesis
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.options import TranslationOptions
from regard.tasks.translation.searching import SearchInput
from regard.tasks.translation.translation_model import TranslationModel


@dataclass(frozen=True, slots=True)
class Align:
    """Adds alignments to the hypotheses for which the options need them.

    They come from one teacher-forced pass, which gives every layer and head, so that the search keeps no attention.
    """

    model: TranslationModel
    options: TranslationOptions

    def __call__(self, begun: Sequence[SearchInput], found: list[list[Hypothesis]]) -> list[list[Hypothesis]]:
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
