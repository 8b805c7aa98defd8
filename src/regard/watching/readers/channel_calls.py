"""Observe convolutions and compressors of blocks of tokens, by transformers' names: each channel is a head."""

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.patterns import Window
from regard.call.shapes import Dimensions, Rows
from regard.maps.sources.compression import Compression
from regard.maps.sources.source import LinearSource, Part, Piece, Scratch, Statistic
from regard.maps.sources.values import widened
from regard.maps.statistics import definitions as st
from regard.tensors.fresh import Fresh
from regard.tensors.guards import has_values
from regard.tensors.torch_private import DisableTorchFunction
from regard.watching.kept.arguments import cache_in
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.origins.streams import Origins, Stream
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import RunningModule, ThreadState


@dataclass(frozen=True, slots=True, eq=False)
class Convolution(LinearSource):
    """P_tj = w_{t - j} for 0 <= t - j < K: a band that is the same for every input, with a head for each channel."""

    filters: Tensor
    """w for each flat head, (N, K): the last number is that of the query's own position."""
    layout: tuple[int, ...]
    """(batch..., H)."""
    queries_keys: tuple[int, int]
    """(T, S): the last query stands at the last key."""
    names: Dimensions

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.layout, *self.queries_keys))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self.filters.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self.filters.device

    @property
    def has_signs(self) -> bool:
        return not has_values(self.filters) or bool((self.filters.detach() < 0).any())

    def tensors(self) -> list[Tensor]:
        return [self.filters]

    def __str__(self) -> str:
        return f"a convolution of {self.filters.shape[-1]} positions"

    @property
    def mask(self) -> Mask:
        return Window(self.filters.shape[-1] - 1, 0, self.keys - self.queries)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        filters, width = self.filters[flat_heads.start : flat_heads.stop].to(self.dtype), self.filters.shape[-1]

        def block(rows: Rows, columns: Rows) -> Piece:
            t, j = (torch.as_tensor(places, device=self.device) for places in (rows, columns))
            back = (t + self.keys - self.queries)[:, None] - j
            is_inside = (back >= 0) & (back < width)
            return Piece(filters[:, (width - 1 - back).clamp(0, width - 1)] * is_inside)

        return block

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x):
                return (self.sums(x, is_transposed=False),)
            case st.TransposedProduct(x):
                return (self.sums(x, is_transposed=True).mT,)
            case st.Received():
                ones = torch.ones(1, self.queries, 1, dtype=self.dtype, device=self.device)
                return (self.sums(ones, is_transposed=True)[..., 0],)
        return None

    def sums(self, x: Tensor, *, is_transposed: bool) -> Tensor:
        """P x for x (N or 1, S, E), or P^T x for x (N or 1, T, E)."""
        filters, count = self.filters.to(self.dtype), self.filters.shape[-1]
        earlier = self.keys - self.queries
        x = torch.nn.functional.pad(x, (0, 0, earlier, count - 1) if is_transposed else (0, 0, count - 1, 0))
        total, length = x.new_zeros(len(filters), self.keys, x.shape[-1]), self.keys
        for place in range(count):
            start = count - 1 - place if is_transposed else place
            total = total + filters[:, place, None, None] * x[:, start : start + length]
        return total if is_transposed else total[:, earlier:]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Convolution":
        return replace(self, filters=change(self.filters))


ACTIVATIONS: dict[str | None, Callable[[Tensor], Tensor]] = {
    None: torch.nn.Identity(),
    "silu": torch.nn.functional.silu,
    "swish": torch.nn.functional.silu,
}


@dataclass(slots=True, eq=False)
class ConvolutionCall(ObservedCall, Rebuilding):
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
        rebuilding = self if known else f"its activation {self.activation!r} is not known here"
        return Observation(None, rebuilding=rebuilding, stored=self.source(kept))

    def query_key_value(self) -> CallVectors:
        return CallVectors(None, None, self.value[..., None])

    @property
    def queries(self) -> int:
        return self.output.shape[2]

    def whole(self) -> Rebuilt:
        value = widened(self.value.detach())
        source = self.source(widened(self.filters.detach()))
        rebuilt = source.sums(value.flatten(0, 1)[..., None], is_transposed=False).view(self.output.shape)
        rebuilt = rebuilt if self.bias is None else rebuilt + self.bias.detach()[:, None]
        return Rebuilt(ACTIVATIONS[self.activation](rebuilt)[..., None], self.output.detach()[..., None], value)


