"""The heads of a model in training, over all queries of some passes: entropy, largest logit, share of the first key."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.source import LinearSource

DEAD_SHARE = 0.95
EVEN_NATS = 0.1


class MeasuredHeads(NamedTuple):
    """The heads of one layer, (H,) each: means over the queries with a key."""

    entropy: Tensor
    """In nats: 0 for one key, ln S for all alike."""
    largest_logit: Tensor
    """The largest score of any query with any key; NaN for weights that the model computed itself."""
    first_key: Tensor
    """The share of the weight on the first key, 0..1."""
    is_uniform: Tensor
    """True if the weights of a query are alike to within 10 %: the logarithm of the largest is within 0.1 of the mean,
    weighted by attention. Queries with more than a half of their weight on one key do not count."""

    @property
    def is_dead(self) -> Tensor:
        """True if at least 95 % of the weight is on the first key: the head is dormant."""
        return self.first_key >= DEAD_SHARE


@torch.no_grad()
def measured_heads(passes: Iterable[Mapping[str, AttentionMap]]) -> dict[str, MeasuredHeads]:
    """Measure each head over all queries of several passes, by layer; `passes` have maps (batch..., H, T, S).

    Layers of linear attention are left out: they have no logits, and weights below 0.

    >>> import regard
    >>> q = torch.zeros(1, 2, 2, 4)
    >>> measured_heads([{"layer": regard.map_of(q, q, mask=regard.causal())}])["layer"].entropy
    tensor([0.3466, 0.3466])
    """
    rows: dict[str, list[Tensor]] = {}
    for maps in passes:
        for name, weights in with_logits(maps).items():
            told = weights.summary("entropy", "top_weight")
            first = weights.block(range(weights.shape[-2]), range(1))[..., 0]
            numbers = torch.stack([told["entropy"], told["top_weight"], first, _largest_logits(weights)])
            rows.setdefault(name, []).append(numbers.movedim(-2, 1).flatten(2))
    return {name: _heads(*torch.cat(parts, 2)) for name, parts in rows.items()}


def with_logits(maps: Mapping[str, AttentionMap]) -> dict[str, AttentionMap]:
    """The maps of a softmax over scores."""
    return {name: weights for name, weights in maps.items() if not isinstance(weights.source, LinearSource)}


def _heads(entropy: Tensor, top: Tensor, first: Tensor, logits: Tensor) -> MeasuredHeads:
    """The means over the rows (H, rows) with a key."""
    spread = (top > 0) & (top <= 0.5)
    uneven = _mean(entropy + top.log(), spread)  # 0 where all weights of a row are alike
    live = top > 0
    return MeasuredHeads(_mean(entropy, live), logits.amax(1), _mean(first, live), uneven < EVEN_NATS)


def _mean(numbers: Tensor, counted: Tensor) -> Tensor:
    return numbers.masked_fill(~counted, 0.0).sum(1) / counted.sum(1)


def _largest_logits(weights: AttentionMap) -> Tensor:
    try:
        return weights.max_logit()
    except ArgumentError:  # the weights themselves were kept
        return torch.full(weights.shape[:-1], torch.nan, device=weights.device)
