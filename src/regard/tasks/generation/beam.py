"""Greedy search takes the most probable token at each step; beam search continues several hypotheses at once."""

from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.tasks.generation.config import Beam
from regard.tasks.generation.filters import Progress
from regard.tasks.generation.protocol import (
    Decodable,
    Hypothesis,
    SearchOf,
    first_tokens,
    log_probabilities,
    steps,
    worth_leaving,
)


@torch.no_grad()
def greedy(
    model: Decodable,
    asked: SearchOf,
) -> list[Hypothesis]:
    """The most probable token at every step, until the end mark or `max_steps` tokens.

    Args:
        model: in evaluation mode.
        asked: the sources, and the tokens that may be written.

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

    count, columns = len(asked.source), list[Tensor]()
    scores = torch.zeros(count, device=asked.source.device)
    for step in steps(model, asked, choose=take, is_worth_leaving=worth_leaving):
        columns.append(_spread(step.tokens, step.rows, count, fill=asked.eos_id))
        scores = scores + _spread(step.gains.masked_fill(step.ended, 0.0), step.rows, count)
    hypotheses = []
    for sentence, total in zip(torch.stack(columns, 1).tolist(), scores.tolist(), strict=True):
        kept = sentence[: sentence.index(asked.eos_id) + 1] if asked.eos_id in sentence else sentence
        hypotheses.append(Hypothesis(kept, total))
    return hypotheses


def _spread(values: Tensor, rows: Tensor, count: int, *, fill: int = 0) -> Tensor:
    """`values` scattered to the sorted `rows` of a tensor of `count` rows, with `fill` in all others."""
    if rows.shape[0] == count:
        return values
    return values.new_full((count, *values.shape[1:]), fill).index_copy_(0, rows, values)


@torch.no_grad()
def beam_search(
    model: Decodable,
    asked: SearchOf,
    *,
    beam: Beam = Beam(),
) -> list[list[Hypothesis]]:
    r"""The best hypotheses of a beam search for each source.

    The score is $\log p(y \mid x) / |y|^\alpha$, where $\alpha$ is the length penalty, and $|y|$ includes the end mark
    (Wu et al. 2016, arXiv:1609.08144, equation 14, divide by $((5 + |y|) / 6)^\alpha$ instead). At each step the
    `beam.size` best unended continuations are continued, and ended ones among the `beam.size` best are finished. Let w
    be the worst score among the `beam.num_best` hypotheses to return. A source is done when no live hypothesis can
    reach a score above w; or, after `beam.size` finished hypotheses, when no live hypothesis has a score above w at its
    present length.

    Args:
        model: in evaluation mode.
        asked: the sources, and the tokens that may be written.
        beam: the counts of continued and returned hypotheses, and the weight of their length.

    Returns:
        For each source up to `beam.num_best` different hypotheses, best first. If too few ended, hypotheses cut off at
        `max_steps` follow, also best first.

    >>> from regard.tasks.generation import greedy
    >>> from regard.models import RNNConfig, RNNSeq2Seq
    >>> model = RNNSeq2Seq(RNNConfig(hidden_dim=8), source_vocab_size=9, target_vocab_size=9).eval()
    >>> asked = SearchOf(torch.tensor([[4, 5, 2]]), torch.tensor([3]), bos_id=1, eos_id=2, max_steps=7)
    >>> found = beam_search(model, asked, beam=Beam(num_best=3, length_penalty=0.0))
    >>> found[0][0].score >= greedy(model, asked)[0].score
    True
    """
    held = _Hypotheses(len(asked.source), asked.source.device, beam, eos_id=asked.eos_id, max_steps=asked.max_steps)
    # At the first step the hypotheses of a source would all be the same: there is one.
    state, tokens = model.start(asked.source, asked.source_lengths), first_tokens(held.sources, asked.bos_id)
    written = tokens[:, None][:, :0]
    for length in range(1, asked.max_steps + 1):
        logits, _, state = model.step(state, tokens)
        progress = Progress(held.sources.repeat_interleave(held.live.shape[1]), written)
        gains = log_probabilities(logits, asked.constraints, progress)
        tokens, parents = held.advance(gains, length)
        if not len(tokens) or length == asked.max_steps:
            break
        state = model.reorder(state, parents)
        if asked.constraints:
            written = torch.cat([written[parents], tokens[:, None]], 1)
    return held.best()


class _Trace(NamedTuple):
    tokens: Integer[Tensor, " M"]
    parents: Integer[Tensor, " M"]


class _Hypotheses:
    """K live and K finished hypotheses of each source, as tensors. A row is a live hypothesis; a source has K rows, and
    one before the first step. Only the A running sources have rows, so row indices change from step to step. The trace
    leads back through them."""

    def __init__(self, count: int, device: torch.device, beam: Beam, *, eos_id: int, max_steps: int) -> None:
        self.size, self.num_best, self.beam = beam.size, beam.num_best, beam
        self.eos_id, self.max_steps = eos_id, max_steps
        self.trace: list[_Trace] = []
        # The running sources (A,), and the log-probabilities of their live hypotheses (A, K).
        self.sources = torch.arange(count, device=device)
        self.live = torch.zeros((count, 1), device=device)
        self.has_finished = False
        # The finished hypotheses (B, K), best first: their score, their last step, and their row at that step.
        self.score = torch.full((count, beam.size), -torch.inf, device=device)
        self.ended_at = torch.zeros((count, beam.size), dtype=torch.long, device=device)
        self.ended_in = torch.zeros((count, beam.size), dtype=torch.long, device=device)

    def advance(self, gains: Float[Tensor, "N V"], length: int) -> tuple[Tensor, Tensor]:
        """Choose among all continuations: the tokens and parents of the next rows, none when all sources are done."""
        (running, members), vocab_size = self.live.shape, gains.shape[1]
        # At least K of the 2K candidates do not end: each of the K rows has only one ending continuation.
        sums = torch.add(gains.view(running, members, vocab_size), self.live[..., None]).flatten(1)
        scores, index = _filled_up(*sums.topk(min(2 * self.size, sums.shape[1])), 2 * self.size)
        first = torch.arange(running, device=index.device)[:, None] * members
        parents, chosen = first + index // vocab_size, index % vocab_size
        ends = chosen == self.eos_id
        if not (self.has_finished or bool(ends.any())):  # this is so at nearly all steps but the last few
            self.live, chosen, parents = (x[:, : self.size] for x in (scores, chosen, parents))
            self.trace.append(_Trace(chosen.flatten(), parents.flatten()))
            return self.trace[-1].tokens, self.trace[-1].parents
        self.has_finished = True
        self._finish(scores[:, : self.size], parents[:, : self.size], ends[:, : self.size], length)
        self.live, pick = torch.where(ends, -torch.inf, scores).topk(self.size, dim=-1)
        chosen, parents = chosen.gather(1, pick), parents.gather(1, pick)
        undecided = self._undecided(length)
        self.live = self.live.masked_fill(~undecided[:, None], -torch.inf)  # finished sources do not change
        keep = undecided.nonzero()[:, 0]
        if worth_leaving(running, len(keep)):
            chosen, parents, self.sources, self.live = (x[keep] for x in (chosen, parents, self.sources, self.live))
        self.trace.append(_Trace(chosen.flatten(), parents.flatten()))
        return chosen.flatten(), parents.flatten()

    def _finish(self, scores: Tensor, parents: Tensor, ends: Tensor, length: int) -> None:
        new = torch.where(ends, self.beam.score(scores, length), -torch.inf)
        at = torch.full_like(parents, length)
        best, kept = torch.cat([self.score[self.sources], new], 1).topk(self.size, dim=-1)
        self.score = self.score.to(best.dtype).index_copy(0, self.sources, best)
        for past, now in ((self.ended_at, at), (self.ended_in, parents)):
            past[self.sources] = torch.cat([past[self.sources], now], 1).gather(1, kept)

    def _undecided(self, length: int) -> Tensor:
        """Mask of the running sources with a live hypothesis that may still be returned; see `beam_search`."""
        finished, best = self.score[self.sources], self.live[:, 0]
        is_full, worst = finished[:, -1] > -torch.inf, finished[:, self.num_best - 1]
        # Log-probabilities only fall, and the divisor is largest at the greatest length. So this bounds the score of
        # every continuation.
        hope = self.beam.score(best, self.max_steps)
        return torch.where(is_full, self.beam.score(best, length), hope) > worst

    def best(self) -> list[list[Hypothesis]]:
        answers: list[list[Hypothesis]] = [[] for _ in self.score]
        links = [(trace.tokens.tolist(), trace.parents.tolist()) for trace in self.trace]
        columns = (t[:, : self.num_best].tolist() for t in (self.score, self.ended_at, self.ended_in))
        for answer, *ended in zip(answers, *columns, strict=True):
            for score, length, row in zip(*ended, strict=True):
                if score > -torch.inf:
                    answer.append(Hypothesis([*_walk_back(links[: length - 1], row), self.eos_id], score))
        length = len(self.trace)
        for at, (source, totals) in enumerate(zip(self.sources.tolist(), self.live.tolist(), strict=True)):
            if answers[source] and self.beam.score(max(totals), max(length, 1)) > answers[source][0].score:
                answers[source][0] = replace(answers[source][0], limited=True)
            for row, total in enumerate(totals, start=at * self.size):
                if total > -torch.inf and len(answers[source]) < self.num_best:
                    answers[source].append(Hypothesis(_walk_back(links, row), self.beam.score(total, length)))
        return answers


def _filled_up(scores: Float[Tensor, "A C"], index: Integer[Tensor, "A C"], count: int) -> tuple[Tensor, Tensor]:
    missing = count - scores.shape[1]
    if not missing:
        return scores, index
    return nn.functional.pad(scores, (0, missing), value=-torch.inf), nn.functional.pad(index, (0, missing))


def _walk_back(links: list[tuple[list[int], list[int]]], row: int) -> list[int]:
    tokens = []
    for chosen, parents in reversed(links):
        tokens.append(chosen[row])
        row = parents[row]
    return tokens[::-1]
