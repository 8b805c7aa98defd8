"""A linear layer whose weights no longer change."""

from collections.abc import Callable
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["none", "relu"]


class FixedLinear:
    r"""$a(x W^\top + b)$ for inference: no gradients, the weights laid out once for the processor.

    On the CPU the product is oneDNN's, which takes its weights in an order of its own; `F.linear` takes them as
    they are, in float32 through another library, which has its best kernels for one maker's processors. Where
    oneDNN is not, or for other types and devices, this is `F.linear`.

    Args:
        weight: W.
        bias: b.
        dtype: of the weights, the product and the answer; float32 and bfloat16 are laid out. W's own if None.
        activation: a, "none" or "relu".

    >>> weight, x = torch.randn(5, 3), torch.randn(7, 3)
    >>> torch.allclose(FixedLinear(weight)(x), x @ weight.T, atol=1e-5)
    True
    """

    def __init__(
        self,
        weight: Float[Tensor, "out in"],
        bias: Float[Tensor, " out"] | None = None,
        *,
        dtype: torch.dtype | None = None,
        activation: Activation = "none",
    ) -> None:
        self.dtype = weight.dtype if dtype is None else dtype
        self._weight = weight.detach().to(self.dtype, copy=True).contiguous()
        self._bias = None if bias is None else bias.detach().to(self.dtype, copy=True).contiguous()
        self._activation = activation
        self._product = _laid_out(self._weight, self._bias, activation)

    def __call__(self, x: Float[Tensor, "N in"]) -> Float[Tensor, "N out"]:
        """The layer of each row, in the layer's dtype."""
        x = x.to(self.dtype)
        # A single row is a product of a matrix and a vector, which waits for memory: the fewer steps the better.
        if self._product is not None and (len(x) > 1 or self.dtype != torch.float32):
            return self._product(x)
        y = nn.functional.linear(x, self._weight, self._bias)
        return y.relu_() if self._activation == "relu" else y


def _laid_out(weight: Tensor, bias: Tensor | None, activation: Activation) -> Callable[[Tensor], Tensor] | None:
    """OneDNN's product with weights in its own order, if this torch, processor and type have it."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        # What torch.compile makes of a linear layer whose weights are frozen; torch gives it no public name.
        product: Any = torch.ops.mkldnn._linear_pointwise.default
        own_order = torch.ops.mkldnn._reorder_linear_weight(weight)
        product(weight.new_zeros(2, weight.shape[1]), own_order, bias, activation, [], "")
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return lambda x: product(x, own_order, bias, activation, [], "")
