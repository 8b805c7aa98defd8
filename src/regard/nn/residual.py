"""A sublayer with its skip connection and its norm."""

from collections.abc import Callable
from typing import ClassVar

from torch import Tensor, nn

from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_dropout, require_sizes

Norm = Callable[[int], nn.Module]


class _OneNorm(nn.Module):
    needs_final_norm: ClassVar[bool]
    """Whether a stack of these needs one more norm after its last layer."""

    def __init__(self, dim: int, *, dropout: float = 0.0, norm: Norm = nn.LayerNorm) -> None:
        super().__init__()
        require_sizes(dim=dim)
        require_dropout(dropout=dropout)
        self.norm = norm(dim)
        self.dropout = nn.Dropout(dropout)


@refuse_wrong_kinds
class PreNorm(_OneNorm):
    r"""$x + \mathrm{drop}(f(\mathrm{norm}(x)))$.

    Source: Xiong et al. 2020 (arXiv:2002.04745), figure 1b. It needs one more norm after the last layer of the stack.

    >>> import torch
    >>> PreNorm(4)(torch.ones(1, 4), lambda x: x)
    tensor([[1., 1., 1., 1.]], grad_fn=<AddBackward0>)
    """

    needs_final_norm = True

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(sublayer(self.norm(x)))


@refuse_wrong_kinds
class SandwichNorm(_OneNorm):
    r"""$x + \mathrm{drop}(\mathrm{norm}_2(f(\mathrm{norm}_1(x))))$.

    Source: Ding et al. 2021 (arXiv:2105.13290), figure 3b, there "Sandwich-LN"; Gemma 2 (arXiv:2408.00118), table 1.

    >>> import torch
    >>> SandwichNorm(4)(torch.ones(1, 4), lambda x: x)
    tensor([[1., 1., 1., 1.]], grad_fn=<AddBackward0>)
    """

    needs_final_norm = True

    def __init__(self, dim: int, *, dropout: float = 0.0, norm: Norm = nn.LayerNorm) -> None:
        super().__init__(dim, dropout=dropout, norm=norm)
        self.after = norm(dim)

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return x + self.dropout(self.after(sublayer(self.norm(x))))


@refuse_wrong_kinds
class PostNorm(_OneNorm):
    r"""$\mathrm{norm}(x + \mathrm{drop}(f(x)))$.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.1.

    >>> import torch
    >>> PostNorm(4)(torch.arange(4.0)[None], lambda x: x).sum().abs() < 1e-5
    tensor(True)
    """

    needs_final_norm = False

    def forward(self, x: Tensor, sublayer: Callable[[Tensor], Tensor]) -> Tensor:
        return self.norm(x + self.dropout(sublayer(x)))


Residual = PreNorm | SandwichNorm | PostNorm
