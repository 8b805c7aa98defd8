"""Observe causal convolutions over positions, by the functions of transformers under their names."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from regard.call.shapes import Dimensions
from regard.maps.sources.convolution import Convolution
from regard.maps.sources.values import widened
from regard.tensors.fresh import Fresh
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall

ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: torch.nn.Identity(),
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
}


@dataclass(slots=True, eq=False)
class ConvolutionCall(ObservedCall):
    """One call, after it ran. The weights hold for the values that the convolution gets: gates around it, the bias and
    the activation are outside of the map."""

    filters: Tensor
    """(C, K)."""
    value: Tensor
    """(B, C, S), with the positions of an earlier state."""
    output: Tensor
    """(B, C, T)."""
    bias: Tensor | None
    activation: str | None
    how: str = "the same filter at each position, where each channel is a head"
    kind: str = "convolution"
    has_scores: ClassVar[bool] = False

    def source(self, filters: Tensor) -> Convolution:
        batch, channels, queries = self.output.shape
        each = filters.expand(batch, -1, -1).flatten(0, 1)
        names = Dimensions.of_call(1, has_heads=True)
        return Convolution(each, (batch, channels), (queries, self.value.shape[2]), names)

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        kept = policy.keep(self.filters.clone(), f"filters of {name}", Fresh())
        # (A copy: a parameter is written to by the next step of training.)
        known = self.activation in ACTIVATIONS
        rebuilding = ConvolutionRebuilding(self) if known else f"its activation {self.activation!r} is not known here"
        return Observation(None, rebuilding=rebuilding, stored=self.source(kept))

    def query_key_value(self) -> CallVectors:
        return CallVectors(None, None, self.value[..., None])


@dataclass(frozen=True, slots=True, eq=False)
class ConvolutionRebuilding(Rebuilding):
    """The output of a convolution."""

    call: ConvolutionCall

    @property
    def queries(self) -> int:
        return self.call.output.shape[2]

    def whole(self) -> Rebuilt:
        call, value = self.call, widened(self.call.value.detach())
        source = call.source(widened(call.filters.detach()))
        rebuilt = source.sums(value.flatten(0, 1)[..., None], is_transposed=False).view(call.output.shape)
        rebuilt = rebuilt if call.bias is None else rebuilt + call.bias.detach()[:, None]
        return Rebuilt(ACTIVATIONS[call.activation](rebuilt)[..., None], call.output.detach()[..., None], value)


def convolution_of(given: dict[str, Any], state: Tensor | None, result: Tensor) -> ConvolutionCall:
    """The call of a function (B, C, T), (C, K) -> (B, C, T), whose state has the positions before."""
    value = given["hidden_states"]
    value = value if state is None else torch.cat([state, value], -1)
    return ConvolutionCall(given["weight"], value, result, given.get("bias"), given.get("activation"))
