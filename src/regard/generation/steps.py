"""The loop that greedy search and sampling share: one token for each text, step after step, until all have ended."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.generation.filters import Progress
from regard.generation.protocol import Decodable, check_source, first_tokens

Choose = Callable[[Tensor, Progress], tuple[Tensor, Tensor]]
"""From logits (N, V) and how far the N texts have come to a token for each and its log-probability by the model."""


class TextStep(NamedTuple):
    """One step of N texts."""

    rows: Int[Tensor, " N"]
    """Which of the texts these are."""
    tokens: Int[Tensor, " N"]
    gains: Float[Tensor, " N"]
    """The model's own log-probability of each token."""
    ended: Bool[Tensor, " N"]
    """Which texts had ended before this step; their tokens mean nothing."""
    alignment: Any
    """What the model attended to, as `Decodable.step` gives it."""


def steps(
    model: Decodable,
    source: Int[Tensor, "B S"],
    source_lengths: Int[Tensor, " B"],
    *,
    bos_id: int | Int[Tensor, " B"],
    eos_id: int,
    max_steps: int,
    choose: Choose,
    is_worth_leaving: Callable[[int, int], bool],
    before: Int[Tensor, "B P"] | None = None,
) -> Iterator[TextStep]:
    """The steps until every text has its end mark, at most `max_steps`. Whoever has enough stops asking.

    The caller says `torch.no_grad`.

    Args:
        model: in evaluation mode.
        source: token ids of B sources, padded with anything.
        source_lengths: how many of them are real.
        bos_id: the token that every text begins with, or that of each.
        eos_id: the token that ends it.
        max_steps: the most tokens of a text, the end mark counted.
        choose: gives the next tokens.
        is_worth_leaving: whether texts that have ended are left behind, from the numbers of texts that run and of
            those that go on. To leave them copies the state of the others.
        before: what stands before the texts, for `choose`.

    Raises:
        ArgumentError: a source and lengths that do not fit, or max_steps below 1.
    """
    check_source(source, source_lengths, max_steps)
    state, rows = model.start(source, source_lengths), torch.arange(len(source), device=source.device)
    tokens, ended = first_tokens(rows, bos_id), torch.zeros_like(rows, dtype=torch.bool)
    written = tokens.new_empty((len(rows), max_steps))
    for length in range(max_steps):
        logits, alignment, state = model.step(state, tokens)
        progress = Progress(rows, written[:, :length], None if before is None else before[rows])
        tokens, gains = choose(logits, progress)
        yield TextStep(rows, tokens, gains, ended, alignment)
        written[:, length] = tokens
        ended = ended | (tokens == eos_id)
        left = len(rows) - int(ended.sum())
        if not left:
            return
        if is_worth_leaving(len(rows), left):
            running = (~ended).nonzero()[:, 0]
            state = model.reorder(state, running)
            rows, tokens, ended, written = (x[running] for x in (rows, tokens, ended, written))
