"""`regard.attention` with the signature that transformers' models use."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.basic import as_mask, causal
from regard.call.normalizations import Softmax, SoftmaxWithSink
from regard.call.scores.base import ScaledDot, Score, SoftCapped
from regard.call.shapes import as_autocast
from regard.errors import ArgumentError
from regard.functional import attention
from regard.huggingface.masks import LazyMask
from regard.maps.attention_map import AttentionMap
from regard.tensors.fresh import copied, may_be_overwritten


def forward(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    position_bias: Tensor | None = None,
    cache: object | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    head_mask: Tensor | None = None,
    **others: Any,
) -> tuple[Tensor, AttentionMap]:
    """`regard.attention` with the arguments of transformers' models: query (B, H, T, D), key (B, G, S, D) and value (B,
    G, S, E) to the output (B, T, H, E) and the map.

    Args:
        module: the attention layer; `is_causal` replaces its own value.
        attention_mask: a `LazyMask`, a bool tensor (True = keep) or an additive mask, each (B or 1, H or 1, T or 1, S).
            Without one, `is_causal` decides; a causal mask then starts at the first key.
        position_bias: is added to the scores (T5).
        softcap: c of c tanh(s / c) (Gemma 2).
        s_aux: a sink for each head (GPT-OSS).
        indices: an indexer's keys for each query, (B, T, k): all others are masked (DeepSeek 3.2).
        others: arguments without influence on the result.

    Raises:
        ArgumentError: a paged cache, blocks of keys that an indexer has chosen, or a `head_mask` are given.
    """
    if others.get("block_indices") is not None:
        raise ArgumentError(
            "this attention sees the blocks of keys that an indexer has chosen, which regard does not run: disable() "
            "first, and read its maps by regard.watch"
        )
    if cache is not None:
        raise ArgumentError("attention over a paged cache (continuous batching) is not run by regard: disable() first")
    if head_mask is not None:
        # transformers' sdpa warns once and leaves it out.
        raise ArgumentError(
            f"head_mask is not run by regard, got one of shape {tuple(head_mask.shape)}: "
            "regard.edits.ScaleHeads scales heads, and attn_implementation='eager' takes the mask after disable()"
        )
    query, key, value = as_autocast(query, key, value)
    score: Score = ScaledDot(scaling)
    attended = attention(
        query,
        # A static cache is overwritten later, which would change the map.
        copied(key) if may_be_overwritten(key) and not key.requires_grad else key,
        value,
        score=score if softcap is None else SoftCapped(score, softcap),
        normalization=Softmax() if s_aux is None else SoftmaxWithSink(s_aux),
        mask=_chosen(_mask(module, attention_mask, is_causal, query.shape[2]), indices, key.shape[2]),
        bias=_bias(attention_mask, position_bias, key.shape[2]),
        dropout=dropout,
        return_weights=True,
    )
    return attended.output.transpose(1, 2).contiguous(), attended.weights


COMPUTED = frozenset(inspect.signature(forward).parameters) | {"kwargs", "sliding_window", "output_attentions"}
"""The supported arguments of transformers' attention functions. A window is also in the mask, and weights are always
returned."""


def forward_as_eager(*args: Any, **kwargs: Any) -> tuple[Tensor, AttentionMap]:
    """Attend like `forward`, and like eager attention see every key where no mask is given."""
    return forward(*args, **{**kwargs, "is_causal": False})


def dense(attend: Callable[..., tuple[Tensor, AttentionMap]]) -> Callable[..., tuple[Tensor, Tensor]]:
    """Attend like a function above, and return the weights as a tensor of the output's dtype, as eager does."""

    def attend_densely(*args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        output, weights = attend(*args, **kwargs)
        return output, weights.dense().to(output.dtype)

    return attend_densely


def _mask(module: nn.Module, given: Tensor | None, is_causal: bool | None, queries: int) -> Mask | Tensor | None:
    if isinstance(given, LazyMask):
        return given.allowed
    if given is not None:
        return given if given.dtype == torch.bool else None
    if is_causal is None:
        is_causal = getattr(module, "is_causal", True)
    return causal(0) if is_causal and queries > 1 else None


def _chosen(mask: Mask | Tensor | None, indices: Tensor | None, keys: int) -> Mask | Tensor | None:
    if indices is None:
        return mask
    among = torch.zeros(*indices.shape[:2], keys, dtype=torch.bool, device=indices.device)
    chosen, allowed = as_mask(among.scatter(-1, indices.long(), True)[:, None]), as_mask(mask)
    return chosen if chosen is None or allowed is None else allowed & chosen


def _bias(given: Tensor | None, position_bias: Tensor | None, keys: int) -> Tensor | None:
    masks = (None if isinstance(given, LazyMask) else given, position_bias)
    added = [t[..., :keys] for t in masks if t is not None and t.is_floating_point()]
    return None if not added else sum(added[1:], start=added[0])
