"""The mask by which torch decides, where the tensor that was handed over is another thing."""

from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.tensors.guards import PLAIN, offset_and_shape


def decided(given: dict[str, Any]) -> dict[str, Any]:
    """The arguments with the mask that torch takes: a `CausalBias` is its variant, and its memory is never written."""
    mask = given["attn_mask"]
    if mask is None or type(mask) in PLAIN:
        return given
    if (causal := offset_and_shape(mask)) is None:
        return {**given, "attn_mask": of_memory(mask)}
    offset, shape = causal
    if not offset:
        return {**given, "attn_mask": None, "is_causal": True}
    return {**given, "attn_mask": torch.ones(shape, dtype=torch.bool, device=given["query"].device).tril(offset)}


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
