"""Observe `regard.attention`: its own map is saved, under any backend."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from regard.functional import Attended, attention
from regard.kernels.base import Call
from regard.maps.sources.call import source_of_call
from regard.maps.sources.factors import Factors
from regard.tensors.fresh import Fresh
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.attention_calls import NOTHING_GIVEN, AttentionCall
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.running.thread_state import ThreadState


@dataclass(slots=True, kw_only=True, eq=False)
class RegardCall(AttentionCall):
    """One call of `regard.attention`, after it ran."""

    is_editable: ClassVar[bool] = True
    made: Call
    """Its call, with the graph of the model,"""
    known_state: Tensor | None
    """and its row state. An unknown one costs a pass over the scores, to be paid only when the map is read."""
    how: str = "regard.attention"

    @classmethod
    def of(cls, attended: Attended, query: Tensor, key: Tensor, value: Tensor) -> "RegardCall":
        source = source_of_call(attended.weights.source, "a watch")
        return cls(
            query=query, key=key, value=value, output=attended.output, made=(call := source.call),
            known_state=source.factors.known_state_of(call), dropped=call.dropout,
        )  # fmt: skip

    def computed(self) -> tuple[Tensor, Tensor]:
        return self.made.query, self.made.key

    def call_of(self, query: Tensor, key: Tensor) -> Call:
        return replace(self.made, query=query, key=key)

    def under_masks(self, call: Call, policy: RetentionPolicy) -> tuple[Call, GivenMask]:
        return call if policy.graph else Factors.given(call, None).mapped(Tensor.detach).form, NOTHING_GIVEN

    def state(self, call: Call, given: GivenMask, policy: RetentionPolicy, fresh: Fresh) -> Tensor | None:
        return None if self.known_state is None else policy.keep(self.known_state, "log-sum-exp", fresh)


def observe_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run `regard.attention` with its weights, and hand these to the thread's watches."""
    # A call that also returns the weights runs in the same kernel and gives the same bits.
    attended = attention(*args, **{**kwargs, "return_weights": True})
    # (The first three can be given by name only where a model does not call it so.)
    call = RegardCall.of(attended, *args[:3])
    call.origins = thread.streams.origins(*args[:2])
    thread.give(call)
    thread.streams.follow(attended.output, args[0])
    return attended if kwargs.get("return_weights") else attended.output
