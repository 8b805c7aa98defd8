"""Tokens and positions as vectors."""

import math
from functools import lru_cache

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.call.rotary.rotary import Half, Interleaved, Layout
from regard.errors import ArgumentError, ShapeError, require_whole
from regard.lazy import Displayed
from regard.tensors.guards import may_be_kept
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.memory import widest_dtype
from regard.tensors.ranges import require_above, require_sizes

MOST_KEPT = 1 << 20
"""The most elements of a cached table of sinusoidal positions: 4 MiB in float32."""
Offset = int | Integer[Tensor, "*batch"]
"""The position of a sequence's first vector: one for all sequences, or one for each."""


@refuse_wrong_kinds
class TokenEmbedding(nn.Module):
    r"""$x_t = c\, E_{w_t}$, with $E \sim N(0, 1 / c^2)$ at initialisation, for entries of unit variance.

    The default, $c = \sqrt d$, is that of Vaswani et al. 2017 (arXiv:1706.03762), section 3.4; a gain g makes it $g
    \sqrt d$. The same matrix can serve as output layer. Adam's steps have one length for weights of every size, so the
    words of a small matrix change faster: g times as fast as the other parts of the model.

    Args:
        vocab_size: number of tokens.
        dim: d.
        pad_id: a token with a zero vector at first, and no gradient from this layer.
        gain: g, above 0.

    Raises:
        ArgumentError: a size is below 1, the gain is not above 0, or the pad_id is outside the vocabulary.

    >>> TokenEmbedding(10, 4, pad_id=0)(torch.tensor([[1, 2, 0]])).shape
    torch.Size([1, 3, 4])
    """

    def __init__(
        self,
        vocab_size: int,
        dim: int,
        *,
        pad_id: int | None = None,
        gain: float = 1.0,
    ) -> None:
        super().__init__()
        require_sizes(vocab_size=vocab_size, dim=dim)
        require_above(0, gain=gain)
        if pad_id is not None and not 0 <= pad_id < vocab_size:
            raise ArgumentError(f"pad_id must be in [0, {vocab_size}), got {pad_id}")
        self.weight = nn.Parameter(torch.empty(vocab_size, dim))
        self.pad_id = pad_id
        self.gain = gain
        self.scale = gain * dim**0.5
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 1/(g^2 d)), with zeros for the padding token."""
        nn.init.normal_(self.weight, std=self.weight.shape[1] ** -0.5 / self.gain)
        if self.pad_id is not None:
            with torch.no_grad():
                self.weight[self.pad_id].zero_()

    def forward(self, ids: Integer[Tensor, "*batch T"]) -> Float[Tensor, "*batch T D"]:
        if ids.is_floating_point():
            raise ShapeError(f"tokens must be ids, whole numbers below {len(self.weight)}; got {ids.dtype}")
        return nn.functional.embedding(ids.long(), self.weight, padding_idx=self.pad_id) * self.scale


class SinusoidalPositions(Displayed, nn.Module):
    """Adds `regard.nn.embeddings.sinusoidal`, for any length and without parameters.

    Args:
        dim: width of the vectors.
        layout: the dimensions of the sine and the cosine of one wave: neighbours as in the paper, or dimensions half
            the width apart (`Half()`: Tensor2Tensor and Marian).

    Raises:
        ArgumentError: dim is odd or not positive.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.

    >>> SinusoidalPositions(4)(torch.zeros(1, 2, 4))[0, 0]
    tensor([0., 1., 0., 1.])
    """

    max_length = None

    def __init__(self, dim: int, layout: Layout = Interleaved()) -> None:  # noqa: B008  (frozen, without state)
        super().__init__()
        require_even(dim)
        self.dim, self.layout = dim, layout

    def forward(self, x: Float[Tensor, "*batch T D"], *, offset: Offset = 0) -> Float[Tensor, "*batch T D"]:
        """x plus the vectors of positions offset .. offset + T - 1."""
        is_ours = type(self.layout) in (Interleaved, Half)  # A custom layout may change, or have no hash.
        if isinstance(offset, int) and offset >= 0 and is_ours and may_be_kept(x):
            end = offset + x.shape[-2]
            size = 1 << max(end - 1, 1).bit_length()
            if size * self.dim <= MOST_KEPT:
                return x + _table(size, self.dim, self.layout, x.dtype)[offset:end]
        return x + _waves(_positions(x, offset), self.dim, self.layout, x.dtype)


def _waves(positions: Integer[Tensor, "*shape"], dim: int, layout: Layout, dtype: torch.dtype) -> Tensor:
    return layout.join(*Interleaved().split(sinusoidal(positions, dim, dtype=dtype)))


@lru_cache(maxsize=8)
def _table(size: int, dim: int, layout: Layout, dtype: torch.dtype) -> Float[Tensor, "size dim"]:
    # An inference tensor could not be used in training later. The default device may be another.
    with torch.inference_mode(False):
        return _waves(torch.arange(size, device="cpu"), dim, layout, dtype)


class NoPositions(nn.Module):
    """Adds nothing; for models with positions in their attention.

    >>> NoPositions()(torch.ones(1, 1, 2), offset=3)
    tensor([[[1., 1.]]])
    """

    max_length = None

    def forward(self, x: Float[Tensor, "*batch T D"], *, offset: Offset = 0) -> Float[Tensor, "*batch T D"]:
        return x


class LearnedPositions(Displayed, nn.Module):
    """Adds one learned vector for each position up to `max_length`.

    Raises:
        ArgumentError: a size is below 1.

    Source: Gehring et al. 2017 (arXiv:1705.03122), section 3.1.

    >>> LearnedPositions(8, 4)(torch.zeros(1, 2, 4)).shape
    torch.Size([1, 2, 4])
    """

    def __init__(self, max_length: int, dim: int) -> None:
        super().__init__()
        require_sizes(max_length=max_length, dim=dim)
        self.max_length = max_length
        self.weight = nn.Parameter(torch.empty(max_length, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """N(0, 0.02^2), as in GPT-2."""
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, x: Float[Tensor, "*batch T D"], *, offset: Offset = 0) -> Float[Tensor, "*batch T D"]:
        """x plus the vectors of positions offset .. offset + T - 1.

        Raises:
            ArgumentError: a position is `max_length` or more.
        """
        last = offset if isinstance(offset, int) else int(offset.long().max())
        end = last + x.shape[-2]
        if end > self.max_length:
            raise ArgumentError(
                f"the learned positions serve up to {self.max_length} tokens, got a sequence that reaches {end}: "
                "cut it, or train with a larger max_length or sinusoidal positions"
            )
        return x + (self.weight[offset:end] if isinstance(offset, int) else self.weight[_positions(x, offset)])


def _positions(x: Float[Tensor, "*batch T D"], offset: Offset) -> Integer[Tensor, "*batch T"] | Integer[Tensor, " T"]:
    steps = torch.arange(x.shape[-2], device=x.device)
    return steps + (offset if isinstance(offset, int) else offset.long()[..., None])


def require_even(dim: int) -> None:
    require_whole(dim=dim)
    if dim < 2 or dim % 2:
        raise ArgumentError(f"sinusoidal positions need an even dim of at least 2, got {dim}")


def sinusoidal(
    positions: Integer[Tensor, "*shape"], dim: int, *, base: float = 10_000.0, dtype: torch.dtype = torch.float32
) -> Float[Tensor, "*shape dim"]:
    r"""$PE_{p,2i} = \sin(p / base^{2i/d})$ and $PE_{p,2i+1} = \cos(p / base^{2i/d})$.

    Args:
        positions: integer positions of any shape.
        dim: d, even.
        base: the slowest wave has a period of about 2 pi base tokens.
        dtype: of the result. The angles are computed in float64. In float32 their relative error of 6e-8 would be 6e-3
            at position 100,000.

    Raises:
        ArgumentError: dim is odd or not positive.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.5.

    >>> sinusoidal(torch.tensor([0, 1]), 4)
    tensor([[0.0000, 1.0000, 0.0000, 1.0000],
            [0.8415, 0.5403, 0.0100, 0.9999]])
    """
    require_even(dim)
    device = positions.device
    wide = widest_dtype(device)
    frequencies = torch.exp(torch.arange(0, dim, 2, device=device, dtype=wide) * (-math.log(base) / dim))
    # Narrow integers may have no product with floating-point numbers.
    angles = positions.to(wide)[..., None] * frequencies
    return torch.stack([angles.sin(), angles.cos()], dim=-1).flatten(-2).to(dtype)
