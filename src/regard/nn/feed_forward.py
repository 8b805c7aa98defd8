"""The position-wise feed-forward network of a Transformer layer."""

from collections.abc import Callable
from typing import cast

from jaxtyping import Float
from torch import Tensor, nn

from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_dropout, require_sizes


@refuse_wrong_kinds
class FeedForward(nn.Module):
    r"""$W_2\, \mathrm{drop}(a(W_1 x + b_1)) + b_2$ with an activation a.

    Args:
        dim: width of input and output; the paper's d_model.
        hidden_dim: the hidden units; the paper's d_ff.
        activation: a.
        dropout: the probability that a hidden unit is dropped in training.
        bias: whether the two layers have b_1 and b_2.

    Raises:
        ArgumentError: a size is below 1.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 2 (a = ReLU).

    >>> import torch
    >>> FeedForward(4, 16, activation=nn.functional.gelu)(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor] = nn.functional.relu,
        dropout: float = 0.0,
        bias: bool = True,
    ) -> None:
        super().__init__()
        require_sizes(dim=dim, hidden_dim=hidden_dim)
        require_dropout(dropout=dropout)
        self.up = nn.Linear(dim, hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform for the matrices; biases as `torch.nn.Linear` begins."""
        for layer in (self.up, self.down):
            layer.reset_parameters()
            nn.init.xavier_uniform_(layer.weight)

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        return cast(Tensor, self.down(self.dropout(self.activation(self.up(x)))))


@refuse_wrong_kinds
class GatedFeedForward(nn.Module):
    r"""$W_2\, \mathrm{drop}(a(W_g x) \odot W_1 x)$; SwiGLU with a = SiLU. By default it has no biases.

    Arguments and errors are those of `FeedForward`. For the same number of parameters, hidden_dim is 2/3 of that of
    `FeedForward`.

    Source: Shazeer 2020 (arXiv:2002.05202), equation 6.

    >>> import torch
    >>> GatedFeedForward(4, 16)(torch.ones(2, 4)).shape
    torch.Size([2, 4])
    """

    def __init__(
        self,
        dim: int,
        hidden_dim: int,
        *,
        activation: Callable[[Tensor], Tensor] = nn.functional.silu,
        dropout: float = 0.0,
        bias: bool = False,
    ) -> None:
        super().__init__()
        require_sizes(dim=dim, hidden_dim=hidden_dim)
        require_dropout(dropout=dropout)
        self.gate_and_up = nn.Linear(dim, 2 * hidden_dim, bias=bias)
        self.down = nn.Linear(hidden_dim, dim, bias=bias)
        self.activation = activation
        self.dropout = nn.Dropout(dropout)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform for each matrix; biases as `torch.nn.Linear` begins."""
        for layer in (self.gate_and_up, self.down):
            layer.reset_parameters()
        for weight in (*self.gate_and_up.weight.chunk(2), self.down.weight):
            nn.init.xavier_uniform_(weight.detach())

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        return self.down(self.dropout(self.activation(gate) * up))
