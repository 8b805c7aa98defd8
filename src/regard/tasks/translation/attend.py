"""The attention of a translator to a given target and its source."""

from collections.abc import Sequence
from typing import cast

import numpy as np
import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import Alternative, LabelsEach, axis, merge
from regard.tasks.text.batches import collate
from regard.tasks.text.codec import Codec
from regard.tasks.translation.results import Attention
from regard.tasks.translation.translation_model import Model


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
