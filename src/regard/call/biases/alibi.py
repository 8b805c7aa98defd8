"""ALiBi: a bias that falls in proportion to the distance."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.relative import Relative, bound_offset, query_offset, require_heads
from regard.call.shapes import Sizes
from regard.errors import ArgumentError, ShapeError, require, require_whole
from regard.tensors.guards import has_values
from regard.tensors.precision import widest_dtype

SPLIT_REACH = 128.0
"""The largest bias, relative to that of the middle query, at which ALiBi is split into keys and queries in float32."""


def alibi_slopes(num_heads: int, dtype: torch.dtype = torch.float32) -> Float[Tensor, " H"]:
    r"""The slopes of ALiBi: $m_h = 2^{-8h/H}$ for h = 1, ..., H, where H is a power of two.

    For any other H: the slopes of the power of two n below H, then every second slope of 2n, starting with the first.

    Raises:
        ArgumentError: fewer than one head.

    Source: Press et al. 2022 (arXiv:2108.12409), section 3; for an H that is no power of two, the authors' code.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    require_whole(num_heads=num_heads)
    if num_heads < 1:
        raise ArgumentError(f"ALiBi needs at least one head, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes, dtype=dtype)


@dataclass(frozen=True, slots=True, eq=False)
class ALiBi(Relative):
    r"""Attention with linear biases: $b_{hij} = -m_h \, |i - j|$.

    Args:
        slopes: m, (H,); or the number of heads H, which means `alibi_slopes(H)`. The slopes may take a gradient.
        offset: query i stands at position offset + i; default S - T.

    Raises:
        ArgumentError: fewer than one head.
        ShapeError: the slopes are not one float per head; or, in a call, there are not H of them.

    Under a causal mask the bias is a sum of a term per key and a term per query. The fused kernels then run it like a
    padding mask, as long as m_h times half the length is at most 128. Beyond that, float32 rounding of the scores would
    exceed the tolerance of the weights, and the bias is computed by blocks of queries.

    Source: Press et al. 2022 (arXiv:2108.12409), section 3.

    >>> import regard
    >>> q = torch.zeros(1, 1, 3, 2)
    >>> regard.attention(q, q, q, bias=ALiBi(torch.tensor([1.0])), return_weights=True).weights[0, 0, 0]
    tensor([0.6652, 0.2447, 0.0900])
    """

    slopes: Float[Tensor, " H"] | int
    offset: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.slopes, int):
            # Exact enough for a call in float64; other calls take them in their own dtype.
            object.__setattr__(self, "slopes", alibi_slopes(self.slopes, torch.float64))
            return
        require(self.slopes, Tensor, "slopes", "a tensor (H,) or the number of heads")
        if self.slopes.dim() != 1 or not self.slopes.is_floating_point():
            got = f"{self.slopes.dtype} of shape {tuple(self.slopes.shape)}"
            raise ShapeError(f"ALiBi takes the number of heads or one float slope per head, got {got}")

    @property
    def _m(self) -> Tensor:
        assert isinstance(self.slopes, Tensor)
        return self.slopes

    @property
    def _precise(self) -> Tensor:
        """The slopes in at least float32: half precision would round their products with a distance."""
        return self._m.to(torch.promote_types(self._m.dtype, torch.float32))

    @property
    def head_count(self) -> int:
        return len(self._m)

    def learned(self) -> tuple[Tensor, ...]:
        return (self._m,) if self._m.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        require_heads("ALiBi", "slopes", self._m.shape[0], sizes)
        slopes = self._m.to(widest_dtype(device)) if self._m.dtype == torch.float64 else self._m
        return ALiBi(slopes.to(device), query_offset(self.offset, sizes))

    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        return self._precise[head] * -distance.abs()

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor] | None:
        offset = bound_offset(self.offset)
        # `causal` reports this for queries at S - T + i. Queries at later positions see no later key either.
        if not causal or offset < sizes.keys - sizes.queries:
            return None
        # The largest slope is a value, and a compiled graph must not depend on values.
        if not has_values(self._m):
            return None
        # Values near 0 are rounded least. So c is the position of the middle query (in decoding, of the only query).
        middle = offset + sizes.queries // 2
        m = self._precise[:, None]
        # The rounding of a score is proportional to its bias. Beyond this limit the weights would err by more than
        # 5e-6.
        if float(m.abs().max()) * max(sizes.queries // 2, sizes.keys - 1 - middle) > SPLIT_REACH:
            return None
        per_key = m * (torch.arange(sizes.keys, device=device) - middle)
        per_query = m * (middle - offset - torch.arange(sizes.queries, device=device))
        return per_key[None, :, None], per_query[None]

    def __str__(self) -> str:
        return "ALiBi"
