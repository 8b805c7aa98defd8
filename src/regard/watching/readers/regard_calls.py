"""Observe `regard.attention`: its own map is saved, under any backend."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar

from torch import Tensor

from regard.call.shapes import as_autocast, canonical
from regard.functional import Attended, attention
from regard.kernels.base import Call
from regard.maps.sources.call import source_of_call
from regard.maps.sources.call_factors import GivenFactors
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.factors import Factors
from regard.watching.kept.rebuilding import CallRebuilding
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_values import OutputOf, ValuesOf, saved_values
from regard.watching.origins.provenance import Origins
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.running.observed_call import CallVectors, ObservedCall, Reading
from regard.watching.running.thread_state import ThreadState


@dataclass(slots=True, eq=False)
class RegardCall(ObservedCall):
    """One call, after it ran."""

    is_editable: ClassVar[bool] = True
    attended: Attended
    vectors: tuple[Tensor, Tensor, Tensor]
    origins: Origins | None = None
    how: str = "regard.attention"

    @property
    def dropped(self) -> float:  # type: ignore[override]
        return source_of_call(self.attended.weights.source, "a watch").call.dropout

    def read(self, policy: RetentionPolicy, name: str) -> Reading:
        weights = self.attended.weights
        made = source_of_call((weights if policy.graph else weights.detach()).source, "a watch")
        query = policy.keep(made.call.query, f"the queries of {name}")
        key = policy.keep(made.call.key, f"the keys of {name}")
        call = replace(made.call, query=query.tensor, key=key.tensor)
        assert isinstance(made.factors, GivenFactors), "the function makes no other"
        # An unknown state costs a pass over the scores, to be paid only when the map is read.
        known = made.factors.known_state
        state = None if known is None else policy.keep(known, "").tensor
        factors = Factors(call.sizes, call, state=state, held=(query, key), graph=policy.graph)
        beside = saved_values(
            policy, name, call.sizes, lambda: self._values(policy, name), lambda: self._output(call)
        )  # fmt: skip

        output = self.attended.output.detach().reshape(*call.query.shape[:-1], -1)
        rebuilding = CallRebuilding(call, canonical(*self.vectors)[2].detach(), output, factors)
        held = () if policy.graph else (query, key)
        evidence = Evidence(call.query, call.key, self.vectors[1], held=held)
        return Reading(
            factors, rebuilding="dropout" if call.dropout else rebuilding, evidence=evidence, beside=beside,
            holds_keys=not policy.graph,
        )  # fmt: skip

    def _values(self, policy: RetentionPolicy, name: str) -> ValuesOf:
        kept = policy.keep(canonical(*as_autocast(*self.vectors))[2], f"the values of {name}")
        return ValuesOf(lambda: kept.tensor, [kept])

    def _output(self, call: Call) -> OutputOf:
        sizes, dropout = call.sizes, call.dropout
        rows = (sizes.flat_batch, sizes.heads, sizes.queries, -1)
        return OutputOf(self.attended.output, lambda gradient: gradient.reshape(rows), dropout)

    def query_key_value(self) -> CallVectors:
        return CallVectors(*self.vectors)


def observe_attention(thread: ThreadState, func: Func, args: Args, kwargs: Kwargs) -> Any:
    """Run `regard.attention` with its weights, and hand these to the thread's watches."""
    # A call that also returns the weights runs in the same kernel and gives the same bits.
    attended = attention(*args, **{**kwargs, "return_weights": True})
    # (The first three can be given by name only where a model does not call it so.)
    thread.give(RegardCall(attended, args[:3], thread.traces.origins(*args[:2])))
    thread.traces.follow(attended.output, args[0])
    return attended if kwargs.get("return_weights") else attended.output
