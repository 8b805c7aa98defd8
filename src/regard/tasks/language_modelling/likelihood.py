"""How probable a text is under a model."""

from collections.abc import Iterable
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.lazy import displayed
from regard.tasks.text.codec import UNPREDICTED
from regard.tensors.memory import widest_dtype

MOST_UNKNOWN = 0.01
"""The largest share of unknown tokens in a text whose bits for each byte are told: an unknown token says nothing of its
bytes, so that the figure is too low."""


@displayed
class Likelihood(NamedTuple):
    log_probability: float
    """Sum over the tokens, in nats; 0 or less."""
    tokens: int
    """How many are in the sum."""
    unknown: int = 0
    """How many of them stand for text outside the vocabulary."""


def likelihoods(
    logits: Float[Tensor, "B T V"], targets: Integer[Tensor, "B T"], *, unknown: int | None = None
) -> list[Likelihood]:
    """The likelihood of each row's targets, but for those that are UNPREDICTED; `unknown` is the unknown token."""
    targets = targets.long()
    precise = logits.to(torch.promote_types(logits.dtype, torch.float32))
    counted = targets != UNPREDICTED
    own = precise.gather(-1, targets.where(counted, 0)[..., None])[..., 0] - precise.logsumexp(-1)
    sums = own.to(widest_dtype(own.device)).masked_fill(~counted, 0.0).sum(-1)
    strange = (targets == (UNPREDICTED if unknown is None else unknown)) & counted
    columns = sums, counted.sum(-1), strange.sum(-1)
    return [Likelihood(*row) for row in zip(*(column.tolist() for column in columns), strict=True)]


def together(parts: Iterable[Likelihood]) -> Likelihood:
    total, count, unknown = 0.0, 0, 0
    for part in parts:
        total, count, unknown = total + part.log_probability, count + part.tokens, unknown + part.unknown
    return Likelihood(total, count, unknown)
