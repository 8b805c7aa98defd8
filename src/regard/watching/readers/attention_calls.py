"""The one form of a call of attention: its vectors, its formula as a `Call`, its output, and its kernel's log-sum-exp.

Each reader turns the arguments of its function into this form. A watch reads it after the call ran, an edit before.
"""

from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.shapes import Sizes
from regard.kernels.base import Call
from regard.maps.sources.factors import Factors
from regard.maps.sources.values import CallValues
from regard.tensors.fresh import Fresh
from regard.tensors.undisturbed import undisturbed, with_graph
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.mask_reading import GivenMask, masked
from regard.watching.kept.rebuilding import CallRebuilding
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_values import OutputOf, ValuesOf, saved_values
from regard.watching.origins.streams import Origins
from regard.watching.readers.heads import AS_DOCUMENTED, Heads
from regard.watching.readers.kernel_lse import KernelLse
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall

LaidOut = Callable[[Tensor], Tensor]
"""Turns a tensor of the model into the layout of a `Call`. It holds no tensor of the model."""
NOTHING_GIVEN = GivenMask()


@dataclass(slots=True, kw_only=True, eq=False)
class AttentionCall(ObservedCall):
    query: Tensor
    key: Tensor
    value: Tensor
    output: Tensor | None
    """As the model got it; None before it ran."""
    how: str
    dropped: float = 0.0
    is_causal: bool = False
    """True if the kernel got the causal flag."""
    kernel: KernelLse = field(default_factory=KernelLse)
    origins: Origins | None = None
    heads: Heads = AS_DOCUMENTED
    """The dimensions, and how the model lays out its heads; here they are before the queries, but in the output."""

    @property
    def vectors(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.query, self.key, self.value

    @abstractmethod
    def call_of(self, query: Tensor, key: Tensor) -> Call:
        """The call of vectors as `computed` gives them, without the masks that the model handed over as tensors."""

    def computed(self) -> tuple[Tensor, Tensor]:
        return self.query, self.key

    def mask_of(self, sizes: Sizes, policy: RetentionPolicy) -> tuple[GivenMask, Mask | None]:
        return NOTHING_GIVEN, None

    def value_layout(self, sizes: Sizes) -> LaidOut:
        """Lays out values as (B, G, S, E)."""
        return lambda value: _expanded(value, sizes)

    def output_layout(self, sizes: Sizes) -> LaidOut:
        """Lays out the output that the model got, or its gradient, as (B, H, T, E)."""
        rows, layout = (sizes.flat_batch, sizes.heads, sizes.queries, -1), self.heads.layout
        return lambda output: (output if layout is None else layout.unfolded(output)).reshape(rows)

    def under_masks(self, call: Call, policy: RetentionPolicy) -> tuple[Call, GivenMask]:
        given, beside = self.mask_of(call.sizes, policy)
        return masked(call, given, beside), given

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        query, key = self.computed()
        queries, keys = Fresh(), Fresh()
        query = policy.keep(query, f"queries of {name}", queries)
        plain = self.call_of(query, policy.keep(key, f"keys of {name}", keys))
        call, given = self.under_masks(plain, policy)
        fresh = queries.joined(given.fresh) if given.even is None else given.fresh.joined()
        # (For uniform rows, the call has a new query tensor, out of the model's reach.)
        notes, state = self.heads.notes, self.state(call, given, policy, fresh)
        factors = Factors(
            call, state, sizes=call.sizes, fresh=fresh, keys=keys, even=given.even, notes=notes,
            of_kernel=None if state is None else self.kernel.operator,
            within=with_graph if policy.graph else undisturbed,
        )  # fmt: skip
        # Where the map holds other queries than these, or a graph, the fingerprints do not wait.
        held = queries.joined(keys) if given.even is None and not policy.graph else None
        return Observation(
            factors, notes, self.rebuilding(call, factors), evidence=self.evidence(plain, held),
            dimensions=self.heads.dimensions, beside=self.beside(policy, name, call.sizes, call.query.dtype),
            holds_keys=not policy.graph,
        )  # fmt: skip

    def state(self, call: Call, given: GivenMask, policy: RetentionPolicy, fresh: Fresh) -> Tensor | None:
        lse, shape = self.kernel.lse, call.query.shape[:-1]
        # The kernel's lse has no gradient: one with a gradient is computed when the map is read. For uniform rows the
        # kernel gives finfo.min. With a mask and the causal flag, rows without keys are unknown.
        is_known = given.even is None and not (self.is_causal and given.live is not None)
        if policy.graph or lse is None or not is_known or lse.numel() != shape.numel():
            return None
        lse = lse.detach().to(call.query.device).reshape(shape)
        if given.live is not None:
            lse = lse.masked_fill(~given.live, -torch.inf)
        return policy.keep(lse, "log-sum-exp", fresh)

    def evidence(self, call: Call, fresh: Fresh | None) -> Evidence | None:
        return Evidence(call.query, call.key, self.key, fresh)

    def rebuilding(self, call: Call, factors: Factors) -> CallRebuilding | str:
        if self.dropped:
            return "dropout"
        if not call.sizes.flat_batch:
            return "an empty batch"
        assert self.output is not None, "it is read after it ran"
        value, output = self.value_layout(call.sizes), self.output_layout(call.sizes)
        return CallRebuilding(call, value(self.value.detach()), output(self.output.detach()), factors)

    def query_key_value(self) -> CallVectors:
        return CallVectors(*self.vectors)

    def beside(self, policy: RetentionPolicy, name: str, sizes: Sizes, dtype: torch.dtype) -> CallValues:
        def values() -> ValuesOf:
            fresh, laid_out = Fresh(), self.value_layout(sizes)
            kept = policy.keep(self.value, f"values of {name}", fresh)
            return ValuesOf(lambda: laid_out(kept).to(dtype), fresh)

        def output() -> OutputOf:
            return OutputOf(self.output, self.output_layout(sizes), self.dropped)

        return saved_values(policy, name, sizes, values, output)


def _expanded(value: Tensor, sizes: Sizes) -> Tensor:
    value = value[(None,) * (len(sizes.map_shape) - value.dim())]
    heads = sizes.kv_heads
    if sizes.has_heads and 1 < value.shape[-3] < heads:
        value = value.repeat_interleave(heads // value.shape[-3], -3)
    lead = (*sizes.batch, heads) if sizes.has_heads else sizes.batch
    return value.expand(*lead, *value.shape[-2:]).reshape(sizes.flat_batch, heads, *value.shape[-2:])
