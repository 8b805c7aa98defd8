"""The log-sum-exp that torch's fused kernels compute and F.scaled_dot_product_attention throws away."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.torch_private import Missing, TorchDispatchMode, operator

aten = torch.ops.aten

LSE_OF: dict[str, Callable[[Tensor, int], Tensor]] = {
    "_scaled_dot_product_flash_attention_for_cpu": lambda lse, queries: lse,
    "_scaled_dot_product_flash_attention": lambda lse, queries: lse,
    "_scaled_dot_product_efficient_attention": lambda lse, queries: lse[..., :queries],
    "_scaled_dot_product_cudnn_attention": lambda lse, queries: lse.flatten(2)[..., :queries],
    "_scaled_dot_product_fused_attention_overrideable": lambda lse, queries: lse,
}
KERNELS = {found.default: lse_of for name, lse_of in LSE_OF.items() if not isinstance(found := operator(name), Missing)}
"""For each operator that this torch has, how its second result becomes (B, H, T).

The efficient kernel pads the result to a multiple of 32 rows, and may leave it empty if no gradient is wanted; the
result of cudnn's kernel has one dimension more.
"""


class KernelLse(TorchDispatchMode):
    """Placed around one call of F.scaled_dot_product_attention, it records the operator that ran, its inputs and lse.

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
            # Under inference_mode the call arrives whole; decomposed here, it shows its kernel too.
            with self:
                return func.decompose(*args, **(kwargs or {}))
        result = func(*args, **(kwargs or {}))
        if func in KERNELS:
            self.operator = str(func).removesuffix(".default")
            self.query, self.key = args[0], args[1]
            self.lse = KERNELS[func](result[1], args[0].shape[-2])
        return result
