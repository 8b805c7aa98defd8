"""F.scaled_dot_product_attention as it ran: the mask that decided, and the log-sum-exp that torch throws away."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention import SDPBackend

from regard.errors import ArgumentError
from regard.tensors.guards import PLAIN, is_autocasting, is_function_observed, offset_and_shape, run_state
from regard.tensors.torch_private import Missing, TorchDispatchMode, fused_choice, operator
from regard.watching.readers.functions import Args, Kwargs


def decided(given: dict[str, Any]) -> dict[str, Any]:
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


aten = torch.ops.aten

LSE_OF: dict[str, Callable[[Tensor, int], Tensor]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda lse, queries: lse,
    "_scaled_dot_product_flash_attention": lambda lse, queries: lse,
    "_scaled_dot_product_efficient_attention": lambda lse, queries: lse[..., :queries],
    "_scaled_dot_product_cudnn_attention": lambda lse, queries: lse.flatten(2)[..., :queries],
    "_scaled_dot_product_fused_attention_overrideable": lambda lse, queries: lse,
}
KERNELS = {found.default: lse_of for name, lse_of in LSE_OF.items() if not isinstance(found := operator(name), Missing)}
"""For each operator of this torch, the conversion of its second result to (B, H, T). The efficient kernel pads the
result to a multiple of 32 rows, and may leave it empty without gradients; the result of cuDNN's kernel has one more
dimension, and is None without gradients."""


class KernelLse:
    """One call of F.scaled_dot_product_attention as it ran: the operator, its inputs, and its lse."""

    __slots__ = ("key", "lse", "operator", "query")

    def __init__(self) -> None:
        self.operator: str | None = None
        self.lse: Tensor | None = None
        self.query: Tensor | None = None
        self.key: Tensor | None = None

    def ran(self, operator: Any, query: Tensor, key: Tensor, lse: Tensor | None) -> None:
        self.operator = _name_of(operator)
        self.query, self.key = query, key
        self.lse = None if lse is None else KERNELS[operator](lse, query.shape[-2])


@cache
def _name_of(operator: Any) -> str:
    return str(operator).removesuffix(".default")


def sdpa_arguments(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> dict[str, Any]:
    """The arguments of F.scaled_dot_product_attention by name; `inspect` finds no signature of that function."""
    return dict(locals())


def run_with_lse(
    func: Callable[..., Tensor], args: Args, kwargs: Kwargs
) -> tuple[Tensor, KernelLse]:  # fmt: skip
    kernel = KernelLse()
    if func is F.scaled_dot_product_attention and _runs_written_out(args, kwargs):
        return func(*args, **kwargs), kernel
    with _Recording(kernel):
        return func(*args, **kwargs), kernel


def _runs_written_out(args: Args, kwargs: Kwargs) -> bool:
    """True if torch will attend by products, as far as these tensors decide. No kernel has a log-sum-exp then, and
    torch's matmul takes another order under a dispatch mode."""
    try:
        arguments = decided(sdpa_arguments(*args, **kwargs))
        tensors = [arguments[name] for name in ("query", "key", "value", "attn_mask") if arguments[name] is not None]
        if any(type(one) not in PLAIN or one.is_nested for one in tensors) or is_function_observed():
            return False
        if not run_state(tensors[0]).runs_eagerly or is_autocasting(tensors[0].device.type):
            return False
        return fused_choice(**arguments) == SDPBackend.MATH.value
    except (ArgumentError, RuntimeError, TypeError):
        return False  # torch raises in its own words, and the reader of the mask in ours


class _Recording(TorchDispatchMode):
    def __init__(self, kernel: KernelLse) -> None:
        super().__init__()
        self._kernel = kernel

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """False: skipping imports torch._dynamo at the first call, two seconds of 1,000 modules, and none is traced."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Args = (), kwargs: Kwargs | None = None) -> Any:
        if func is aten.scaled_dot_product_attention.default:
            # Under inference_mode the call arrives whole; decomposed here, it shows its kernel too.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in KERNELS:
            self._kernel.ran(func, args[0], args[1], result[1])
        return result
