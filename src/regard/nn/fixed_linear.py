"""A linear layer whose weights no longer change."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, Literal, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import TorchVersionError
from regard.nn.product_choice import ROWS, product_kind, rows_counted_as
from regard.storage.choices import choices

Activation = Literal["none", "relu"]


class FixedLinear:
    r"""$a(x W^\top + b)$ for inference: without gradients, and with weights that are laid out once for the processor.

    On the CPU there are several ways: oneDNN with weights in its own order, and torch's default library (MKL on x86)
    with the weights as they are, or transposed. Which is fastest depends on the processor, the sizes and the number of
    rows; `regard.nn.product_choice` measures it. For other types and devices this is `F.linear`.

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
        self._products = _chosen(weight, bias, activation)

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
        product = self._products[rows_counted_as(x.shape[0])]  # (len(x) takes a microsecond.)
        if plus is not None:
            return product.added(x, plus) if plus.dtype == self.dtype else plus + product(x)
        y = product(x)
        return y if dtype is None or dtype == self.dtype else y.to(dtype)


class _Product(ABC):
    """One way to compute the layer."""

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """The layer."""

    @abstractmethod
    def added(self, x: Tensor, plus: Tensor) -> Tensor:
        """The layer, and something that is added to it."""


class _Plain(_Product):
    """The product computed by `F.linear`."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        self._weight, self._bias, self._activation = weight, bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        y = nn.functional.linear(x, self._weight, self._bias)
        return y.relu_() if self._activation == "relu" else y

    def added(self, x: Tensor, plus: Tensor) -> Tensor:
        return self(x).add_(plus)


class _Transposed(_Product):
    """The product with a copy of the weights (in, out)."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        self._weight, self._bias, self._activation = weight.mT.contiguous(), bias, activation

    def __call__(self, x: Tensor) -> Tensor:
        y = x @ self._weight if self._bias is None else torch.addmm(self._bias, x, self._weight)
        return y.relu_() if self._activation == "relu" else y

    def added(self, x: Tensor, plus: Tensor) -> Tensor:
        if self._bias is None and self._activation == "none":
            return torch.addmm(plus, x, self._weight)
        return self(x).add_(plus)


class _LaidOut(_Product):
    """The product computed by oneDNN, with weights in its own order."""

    def __init__(self, weight: Tensor, bias: Tensor | None, activation: Activation) -> None:
        # torch.compile calls this for a linear layer with frozen weights. torch gives it no public name.
        from regard.torch_private import linear_pointwise, reorder_linear_weight

        self._plain, self._adding = linear_pointwise.default, linear_pointwise.binary
        self._weight, self._bias = reorder_linear_weight(weight), bias
        self._activation = activation

    def __call__(self, x: Tensor) -> Tensor:
        return cast(Tensor, self._plain(x, self._weight, self._bias, self._activation, [], ""))

    def added(self, x: Tensor, plus: Tensor) -> Tensor:
        if self._activation != "none":
            return self(x).add_(plus)
        return cast(Tensor, self._adding(x, plus, self._weight, self._bias, "add"))


def _laid_out(weight: Tensor, bias: Tensor | None, activation: Activation) -> _LaidOut | None:
    """The product of oneDNN, if this torch, processor and type have it; else None."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    try:
        product, row = _LaidOut(weight, bias, activation), weight.new_zeros(1, weight.shape[1])
        product.added(row, product(row))
    except (AttributeError, RuntimeError, NotImplementedError, TorchVersionError):
        # There is no public question whether oneDNN is built in and takes this type: one row is tried instead.
        return None
    return product


def _chosen(weight: Tensor, bias: Tensor | None, activation: Activation) -> dict[int, _Product]:
    """The product for each number of rows in ROWS; weights stay laid out for those ways alone that are taken."""
    if weight.device.type != "cpu" or weight.dtype not in (torch.float32, torch.bfloat16):
        return {rows: _Plain(weight, bias, activation) for rows in ROWS}
    made: dict[str, _Product | None] = {}

    def maker(name: str, make: Callable[[Tensor, Tensor | None, Activation], _Product | None]) -> Any:
        def once() -> _Product | None:
            if name not in made:
                made[name] = make(weight, bias, activation)
            return made[name]

        return once

    ways = {name: maker(name, make) for name, make in WAYS.items()}
    chosen: dict[int, _Product] = {}
    with torch.no_grad():
        for rows in ROWS:
            best = choices().fastest(product_kind(weight, rows), ways, weight.new_ones(rows, weight.shape[1]))
            # What was measured with another build of torch may not be there.
            chosen[rows] = ways[best]() or _Plain(weight, bias, activation)
    return chosen


def _of_onednn(weight: Tensor, bias: Tensor | None, activation: Activation) -> _Product | None:
    return _laid_out(weight, bias, activation)


WAYS: dict[str, Callable[[Tensor, Tensor | None, Activation], _Product | None]] = {
    "oneDNN packed": _of_onednn,
    "plain": _Plain,
    "transposed": _Transposed,
}
"""The ways to compute a product. The first that there is is taken where nothing was measured."""
