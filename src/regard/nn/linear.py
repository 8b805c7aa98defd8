"""Linear layers. On a CPU products of bf16 autocast have few sizes."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.mechanisms.guards import has_values, may_have_own_gradient
from regard.nn.half_linear import half_linear

WORTH_IT = 1 << 23
"""The number of multiplications below which a product is left to torch."""


class Linear(nn.Linear):
    r"""$x W^\top + b$: a `torch.nn.Linear` that calls `linear`.

    >>> Linear(4, 2)(torch.ones(3, 4)).shape
    torch.Size([3, 2])
    """

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch E"]:
        """Apply the layer; x may have any batch dimensions."""
        return linear(x, self.weight, self.bias)


def linear(
    x: Float[Tensor, "*batch D"], weight: Float[Tensor, "E D"], bias: Float[Tensor, " E"] | None = None
) -> Float[Tensor, "*batch E"]:
    r"""$x W^\top + b$, as `torch.nn.functional.linear`, in the same precision.

    Under bfloat16 autocast on a CPU rows of zeros bring products to few different sizes (`regard.nn.half_linear`).

    >>> x, weight = torch.randn(5, 4), torch.randn(2, 4)
    >>> torch.allclose(linear(x, weight), x @ weight.T)
    True
    """
    if _has_few_sizes(x, weight):
        return half_linear(x, weight, bias)
    return nn.functional.linear(x, weight, bias)


def _has_few_sizes(x: Tensor, weight: Tensor) -> bool:
    return (
        torch.is_autocast_enabled("cpu")
        and _is_large_and_plain(x, weight)
        and torch.get_autocast_dtype("cpu") == torch.bfloat16
        and {x.dtype, weight.dtype} <= {torch.float32, torch.bfloat16}
        and weight.ndim == 2
        # Weights of another type may have a product of their own, and a recorded graph would keep the number of rows.
        and {type(x), type(weight)} <= {Tensor, nn.Parameter}
        and has_values(x)
    )


def _is_large_and_plain(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is worth a choice, and no graph or transform of torch would lose its gradient by one."""
    return may_have_own_gradient(x) and is_large(x, weight)


def is_large(x: Tensor, weight: Tensor) -> bool:
    """Whether a product is worth a choice."""
    return bool(x.numel() * weight.shape[0] >= WORTH_IT)
