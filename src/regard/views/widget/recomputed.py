"""Maps as they would be with another temperature or another mask: softmax(c q . k / temperature)."""

import math
from dataclasses import replace

from regard.call.masks.basic import Causal
from regard.call.normalizations import Softmax
from regard.call.scores.base import ScaledDot
from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import Factors
from regard.tensors.precision import widest_dtype

MASK_CHOICES = ("own", "none", "causal")
"""The reader's choice of mask: that of the call, none, or causal."""
COLDEST, HOTTEST = 0.05, 20.0


def can_be_recomputed(heads: AttentionMap) -> bool:
    """True if a map (H, T, S) is one softmax of scaled dot products without a bias.

    >>> import torch, regard
    >>> can_be_recomputed(regard.map_of(torch.eye(3), torch.eye(3)).with_heads())
    True
    """
    source = heads.source
    if not isinstance(source, CallSource):
        return False
    call = source.factors.form
    is_softmax = isinstance(call.normalization, Softmax) and call.bias is None
    return is_softmax and call.score.dot_scale(call.query.shape[-1]) is not None


def recomputed(heads: AttentionMap, temperature: float, mask: str) -> AttentionMap:
    r"""The map $\mathrm{softmax}(c \, q_i \cdot k_j / \tau)$ of the same queries and keys, deferred until it is read.

    Args:
        heads: a map (H, T, S) that can be recomputed.
        temperature: $\tau$, from 0.05 to 20; 1 is the call's own.
        mask: "own" for the mask of the call, "none", or "causal", with the last query at the last key.

    >>> import torch, regard
    >>> x = torch.eye(2) * 3
    >>> recomputed(regard.map_of(x, x).with_heads(), 2.0, "causal").dense()[0]
    tensor([[1.0000, 0.0000],
            [0.0398, 0.9602]], dtype=torch.float64)
    """
    source = heads.source
    if not can_be_recomputed(heads) or not isinstance(source, CallSource):
        raise ArgumentError(f"only a softmax of scaled dot products without a bias is computed anew; this is {source}")
    is_number = isinstance(temperature, int | float) and math.isfinite(temperature)
    if not (is_number and COLDEST <= temperature <= HOTTEST) or mask not in MASK_CHOICES:
        raise ArgumentError(
            f"the temperature must be from {COLDEST} to {HOTTEST} and the mask one of {', '.join(MASK_CHOICES)}; got "
            f"{temperature!r} and {mask!r}"
        )
    call = source.call
    scale = call.score.dot_scale(call.query.shape[-1])
    assert scale is not None
    chosen = {"own": call.mask, "none": None, "causal": Causal().bind(call.sizes, call.query.device)}[mask]
    # In float64: scores of a low temperature are large, and float32 keeps few digits of their sum of exponentials.
    wide = widest_dtype(call.query.device)
    changed = replace(
        call, query=call.query.to(wide), key=call.key.to(wide), score=ScaledDot(scale / temperature), mask=chosen
    )
    return AttentionMap(CallSource(Factors.given(changed, None), source.shape, names=source.dimensions))
