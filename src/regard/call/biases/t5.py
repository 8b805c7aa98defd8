"""T5's bias: one learned scalar for each bucket of distances and each head."""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.relative import Relative, query_offset, require_heads, require_table
from regard.call.shapes import Sizes
from regard.errors import ArgumentError


def t5_bucket(
    distance: Integer[Tensor, "*shape"], *, num_buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> Integer[Tensor, "*shape"]:
    r"""The bucket of T5 for a signed distance j - i.

    Of the n buckets on one side, the first n/2 hold one distance each. The others hold logarithmic ranges:
    $n/2 + \lfloor \tfrac n2 \log(\tfrac{d}{n/2}) / \log(\tfrac{d_{max}}{n/2}) \rfloor$, at most n - 1.

    Args:
        distance: j - i; negative if the key stands before the query.
        num_buckets: the number of all buckets; if `bidirectional`, each side has half of them.
        bidirectional: keys after the query have their own buckets (the second half); otherwise they share
            the bucket of distance 0.
        max_distance: from this distance on, all distances share the last bucket.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1. The formula is `_relative_position_bucket` of Mesh
    TensorFlow, in float32 there and here, so the buckets match those of checkpoints.

    >>> t5_bucket(torch.tensor([-200, -9, -8, -1, 0, 1, 8]), num_buckets=32)
    tensor([15,  8,  8,  1,  0, 17, 24])
    """
    distance = distance.long()
    side = num_buckets // 2 if bidirectional else num_buckets
    away = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = side // 2
    steps = torch.log(away.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (side - exact)
    bucket = torch.where(away < exact, away, (exact + steps.long()).clamp(max=side - 1))
    return bucket + side * (distance > 0) if bidirectional else bucket


@dataclass(frozen=True, slots=True, eq=False)
class T5Bias(Relative):
    r"""A learned scalar for each bucket of distances and each head: $b_{hij} = table_{bucket(j - i),\,h}$.

    Args:
        table: (buckets, H), T5's `relative_attention_bias.weight`.
        bidirectional: see `t5_bucket`; True in T5's encoder, False in its decoder.
        max_distance: from this distance on, all distances share the last bucket.
        offset: query i stands at position offset + i; default S - T.

    T5 does not scale its scores: `attention(..., score=ScaledDot(scale=1.0), bias=T5Bias(...))`.

    Raises:
        ShapeError: the table is not 2-D and floating; or, in a call, it does not have H columns.
        ArgumentError: the number of buckets is odd or below 4 if bidirectional, or below 2 otherwise; or
            `max_distance` leaves no logarithmic range.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1.

    >>> import regard
    >>> q = torch.zeros(1, 1, 3, 2)
    >>> table = torch.tensor([[0.0], [1.0], [0.0], [2.0]])  # same place, before, (not used), after
    >>> regard.attention(q, q, q, bias=T5Bias(table), return_weights=True).weights[0, 0].dense()
    tensor([[0.0634, 0.4683, 0.4683],
            [0.2447, 0.0900, 0.6652],
            [0.4223, 0.4223, 0.1554]])
    """

    table: Float[Tensor, "buckets H"]
    bidirectional: bool = True
    max_distance: int = 128
    offset: int | None = None

    def __post_init__(self) -> None:
        require_table("T5Bias", "(buckets, H)", self.table, dims=2)
        buckets = self.table.shape[0]
        if buckets < (4 if self.bidirectional else 2) or (self.bidirectional and buckets % 2):
            needs = "an even number of buckets, at least 4, if bidirectional and at least 2 otherwise"
            raise ArgumentError(f"T5Bias needs {needs}; the table has {buckets} rows")
        exact = buckets // (4 if self.bidirectional else 2)
        if self.max_distance <= exact:
            raise ArgumentError(
                f"T5Bias with {buckets} buckets keeps distances below {exact} apart, so max_distance must be "
                f"above that, got {self.max_distance}"
            )

    @property
    def head_count(self) -> int:
        return self.table.shape[1]

    def learned(self) -> tuple[Tensor, ...]:
        return (self.table,) if self.table.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        require_heads("T5Bias", "columns in its table", self.table.shape[1], sizes)
        return replace(self, table=self.table.to(device), offset=query_offset(self.offset, sizes))

    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        buckets = self.table.shape[0]
        bucket = t5_bucket(
            distance, num_buckets=buckets, bidirectional=self.bidirectional, max_distance=self.max_distance
        )
        return self.table[bucket, head]

    def __str__(self) -> str:
        return f"T5 bias with {self.table.shape[0]} buckets"
