"""Greedy search: the most probable token at each step."""

from collections.abc import Sequence

import torch
from jaxtyping import Integer
from torch import Tensor

from regard.tasks.generation.filters import Constraint, Progress
from regard.tasks.generation.protocol import (
    Decodable,
    Hypothesis,
    check_source,
    log_probabilities,
    mean_over_heads,
    steps,
    worth_leaving,
)


@torch.no_grad()
def greedy(
    model: Decodable,
    source: Integer[Tensor, "B S"],
    source_lengths: Integer[Tensor, " B"],
    *,
    bos_id: int | Integer[Tensor, " B"],
    eos_id: int,
    max_steps: int,
    constraints: Sequence[Constraint] = (),
    alignments: bool = False,
) -> list[Hypothesis]:
    """The most probable token at every step, until the end mark or `max_steps` tokens.

    Args:
        model: in evaluation mode.
        source: token ids of B sources, padded with anything.
        source_lengths: the length of each source.
        bos_id: the first token of every target; for a language model, the last token of each text.
        eos_id: the token that ends a target.
        max_steps: the most tokens of an answer, including the end mark.
        constraints: the allowed tokens; see `regard.tasks.generation.filters`. Scores stay the model's own.
        alignments: add to hypotheses the attention of their tokens to the source.

    Returns:
        One hypothesis for each source; its score is the sum of log-probabilities (length penalty 0).

    Raises:
        ArgumentError: source and lengths do not fit, or max_steps is below 1.

    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> found = greedy(model, torch.tensor([[4, 5, 2]]), torch.tensor([3]), bos_id=1, eos_id=2, max_steps=7)
    >>> 1 <= len(found[0].tokens) <= 7, found[0].score < 0
    (True, True)
    """

    def take(logits: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
        gains = log_probabilities(logits, constraints, progress)
        score, tokens = gains.max(-1)
        return tokens, score

    check_source(source, source_lengths, max_steps)
    state = model.start(source, source_lengths)
    count, columns, attended = len(source), [], []
    scores = torch.zeros(count, device=source.device)
    for step in steps(
        model, state, source, bos_id=bos_id, eos_id=eos_id, max_steps=max_steps, choose=take,
        is_worth_leaving=worth_leaving,
    ):  # fmt: skip
        columns.append(_spread(step.tokens, step.rows, count, fill=eos_id))
        scores = scores + _spread(step.gains.masked_fill(step.ended, 0.0), step.rows, count)
        if alignments and step.alignment is not None:
            attended.append(_spread(mean_over_heads(step.alignment), step.rows, count))
    whole = torch.stack(attended, 1) if attended else None
    hypotheses = []
    for n, (sentence, total) in enumerate(zip(torch.stack(columns, 1).tolist(), scores.tolist(), strict=True)):
        kept = sentence[: sentence.index(eos_id) + 1] if eos_id in sentence else sentence
        hypotheses.append(Hypothesis(kept, total, None if whole is None else whole[n, : len(kept)]))
    return hypotheses


def _spread(values: Tensor, rows: Tensor, count: int, *, fill: int = 0) -> Tensor:
    """`values` scattered to the sorted `rows` of a tensor of `count` rows, with `fill` in all others."""
    if rows.shape[0] == count:
        return values
    return values.new_full((count, *values.shape[1:]), fill).index_copy_(0, rows, values)
