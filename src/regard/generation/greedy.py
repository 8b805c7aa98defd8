"""Greedy search: the most probable token at each step."""

from collections.abc import Sequence

import torch
from jaxtyping import Int
from torch import Tensor

from regard.generation.beam import _largest
from regard.generation.filters import Constraint, Progress
from regard.generation.protocol import (
    Decodable,
    Hypothesis,
    check_source,
    first_tokens,
    log_probabilities,
    mean_over_heads,
    worth_leaving,
)
from regard.generation.sampling import spread


@torch.no_grad()
def greedy(
    model: Decodable,
    source: Int[Tensor, "B S"],
    source_lengths: Int[Tensor, " B"],
    *,
    bos_id: int | Int[Tensor, " B"],
    eos_id: int,
    max_steps: int,
    constraints: Sequence[Constraint] = (),
    alignments: bool = False,
) -> list[Hypothesis]:
    """The most probable token at every step, until the end mark or `max_steps` tokens.

    Args:
        model: in evaluation mode.
        source: token ids of B sources, padded with anything.
        source_lengths: how many of them are real.
        bos_id: the token that every target begins with; or, of a language model, each text's last.
        eos_id: the token that ends it.
        max_steps: the most tokens of an answer, the end mark counted.
        constraints: what may be chosen; see `regard.generation.filters`. Scores stay the model's own.
        alignments: whether hypotheses come with what their tokens attended to.

    Returns:
        One hypothesis for each source; its score is the sum of log-probabilities (length penalty 0).

    Raises:
        ArgumentError: a source and lengths that do not fit, or max_steps below 1.

    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> found = greedy(model, torch.tensor([[4, 5, 2]]), torch.tensor([3]), bos_id=1, eos_id=2, max_steps=7)
    >>> 1 <= len(found[0].tokens) <= 7, found[0].score < 0
    (True, True)
    """
    check_source(source, source_lengths, max_steps)
    count, state = len(source), model.start(source, source_lengths)
    rows = torch.arange(count, device=source.device)
    tokens, ended = first_tokens(rows, bos_id), torch.zeros_like(rows, dtype=torch.bool)
    # Of all sources, and of those that still run: a step then touches no row by its number.
    answers, scores = tokens.new_full((count, max_steps), eos_id), torch.zeros(count, device=source.device)
    found, score = answers.clone(), scores
    attended = []
    for step in range(max_steps):
        logits, alignment, state = model.step(state, tokens)
        gains, best = _largest(log_probabilities(logits, constraints, Progress(rows, found[:, :step])), None, 1)
        tokens = best[:, 0]
        found[:, step] = tokens
        score = score + gains[:, 0].masked_fill(ended, 0.0)
        if alignments and alignment is not None:
            attended.append(spread(mean_over_heads(alignment), rows, count))
        ended = ended | (tokens == eos_id)
        left = len(rows) - int(ended.sum())
        if not left:
            break
        if worth_leaving(len(rows), left):
            answers[rows], scores = found, scores.to(score.dtype).index_copy(0, rows, score)
            running = (~ended).nonzero()[:, 0]
            state = model.reorder(state, running)
            rows, tokens, ended, found, score = (x[running] for x in (rows, tokens, ended, found, score))
    answers[rows], scores = found, scores.to(score.dtype).index_copy(0, rows, score)
    whole = torch.stack(attended, 1) if attended else None
    hypotheses = []
    for n, (sentence, total) in enumerate(zip(answers.tolist(), scores.tolist(), strict=True)):
        kept = sentence[: sentence.index(eos_id) + 1] if eos_id in sentence else sentence
        hypotheses.append(Hypothesis(kept, total, None if whole is None else whole[n, : len(kept)]))
    return hypotheses
