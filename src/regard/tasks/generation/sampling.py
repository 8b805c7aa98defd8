"""Sampling: at each step a token is drawn at random."""

from collections.abc import Iterator, Sequence

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.errors import NonFiniteError
from regard.tasks.generation.filters import Filter, Progress, constrain
from regard.tasks.generation.protocol import Decodable, Hypothesis, SearchOf, TextStep, precise, steps


def draw_tokens(
    probabilities: Float[Tensor, "N V"], generator: torch.Generator | None = None
) -> Integer[Tensor, "N 1"]:
    """For each row the first token with a cumulative probability above one random value. (`torch.multinomial` draws a
    value for each token of the vocabulary, slower than a step of a small model.)"""
    # The sums of a large vocabulary need more digits than float32 has; Apple's GPUs have no float64.
    dtype = torch.float32 if probabilities.device.type == "mps" else torch.float64
    sums = probabilities.cumsum(-1, dtype=dtype)
    totals = sums[:, -1:]
    if not bool((totals > 0).all()):
        wrong = totals[~(totals > 0)][0].item()
        raise NonFiniteError(
            f"a token is drawn from probabilities whose sum is above 0, got a sum of {wrong}: the model's logits, or "
            "the filters, have left no finite number"
        )
    below = torch.rand(totals.shape, dtype=dtype, device=sums.device, generator=generator)
    # Random values are at most 1 - 2^-53 (in float32 2^-24), and no product with that rounds up to the total.
    return torch.searchsorted(sums, below * totals, right=True)


@torch.no_grad()
def sample_steps(
    model: Decodable,
    asked: SearchOf,
    *,
    filters: Sequence[Filter] = (),
    generator: torch.Generator | None = None,
) -> Iterator[TextStep]:
    """Do the same as `sample`, but yield each token as soon as it is drawn. The caller may stop at any step.

    >>> from regard.models import DecoderOnly, DecoderOnlyConfig
    >>> model = DecoderOnly(DecoderOnlyConfig(dim=8, num_heads=2), vocab_size=9).eval()
    >>> text = torch.tensor([[4, 5]])
    >>> asked = SearchOf(text[:, :-1], torch.tensor([1]), bos_id=text[:, -1], eos_id=2, max_steps=3)
    >>> 1 <= len([int(step.tokens[0]) for step in sample_steps(model, asked)]) <= 3
    True
    """

    def draw(logits: Tensor, progress: Progress) -> tuple[Tensor, Tensor]:
        logits = precise(logits)
        changed = constrain(logits, asked.constraints, progress)
        for change in filters:
            changed = change(changed, progress)
        tokens = draw_tokens(changed.softmax(-1), generator)
        return tokens[:, 0], logits.log_softmax(-1).gather(1, tokens)[:, 0]

    # A finished text is removed at once, so that no random values are drawn for it.
    yield from steps(model, asked, choose=draw, is_worth_leaving=lambda running, left: left < running)


def sample(
    model: Decodable,
    asked: SearchOf,
    *,
    filters: Sequence[Filter] = (),
    generator: torch.Generator | None = None,
) -> list[Hypothesis]:
    """Draw tokens from the model's distribution, as changed by the filters, until the end mark or `max_steps`.

    Args:
        model: in evaluation mode.
        asked: the sources, and the tokens that may be written; repeat a source to get several samples.
        filters: applied to the logits after the constraints, in this order; see `regard.tasks.generation.filters`.
        generator: of the random values; None for torch's.

    Returns:
        One hypothesis for each source. Its score is the sum of the model's own log-probabilities, before
        constraints and filters.

    >>> from regard.tasks.generation.filters import Temperature, TopP
    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> source, lengths = torch.tensor([[4, 5, 2]] * 3), torch.tensor([3] * 3)
    >>> asked = SearchOf(source, lengths, bos_id=1, eos_id=2, max_steps=7)
    >>> found = sample(model, asked, filters=[Temperature(0.7), TopP(0.9)])
    >>> [1 <= len(one.tokens) <= 7 for one in found]
    [True, True, True]
    """
    tokens: list[list[int]] = [[] for _ in asked.source]
    scores = [0.0] * len(asked.source)
    for step in sample_steps(model, asked, filters=filters, generator=generator):
        for row, token, gain in zip(step.rows.tolist(), step.tokens.tolist(), step.gains.tolist(), strict=True):
            tokens[row].append(token)
            scores[row] += gain
    return [Hypothesis(written, score) for written, score in zip(tokens, scores, strict=True)]
