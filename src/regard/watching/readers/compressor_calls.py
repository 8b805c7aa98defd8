"""Observe compressors, which make one key of a block of tokens, by the attributes of their modules."""

import sys
from dataclasses import dataclass
from inspect import signature
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from regard.call.shapes import Dimensions
from regard.maps.sources.compression import Compression
from regard.tensors.torch_private import DisableTorchFunction
from regard.watching.kept.arguments import cache_in
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.origins.streams import Origins, Stream
from regard.watching.readers.functions import Args, Kwargs
from regard.watching.running.observed_call import CallVectors, Observation, ObservedCall
from regard.watching.running.thread_state import RunningModule, ThreadState

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
    """Hand a compressor that has returned to the thread's watches, and follow its blocks into keys."""
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
