r"""Rows with biases so far from 0 that their log-sum-exp has no digits left for the weights.

$\mathrm{lse} = m + \ln \sum_j \exp(s_j - m)$ is one scalar. If the scores of a whole row are near $m = -10^9$, float32
has steps of 64 there, and the sum is lost: each weight is read as 1. The weights are those of the scores less $m$:
$P_j = \exp((s_j - m) - \mathrm{lse}')$ with $\mathrm{lse}' = \ln \sum_j \exp(s_j - m)$.
"""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias
from regard.call.normalizations import Softmax, SoftmaxWithSink, any_coarse, coarse_rows
from regard.call.scores.base import Score
from regard.call.shapes import Rows, Sizes
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.maps.sources.source import take_rows
from regard.tensors.guards import has_values, in_transform


class RowShift:
    def __init__(self) -> None:
        self._is_known = False
        self._peak: Tensor | None = None
        self._state: Tensor | None = None

    def applied(self, call: Call, state: Tensor) -> tuple[Call, Tensor]:
        normalization = call.normalization
        if call.bias is None or not isinstance(normalization, Softmax):
            return call, state
        if not self._is_known:
            if not has_values(state) or in_transform("Vmap"):
                return call, state
            if any_coarse(state):
                self._peak = torch.where(coarse_rows(state), state, 0.0).detach()
            self._is_known = True
        if self._peak is None:
            return call, state
        # The weights of a softmax with a sink follow from its row state as those of a plain one.
        lowered = replace(call, bias=ShiftedBias(call.bias, call.score, self._peak), normalization=Softmax())
        if self._state is None:
            self._state = row_state(lowered)
            if isinstance(normalization, SoftmaxWithSink):
                self._state = torch.logaddexp(self._state, normalization.sink_of_rows(state) - self._peak)
        return lowered, self._state


@dataclass(frozen=True, slots=True, eq=False)
class ShiftedBias(BlockBias):
    """A bias b that gives (s + b) - m for the scores s + b, with s + b rounded as in the kernels."""

    bias: Bias
    score: Score
    peak: Tensor
    """m (B, H, T)."""
    reads_vectors = True

    def learned(self) -> tuple[Tensor, ...]:
        return self.bias.learned()

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        added = self.bias.block(rows, columns, query=query, key=key, sizes=sizes)
        return self._lowered(added, query, key, take_rows(self.peak, rows)[..., None])

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        added = self.bias.pairs(rows, columns, query=query, key=key, sizes=sizes)
        return self._lowered(added, query, key, self.peak[..., rows].movedim(-1, 0)[..., None, None])

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        owners = batches if self.peak.shape[1] == 1 else heads  # as in `Call.select`
        peak = self.peak[batches, heads].unsqueeze(1)
        return ShiftedBias(self.bias.select(batches, heads), self.score.select(owners), peak)

    def _lowered(self, added: Tensor, query: Tensor, key: Tensor, peak: Tensor) -> Tensor:
        # The caller adds s with its gradient.
        with torch.no_grad():
            scores = self.score.block(query, key)
        added, peak = added.to(scores.dtype), peak.to(scores.dtype)
        # A compact kernel has scores of -inf, and -inf - -inf is NaN.
        return torch.where(scores.isfinite(), scores + added - peak - scores, added - peak)
