"""The log-sum-exp and the largest score of each row."""

from dataclasses import replace

import torch
from torch import Tensor

from regard.call.normalizations import Softmax
from regard.errors import ArgumentError
from regard.kernels import choose_backend
from regard.maps.sources.call import CallSource, source_of_call
from regard.maps.sources.factors import Factors
from regard.maps.sources.source import Source
from regard.maps.statistics import definitions as st
from regard.maps.statistics.tiles import ask


def log_sum_exp(source: Source) -> Tensor:
    """The row state of a softmax, (batch..., H, T). See `AttentionMap.lse`."""
    call = source_of_call(source, "lse")
    if not isinstance(call.call.normalization.base, Softmax):
        raise ArgumentError(f"lse is the log-sum-exp of a softmax, and this map is {source}: it has none")
    return source.laid_out(call.state.flatten(0, 1))


def largest_score(source: Source) -> Tensor:
    """The largest score of each query, (batch..., H, T). See `AttentionMap.max_logit`."""
    made = source_of_call(source, "max_logit()")
    with torch.no_grad():
        # Under a softmax the largest weight is at least 1 / S, so its logarithm is exact to rounding.
        call = replace(made.call, normalization=Softmax(), dropout=0.0)
        plain = CallSource(Factors.given(call, None), made.shape, choose_backend(call, None))
        state = plain.state.flatten(0, 1)
        found = ask(plain, st.Largest())[0].log() + state
        return source.laid_out(found.masked_fill(state == -torch.inf, -torch.inf))
