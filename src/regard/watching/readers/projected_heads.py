"""The projected queries, keys and values inside F.multi_head_attention_forward, as its kernel gets them.

The function projects its inputs and then calls F.scaled_dot_product_attention, or two products around a softmax if it
returns weights. Its body runs here under a mode of its own that sees these calls, so nothing is computed twice and the
map holds no weights of the layer, which an optimizer may change.
"""

from dataclasses import dataclass
from types import FunctionType
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from regard.tensors.guards import is_function_observed, is_overridden
from regard.watching.readers.functions import Args, Func, Kwargs
from regard.watching.readers.kernel_lse import KernelLse, run_with_lse, sdpa_arguments


@dataclass(frozen=True, slots=True, eq=False)
class ProjectedHeads:
    """The attention of one call, after the projections."""

    query: Tensor
    """(N, H, T, D)."""
    key: Tensor
    """(N, H, S, D)."""
    value: Tensor
    """(N, H, S, D)."""
    scale: float | None
    """Multiplies the dot products; None for 1 / sqrt(D)."""
    is_causal: bool
    output: Tensor
    """(N, H, T, D), or with N and H as one dimension."""
    kernel: KernelLse


class _InnerCalls(TorchFunctionMode):
    """Keeps the arguments of the one attention inside a call."""

    def __init__(self, num_heads: int) -> None:
        super().__init__()
        self._num_heads = num_heads
        self._scores: tuple[Tensor, Tensor] | None = None
        self.heads: ProjectedHeads | None = None

    def __torch_function__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is F.scaled_dot_product_attention:
            output, kernel = run_with_lse(func, args, kwargs or {})
            given = sdpa_arguments(*args, **(kwargs or {}))
            query, key, value = (given[name] for name in ("query", "key", "value"))
            self.heads = ProjectedHeads(query, key, value, given["scale"], given["is_causal"], output, kernel)
            return output
        result = func(*args, **(kwargs or {}))
        if func is torch.baddbmm or (func is torch.bmm and self._scores is None):
            self._scores = args[-2], args[-1].mT
        elif func is torch.bmm and self._scores is not None:
            query, key, value = (t.unflatten(0, (-1, self._num_heads)) for t in (*self._scores, args[1]))
            self.heads = ProjectedHeads(query, key, value, 1.0, False, result, KernelLse())
        return result


def run_with_heads(func: Func, args: Args, kwargs: Kwargs, given: dict[str, Any]) -> tuple[Any, ProjectedHeads | None]:
    """Run F.multi_head_attention_forward, and return its projected heads too.

    The heads are None where other modes or tensor classes have a say in the call: these see the function itself.
    """
    tensors = [given[name] for name in ("query", "key", "value", "in_proj_weight", "in_proj_bias", "out_proj_weight")]
    if is_function_observed() or is_overridden(*tensors) or not isinstance(func, FunctionType):
        return func(*args, **kwargs), None
    # The function hands itself to modes first; its inner calls are wanted here, so this question is answered no.
    body = FunctionType(func.__code__, {**func.__globals__, "has_torch_function": _never}, closure=func.__closure__)
    body.__defaults__, body.__kwdefaults__ = func.__defaults__, func.__kwdefaults__
    with _InnerCalls(given["num_heads"]) as inner:
        output = body(*args, **kwargs)
    return output, inner.heads


def _never(tensors: object) -> bool:
    return False
