"""The mask by which torch decides, where the tensor that was handed over is another thing."""

import sys
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tensors.guards import PLAIN


def decided(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the mask that torch takes: a `CausalBias` is its variant, and its memory is never written."""
    mask, queries, keys = given["attn_mask"], given["query"], given["key"]
    if mask is None or type(mask) in PLAIN:
        return given
    # The module is not imported for this question: it imports torch's compiler.
    bias = sys.modules.get("torch.nn.attention.bias")
    if bias is None or not isinstance(mask, bias.CausalBias):
        return {**given, "attn_mask": of_memory(mask)}
    if mask.variant == bias.CausalVariant.UPPER_LEFT or mask.seq_len_q == mask.seq_len_kv:
        return {**given, "attn_mask": None, "is_causal": True}
    pairs = torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=queries.device)
    return {**given, "attn_mask": pairs.tril(keys.shape[-2] - queries.shape[-2])}


def of_memory(mask: Tensor) -> Tensor:
    """A mask as a plain tensor.

    Raises:
        ArgumentError: a subclass of Tensor decides what the mask means, so its memory may mean something else.
    """
    kind = type(mask)
    if kind in PLAIN:
        return mask
    plain: Any = Tensor
    is_dispatched = kind.__torch_dispatch__ is not plain.__torch_dispatch__
    if not is_dispatched and getattr(kind.__torch_function__, "__func__", None) is plain.__torch_function__.__func__:
        return mask.as_subclass(Tensor)
    raise ArgumentError(
        f"the mask is a {kind.__module__}.{kind.__qualname__}, and such a class may mean something else than its "
        "memory holds: expected a plain torch.Tensor, or a CausalBias of torch.nn.attention.bias"
    )
