"""A linear layer whose weights no longer change."""

from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

Activation = Literal["none", "relu"]


class FixedLinear:
    r"""$a(x W^\top + b)$ for inference: without gradients, and with weights that are laid out once for the processor.

    On the CPU oneDNN computes the product, with weights in its own order. `F.linear` takes the weights in their given
    order, and computes float32 by another library, whose best kernels are for the processors of one maker. If oneDNN is
    not available, or for other types and devices, this is `F.linear`.

    Args:
        weight: W.
        bias: b.
        dtype: of the weights, the product and the result; float32 and bfloat16 are laid out. None means that of W.
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
        weight = weight.detach().to(self.dtype, copy=True).contiguous()
        bias = None if bias is None else bias.detach().to(self.dtype, copy=True).contiguous()
        self._product = _laid_out(weight, bias, activation) or _Plain(weight, bias, activation)

    def __call__(
        self, x: Float[Tensor, "N in"], *, plus: Float[Tensor, "N out"] | None = None, dtype: torch.dtype | None = None
    ) -> Float[Tensor, "N out"]:
        """Apply the layer to each row.

        Args:
            x: the rows, which are rounded to the layer's dtype.
            plus: is added to the result, which then has the dtype of `plus`.
            dtype: of the result without `plus`; None means that of the layer.
        """
        x = x if x.dtype == self.dtype else x.to(self.dtype)
        if plus is not None:
            return self._product.added(x, plus) if plus.dtype == self.dtype else plus + self._product(x)
        y = self._product(x)
        return y if dtype is None or dtype == self.dtype else y.to(dtype)


class _Plain:
    """The product computed by `F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self._weight, self._bias)
        return y.relu_() if self._activation == "relu" else y

    def added(self, x: Tensor, plus: Tensor) -> Tensor:
        return plus + self(x)


class _LaidOut:
    """The product computed by oneDNN, with weights in its own order."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        # torch.compile calls this for a linear layer with frozen weights. torch gives it no public name.
        product: Any = torch.ops.mkldnn._linear_pointwise
        self._plain, self._adding = product.default, product.binary
        self._weight, self._bias = torch.ops.mkldnn._reorder_linear_weight(weight), bias
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._plain(x, self._weight, self._bias, self._activation, [], ""))

    def added(self, x: Tensor, plus: Tensor) -> Tensor:
        if self._activation != "none":
            return plus + self(x)
        return cast(Tensor, self._adding(x, plus, self._weight, self._bias, "add"))


def _laid_out(weight: Tensor, bias: Tensor | None, activation: Activation) -> _LaidOut | None:
    """The product of oneDNN, if this torch, processor and type have it; else None."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        product, row = _LaidOut(weight, bias, activation), weight.new_zeros(1, weight.shape[1])
        product.added(row, product(row))
    except (AttributeError, RuntimeError, NotImplementedError):
        return None
    return product
