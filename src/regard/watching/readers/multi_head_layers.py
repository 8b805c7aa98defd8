"""The parts of a layer of multi-head attention, from torch's function or from its module."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import Tensor, nn


class Layer(NamedTuple):
    """The parts of a layer of multi-head attention."""

    num_heads: int
    weights: tuple[Tensor | None, ...]
    is_packed: bool
    """True if all three are one tensor, with the weights of query, key and value as its thirds."""
    biases: Tensor | None
    """The biases of query, key and value as thirds of one tensor."""
    rows: tuple[Tensor | None, ...]
    """Learned rows (1, 1, E) appended to query, key and value; None for the query."""
    has_zero_row: bool
    """True if keys and values end with a row of zeros."""
    out: tuple[Tensor, Tensor | None]
    dropout: float
    """0 in evaluation mode."""
    static: tuple[Tensor | None, ...] = (None, None, None)
    """Keys and values (N * H, S, D) in place of projected ones."""


def layer_of_call(given: Mapping[str, Any]) -> Layer:
    """The parts of the layer in F.multi_head_attention_forward; `given` has its arguments by name."""
    is_packed = not given["use_separate_proj_weight"]
    names = ("in_proj_weight",) * 3 if is_packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return Layer(
        num_heads=given["num_heads"],
        weights=tuple(given[name] for name in names),
        is_packed=is_packed,
        biases=given["in_proj_bias"],
        rows=(None, given["bias_k"], given["bias_v"]),
        has_zero_row=given["add_zero_attn"],
        out=(given["out_proj_weight"], given["out_proj_bias"]),
        dropout=given["dropout_p"] if given["training"] else 0.0,
        static=(None, given["static_k"], given["static_v"]),
    )


def layer_of_module(module: nn.MultiheadAttention) -> Layer:
    """The parts of nn.MultiheadAttention as they are now."""
    is_packed = module.in_proj_weight is not None
    names = ("in_proj_weight",) * 3 if is_packed else ("q_proj_weight", "k_proj_weight", "v_proj_weight")
    return Layer(
        num_heads=module.num_heads,
        weights=tuple(getattr(module, name) for name in names),
        is_packed=is_packed,
        biases=module.in_proj_bias,
        rows=(None, module.bias_k, module.bias_v),
        has_zero_row=module.add_zero_attn,
        out=(module.out_proj.weight, module.out_proj.bias),
        dropout=module.dropout if module.training else 0.0,
    )
