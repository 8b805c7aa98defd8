"""Kinds of modules: those torch may run fused, those that it ran so, and those without attention."""

import sys
from collections.abc import Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from regard.tensors.guards import is_autocasting, is_overridden, is_recorded
from regard.tensors.torch_private import has_pre_hooks


def forward_of(module: nn.Module) -> object:
    """The function a module's class runs as `forward`; None for a TorchScript module, whose class has none."""
    return getattr(type(module), "forward", None)


def _calls_super(function: object) -> bool:
    code = getattr(function, "__code__", None)
    return code is not None and "__class__" in code.co_freevars


FUSED_LAYERS = (nn.MultiheadAttention, nn.TransformerEncoderLayer, nn.TransformerEncoder)

FUSED_FORWARDS = frozenset(kind.forward for kind in FUSED_LAYERS)
"""Their forward functions: a subclass with a forward of its own differs from its base."""

FUSED_SUBCLASS = (
    "torch may have run it fused, and its own forward says nothing of queries and keys: watch it with gradients on, "
    "or in train() mode, where it is not fused"
)
"""The report's reason for subclasses of torch's layers that call the forward of their base."""


def may_run_fused(module: nn.Module) -> bool:
    """True if torch may run a module in one operator, which it does only without an active function mode."""
    forward = forward_of(module)
    if forward not in FUSED_FORWARDS and not _calls_super(forward):
        return False
    takes_gradients = is_recorded() and any(p.requires_grad for p in module.parameters())
    return not (module.training or takes_gradients)


PLAIN = frozenset({
    nn.Linear, nn.Embedding, nn.LayerNorm, nn.RMSNorm, nn.GroupNorm, nn.Dropout, nn.Identity, nn.Conv1d, nn.Conv2d,
    nn.GELU, nn.SiLU, nn.ReLU, nn.Tanh, nn.Sigmoid,
})  # fmt: skip
"""Frequent modules of torch without attention. They run without our mode, which costs microseconds per function."""


def has_no_attention(module: nn.Module) -> bool:
    return type(module) in PLAIN and not has_pre_hooks(module) and "forward" not in module.__dict__


def ran_fused(module: nn.MultiheadAttention, given: Mapping[str, Any]) -> bool:
    """True if the forward of a module, which no mode saw, ran in one operator; `given` are its arguments by name.

    There a mask counts and `is_causal` does not. Elsewhere the flag counts and the mask does not, unless the call
    returns weights or has a padding mask.

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
    """True if a mode, such as a watch, is all that keeps the calling `nn.MultiheadAttention` from its fused path. Its
    forward notes the first reason in a local variable; of the later ones gradients alone come with a mode."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not nn.MultiheadAttention.forward.__code__:
        frame = frame.f_back
    if frame is None or "has_torch_function" not in frame.f_locals.get("why_not_fast_path", ""):
        return False
    module = frame.f_locals["self"]
    return not _takes_gradients(frame.f_locals["query"], *module.parameters())


def _takes_gradients(*tensors: Tensor | None) -> bool:
    return is_recorded() and any(t is not None and t.requires_grad for t in tensors)