def convolution_of(given: dict[str, Any], state: Tensor | None, result: Tensor) -> ConvolutionCall:
    """The call of a function (B, C, T), (C, K) -> (B, C, T), whose state has the positions before."""
    value = given["hidden_states"]
    value = value if state is None else torch.cat([state, value], -1)
    return ConvolutionCall(given["weight"], value, result, given.get("bias"), given.get("activation"))


COMPRESSOR = ("kv_proj", "gate_proj", "position_bias", "kv_norm", "rotary_emb")
"""The attributes of a compressor of DeepSeek-V4, beside its rate."""
LATER = "its cache has tokens of earlier calls: a block leads back to tokens in a pass that begins with the first token"


@dataclass(slots=True, eq=False)
class CompressorCall(ObservedCall, Rebuilding):
    module: Any
    shares: Tensor
    """(B, D, n, L)."""
    value: Tensor
    """(B, T, D) or, for two series of overlapping blocks, (B, T, 2 D)."""
    output: Tensor
    """(B, 1, n, D)."""
    how: str = ""
    kind: str = "compression"
    has_scores: ClassVar[bool] = False

    def source(self, shares: Tensor) -> Compression:
        names = Dimensions.of_call(1, has_heads=True)
        return Compression(shares, self.module.compress_rate, self.value.shape[1], tuple(self.shares.shape[:2]), names)

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        shares = self.shares if policy.graph else self.shares.detach()
        rebuilding = "the rotation of its blocks is not known" if self.rotation() is None else self
        return Observation(None, rebuilding=rebuilding, stored=self.source(shares.flatten(0, 1)))

    def query_key_value(self) -> CallVectors:
        return CallVectors(None, None, self.value)

    def rotation(self) -> Any:
        return getattr(sys.modules[type(self.module).__module__], "apply_rotary_pos_emb", None)

    def whole(self) -> Rebuilt:
        module, output, shares = self.module, self.output.detach(), self.shares.detach()
        value = _windows(self.value.detach(), shares.shape[1], output.shape[2], module.compress_rate, 0.0)
        normed = module.kv_norm.forward((value * shares.permute(0, 2, 3, 1)).sum(2))
        places = torch.arange(output.shape[2], device=output.device)[None] * module.compress_rate
        cos, sin = module.rotary_emb.forward(normed, position_ids=places, layer_type=module.rope_layer_type)
        return Rebuilt(self.rotation()(normed[:, None], cos, sin), output, output)


def _windows(x: Tensor, width: int, blocks: int, rate: int, fill: float) -> Tensor:
    """The vectors that each block is made of, (B, n, L, D). Of two series (B, T, 2 D), the second is that of a block's
    own tokens, and the first that of the tokens of the block before it."""
    *before, own = x[:, : blocks * rate].unflatten(1, (blocks, rate)).unflatten(-1, (-1, width)).unbind(-2)
    return torch.cat([*(nn.functional.pad(one[:, :-1], (0, 0, 0, 0, 1, 0), value=fill) for one in before), own], 2)


def observe_compressor(
    thread: ThreadState, frame: RunningModule, module: Any, args: Args, kwargs: Kwargs, output: Any
) -> None:
    if not all(hasattr(module, name) for name in COMPRESSOR):
        return
    frame.pending.clear()  # (The softmax over the tokens of each block.)
    if not (isinstance(output, tuple) and isinstance(output[0], Tensor) and output[0].dim() == 4):
        return  # (an indexer, whose own blocks are compared alone)
    keys, blocks = output[0], output[0].shape[2]
    if not blocks:
        return
    own = Stream("blocks", module)
    thread.streams.carry(keys, own)
    given = signature(module.forward).bind(*args, **kwargs).arguments
    x, cache = given["hidden_states"], cache_in(given)
    rate, length = module.compress_rate, x.shape[1]
    if cache is not None:
        held = cache.layers[given["layer_idx"]].buffer_kv["compressor"]
        length = blocks * rate + (0 if held is None else held.shape[1])
    if length != x.shape[1]:
        thread.unread(LATER, module)
        return
    with DisableTorchFunction():
        value, gate = module.kv_proj.forward(x), module.gate_proj.forward(x)[:, : blocks * rate]
        gate = _windows(gate + module.position_bias.repeat(blocks, 1), keys.shape[-1], blocks, rate, -torch.inf)
        shares = gate.softmax(2, dtype=torch.float32).permute(0, 3, 1, 2)
    call = CompressorCall(module, shares, value, keys, f"blocks of {rate} tokens, where each channel is a head")
    stream = thread.streams.stream(x)
    call.origins = Origins(own, stream if isinstance(stream, Stream) else Stream("positions"))
    thread.give(call, module)
