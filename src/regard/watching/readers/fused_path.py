"""Whether torch runs a call of nn.MultiheadAttention in one operator: there a mask counts and `is_causal` does not.

Elsewhere the flag counts and the mask does not, unless the call returns weights or has a padding mask.
"""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.tensors.guards import is_autocasting, is_overridden, is_recorded


def ran_fused(module: nn.MultiheadAttention, given: Mapping[str, Any]) -> bool:
    """True if the forward of a module, which no mode saw, ran in one operator; `given` are its arguments by name.

    The conditions are those of torch 2.13, nn/modules/activation.py.
    """
    query, key, value = given["query"], given["key"], given["value"]
    masks = (given["attn_mask"], given["key_padding_mask"])
    weights = (module.in_proj_weight, module.in_proj_bias, module.out_proj.weight, module.out_proj.bias)
    plain = query.dim() == 3 and query is key and key is value and module.batch_first and not module.training
    packed = module.in_proj_weight is not None and module.in_proj_bias is not None
    extended = module.bias_k is not None or module.bias_v is not None or module.add_zero_attn
    fits = packed and not extended and module.num_heads % 2 == 0 and query.dtype == module.in_proj_weight.dtype
    if not (torch.backends.mha.get_fastpath_enabled() and plain and fits) or is_autocasting(query.device.type):
        return False
    if any(mask is not None and mask.is_floating_point() for mask in masks):
        return False
    return not is_overridden(query, *weights) and not _takes_gradients(query, *weights)


def would_run_fused() -> bool:
    """True if the running call of nn.MultiheadAttention would be one operator, were our mode not there.

    The module's forward notes why it does not run fused. A mode is the last reason that it notes but gradients.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.MultiheadAttention.forward.__code__:
        frame = frame.f_back
    if frame is None or "has_torch_function" not in frame.f_locals.get("why_not_fast_path", ""):
        return False
    module = frame.f_locals["self"]
    return not _takes_gradients(frame.f_locals["query"], *module.parameters())


def _takes_gradients(*tensors: Tensor | None) -> bool:
    return is_recorded() and any(t is not None and t.requires_grad for t in tensors)
