"""A call as one F.scaled_dot_product_attention, where equivalent: the form in compiled and exported graphs."""

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from regard.call.masks.base import And
from regard.call.masks.basic import causal_offset
from regard.call.normalizations import Softmax
from regard.kernels.base import Call
from regard.kernels.fused_kernels import one_width, with_positive_scale
from regard.kernels.fused_plan import excluding_factors


def as_sdpa(call: Call, value: Tensor) -> Tensor | None:
    """The output (B, H, T, E) by torch's own function; None if it would compute something else.

    It is equivalent for dot products under softmax without dropout, if the call either is causal from the first key on
    or has only masks and biases by key (lengths, padding, one bias per key), but not both. torch runs the same kernel
    as the backend `fused`, so the bits are equal.
    """
    scale = call.score.dot_scale(call.query.shape[-1])
    if scale is None or type(call.normalization) is not Softmax or call.dropout > 0:
        return None
    factors = excluding_factors(call)
    others = tuple(m for m in factors if causal_offset(m) != 0)
    is_causal = len(others) < len(factors)
    if any("query" in m.depends_on() for m in others) or (is_causal and (others or call.bias is not None)):
        return None
    additive = None
    if others:
        # A range would fix the number of keys in an exported graph.
        keys = torch.arange(call.sizes.keys, device=call.query.device)
        additive = call.allowed(And(others), range(1), keys)
    if call.bias is not None:
        per_key = call.bias.per_key
        # torch's kernels give no gradient to a bias.
        if per_key is None or per_key.requires_grad:
            return None
        bias = per_key.to(call.query.dtype).expand(*per_key.shape[:-1], call.sizes.keys)
        additive = bias if additive is None else bias.masked_fill(~additive, -torch.inf)
    dtype, width = value.dtype, value.shape[-1]
    # For unequal widths, torch's function computes the weights in full.
    query, key, value = one_width(call.query, call.key, value.to(call.query.dtype))
    query, scale = with_positive_scale(query, scale)
    # A comparison of symbolic sizes is no bool, which torch's function takes; a branch on it is.
    grouped = {"enable_gqa": True} if call.group > 1 else {}
    output = scaled_dot_product_attention(
        query, key, value, attn_mask=additive, is_causal=is_causal, scale=scale, **grouped
    )
    return output[..., :width].to(dtype)
