"""The short convolution over positions in front of a linear recurrence."""

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn.functional import conv1d, silu

from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_sizes


@refuse_wrong_kinds
class ShortConvolution(nn.Module):
    r"""$\mathrm{SiLU}(\sum_{i<K} w_i \odot x_{t-i} + b)$: each channel by itself, over the last K positions.

    Args:
        channels: the width of the input.
        size: K.
        bias: whether there is b.

    Raises:
        ArgumentError: a size is below 1.

    Source: Dao and Gu 2024 (arXiv:2405.21060), section 7.1; Fu et al. 2023 (arXiv:2212.14052), section 3.

    >>> conv = ShortConvolution(4, 3)
    >>> x = torch.randn(1, 5, 4)
    >>> first, inputs = conv(x[:, :3], None)
    >>> last, _ = conv(x[:, 3:], inputs)
    >>> torch.allclose(torch.cat([first, last], 1), conv(x, None)[0])
    True
    """

    def __init__(self, channels: int, size: int = 4, *, bias: bool = False) -> None:
        super().__init__()
        require_sizes(channels=channels, size=size)
        self.weight = nn.Parameter(torch.empty(channels, 1, size))
        self.bias = nn.Parameter(torch.empty(channels)) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform in (-1, 1) / sqrt(K), as torch begins a convolution of one channel."""
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -(self.weight.shape[-1] ** -0.5), self.weight.shape[-1] ** -0.5)

    def forward(
        self,
        x: Float[Tensor, "*batch T C"],
        before: Float[Tensor, "*batch K C"] | None,
        real: Bool[Tensor, "*batch T"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """The output (batch..., T, C), and the last K - 1 inputs, which come before the next.

        Args:
            x: the inputs.
            before: the K - 1 inputs before these; None is zeros.
            real: False for padding, whose inputs count as 0. It is at one end of each sequence.
        """
        size, channels = self.weight.shape[-1], x.shape[-1]
        if real is not None:
            x = x * real[..., None]
        before = x.new_zeros(*x.shape[:-2], size - 1, channels) if before is None else before.to(x.dtype)
        whole = torch.cat([before, x], -2)
        bias = None if self.bias is None else self.bias.to(x.dtype)
        flat = whole.reshape(-1, *whole.shape[-2:]).mT
        output = conv1d(flat, self.weight.to(x.dtype), bias, groups=channels).mT.reshape(x.shape)
        if real is None:
            return silu(output), whole[..., x.shape[-2] :, :]
        last = (real * torch.arange(1, real.shape[-1] + 1, device=x.device)).amax(-1)
        places = last[..., None] + torch.arange(size - 1, device=x.device)
        return silu(output), whole.gather(-2, places[..., None].expand(*places.shape, channels))
