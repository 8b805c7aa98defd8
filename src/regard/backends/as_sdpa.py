"""A call as F.scaled_dot_product_attention, where it is one as it stands: what compiled and exported graphs hold."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.backends.base import Call
from regard.mechanisms.biases.base import DenseBias
from regard.mechanisms.masks.base import And, Mask
from regard.mechanisms.masks.basic import Causal
from regard.mechanisms.normalizations import Softmax


def as_sdpa(call: Call, value: Tensor) -> Tensor | None:
    """The output (B, H, T, E) in one call of torch's own function, or None where that would not be the same call.

    It is the same for dot products under softmax, without dropout, with causality from the start or with what looks
    at keys alone (lengths, padding, one bias per key), not both. The kernel is the one of `fused`, and so are the bits.
    """
    scale = call.score.dot_scale(call.query.shape[-1])
    if scale is None or type(call.normalization) is not Softmax or call.dropout > 0:
        return None
    factors = () if call.mask is None else tuple(m for m in call.mask.factors() if not _excludes_nothing(m, call))
    is_causal = any(_is_causal_from_the_start(m) for m in factors)
    others = tuple(m for m in factors if not _is_causal_from_the_start(m))
    if any("query" in m.depends_on() for m in others) or (is_causal and (others or call.bias is not None)):
        return None
    additive = None
    if others:
        additive = call.allowed(And(others), range(1), range(call.sizes.keys))
    if call.bias is not None:
        bias = _per_key(call)
        if bias is None:
            return None
        additive = bias if additive is None else bias.masked_fill(~additive, -torch.inf)
    dtype, width = value.dtype, value.shape[-1]
    query, key, value = _one_width(call.query, call.key, value.to(call.query.dtype))
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=additive, is_causal=is_causal, scale=scale, enable_gqa=call.group > 1
    )
    return output[..., :width].to(dtype)


def _is_causal_from_the_start(mask: Mask) -> bool:
    return isinstance(mask, Causal) and isinstance(mask.offset, int | torch.SymInt) and mask.offset == 0


def _excludes_nothing(mask: Mask, call: Call) -> bool:
    if not isinstance(mask, Causal) or not isinstance(mask.offset, int | torch.SymInt):
        return False
    return bool(mask.offset >= call.sizes.keys - 1)


def _per_key(call: Call) -> Tensor | None:
    """A bias (B or 1, H or 1, 1, S) that takes no gradient, for which torch's kernels have none."""
    bias = call.bias
    if not isinstance(bias, DenseBias) or bias.tensor.requires_grad or bias.tensor.shape[-2] != 1:
        return None
    return bias.tensor.to(call.query.dtype).expand(*bias.tensor.shape[:-1], call.sizes.keys)


def _one_width(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Padded with zeros to one width, without which torch's function makes the weights in full."""
    width = max(t.shape[-1] for t in tensors)
    return tuple(t if t.shape[-1] == width else torch.nn.functional.pad(t, (0, width - t.shape[-1])) for t in tensors)
