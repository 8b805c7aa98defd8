"""The specification: dense, readable, for any dtype. All other backends are checked against it in float64."""

import torch
from torch import Tensor

from regard.call.shapes import repeated
from regard.kernels.base import Backend, Call
from regard.tensors.guards import State


class Reference(Backend):
    """$O = \\mathrm{drop}(P) V$, with P in full: T x S weights for each head.

    Scores and weights are computed in at least float32 and the output is returned in the input's dtype.
    """

    name = "reference"

    def why_not(self, call: Call, state: State) -> str | None:
        return None

    def run(self, call: Call, value: Tensor) -> tuple[Tensor, Tensor]:
        scores = call.scores(range(call.sizes.queries), range(call.sizes.keys))
        weights, state = call.normalization.normalize(scores)
        weights = torch.dropout(weights, call.dropout, train=call.dropout > 0)
        dtype = value.dtype
        value = repeated(value.to(call.compute_dtype), call.sizes.heads)
        return (weights @ value).to(dtype), state
