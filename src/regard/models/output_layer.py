"""The layer of the logits, with a cap on them or without."""

import torch
from jaxtyping import Float
from torch import Tensor, nn


class CappedLinear(nn.Linear):
    r"""$c \tanh((W x + b) / c)$.

    Source: Gemma Team 2024 (arXiv:2408.00118), section 2, "logit soft-capping".
    """

    def __init__(self, dim: int, size: int, *, bias: bool, cap: float) -> None:
        super().__init__(dim, size, bias=bias)
        self.cap = cap

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch V"]:
        return self.cap * torch.tanh(super().forward(x) / self.cap)


def output_layer(dim: int, vocab_size: int, *, bias: bool, cap: float | None) -> nn.Linear:
    """The layer from the last vector of a token to the logits."""
    if cap is None:
        return nn.Linear(dim, vocab_size, bias=bias)
    return CappedLinear(dim, vocab_size, bias=bias, cap=cap)
