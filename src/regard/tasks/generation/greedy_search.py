"""Greedy search: the most probable token at each step."""

import torch
from torch import Tensor

from regard.tasks.generation.filters import Progress
from regard.tasks.generation.protocol import (
    Decodable,
    Hypothesis,
    SearchOf,
    log_probabilities,
    mean_over_heads,
    steps,
    worth_leaving,
)


@torch.no_grad()
def greedy(
    model: Decodable,
    asked: SearchOf,
    *,
    alignments: bool = False,
) -> list[Hypothesis]:
    """The most probable token at every step, until the end mark or `max_steps` tokens.

    Args:
        model: in evaluation mode.
        asked: the sources, and the tokens that may be written.
        alignments: add to hypotheses the attention of their tokens to the source.

    Returns:
        One hypothesis for each source; its score is the sum of log-probabilities (length penalty 0).

    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> asked = SearchOf(torch.tensor([[4, 5, 2]]), torch.tensor([3]), bos_id=1, eos_id=2, max_steps=7)
    >>> found = greedy(model, asked)
    >>> 1 <= len(found[0].tokens) <= 7, found[0].score < 0
    (True, True)
    """

    def take(logits: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
        gains = log_probabilities(logits, asked.constraints, progress)
        score, tokens = gains.max(-1)
        return tokens, score

    count, columns, attended = len(asked.source), [], []
    scores = torch.zeros(count, device=asked.source.device)
    for step in steps(model, asked, choose=take, is_worth_leaving=worth_leaving):
        columns.append(_spread(step.tokens, step.rows, count, fill=asked.eos_id))
        scores = scores + _spread(step.gains.masked_fill(step.ended, 0.0), step.rows, count)
        if alignments and step.alignment is not None:
            attended.append(_spread(mean_over_heads(step.alignment), step.rows, count))
    whole = torch.stack(attended, 1) if attended else None
    hypotheses = []
    for n, (sentence, total) in enumerate(zip(torch.stack(columns, 1).tolist(), scores.tolist(), strict=True)):
        kept = sentence[: sentence.index(asked.eos_id) + 1] if asked.eos_id in sentence else sentence
        hypotheses.append(Hypothesis(kept, total, None if whole is None else whole[n, : len(kept)]))
    return hypotheses


def _spread(values: Tensor, rows: Tensor, count: int, *, fill: int = 0) -> Tensor:
    """`values` scattered to the sorted `rows` of a tensor of `count` rows, with `fill` in all others."""
    if rows.shape[0] == count:
        return values
    return values.new_full((count, *values.shape[1:]), fill).index_copy_(0, rows, values)
