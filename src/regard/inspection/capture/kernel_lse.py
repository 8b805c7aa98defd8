"""The log-sum-exp that torch's fused kernels compute and F.scaled_dot_product_attention throws away."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

aten = torch.ops.aten

# Each operator, and how its second result becomes (B, H, T). The efficient kernel pads it to a multiple of 32
# rows, and may leave it empty where no gradient is wanted; cudnn's has one dimension more.
KERNELS: dict[object, Callable[[Tensor, int], Tensor]] = {
    aten._scaled_dot_product_flash_attention_for_cpu.default: lambda lse, queries: lse,
    aten._scaled_dot_product_flash_attention.default: lambda lse, queries: lse,
    aten._scaled_dot_product_efficient_attention.default: lambda lse, queries: lse[..., :queries],
    aten._scaled_dot_product_cudnn_attention.default: lambda lse, queries: lse.flatten(2)[..., :queries],
    aten._scaled_dot_product_fused_attention_overrideable.default: lambda lse, queries: lse,
}


class KernelLse(TorchDispatchMode):
    """Around one call of F.scaled_dot_product_attention: which operator ran, on what, and its lse.

    >>> with KernelLse() as kernel:
    ...     output = torch.nn.functional.scaled_dot_product_attention(*[torch.ones(1, 1, 2, 4)] * 3)
    >>> kernel.lse
    tensor([[[2.6931, 2.6931]]])
    """

    def __init__(self) -> None:
        super().__init__()
        self.operator: str | None = None
        self.lse: Tensor | None = None
        self.query: Tensor | None = None
        self.key: Tensor | None = None

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is aten.scaled_dot_product_attention.default:
            # Under inference_mode the call arrives whole; taken apart here, its kernel is seen as well.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in KERNELS:
            self.operator = str(func).removesuffix(".default")
            self.query, self.key = args[0], args[1]
            self.lse = KERNELS[func](result[1], args[0].shape[-2])
        return result
