"""The loop of greedy search and sampling: one token for each text, step after step, until all have ended."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from regard.tasks.generation.filters import Progress
from regard.tasks.generation.protocol import Decodable, first_tokens

Choose = Callable[[Tensor, Progress], tuple[Tensor, Tensor]]
"""Chooses a token for each of N texts from logits (N, V), and returns it with the model's own log-probability."""


class TextStep(NamedTuple):
    """One step of N texts."""

    rows: Integer[Tensor, " N"]
    """The indices of the texts."""
    tokens: Integer[Tensor, " N"]
    gains: Float[Tensor, " N"]
    """The model's own log-probability of each token."""
    ended: Bool[Tensor, " N"]
    """True for texts ended before this step; their tokens are meaningless."""
    alignment: Any
    """The attention of the model, as `Decodable.step` returns it."""


def steps(
    model: Decodable,
    state: Any,
    source: Integer[Tensor, "B S"],
    *,
    bos_id: int | Integer[Tensor, " B"],
    eos_id: int,
    max_steps: int,
    choose: Choose,
    is_worth_leaving: Callable[[int, int], bool],
    before: Integer[Tensor, "B P"] | None = None,
) -> Iterator[TextStep]:
    """The steps until every text has its end mark, at most `max_steps`. The caller may stop earlier.

    The caller must turn gradients off by `torch.no_grad`. `is_worth_leaving` decides from the counts of texts in the
    batch and of unfinished ones whether to compact the batch, which copies the state.
    """
    rows = torch.arange(len(source), device=source.device)
    tokens, ended = first_tokens(rows, bos_id), torch.zeros_like(rows, dtype=torch.bool)
    written = tokens.new_empty((rows.shape[0], max_steps))  # (len() of a tensor takes microseconds.)
    for length in range(max_steps):
        logits, alignment, state = model.step(state, tokens)
        progress = Progress(rows, written[:, :length], None if before is None else before[rows])
        tokens, gains = choose(logits, progress)
        yield TextStep(rows, tokens, gains, ended, alignment)
        written[:, length] = tokens
        ended = ended | (tokens == eos_id)
        left = rows.shape[0] - int(ended.sum())
        if not left:
            return
        if is_worth_leaving(rows.shape[0], left):
            running = (~ended).nonzero()[:, 0]
            state = model.reorder(state, running)
            rows, tokens, ended, written = (x[running] for x in (rows, tokens, ended, written))
