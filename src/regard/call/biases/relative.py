"""Biases by the positions of query and key alone.

    ALiBi(8)                        -m_h |i - j|                       one slope per head; nothing is learned
    T5Bias(table)                   table[bucket(j - i), h]            one scalar per bucket and head

Query i stands at position offset + i and key j at position j; "i - j" above is the distance of these positions. The
default offset is S - T, which aligns the last query with the last key, as in `causal()` and for a key-value cache. Pass
one to `attention` as `bias=`, together with any mask. None of them makes a T x S tensor, except on the `reference`
backend.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.call.biases.base import Bias, BiasPull, SelectedBias
from regard.call.shapes import Rows, Sizes
from regard.errors import ArgumentError, ShapeError, require, require_whole
from regard.tensors.guards import has_values
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.memory import widest_dtype


class Relative(Bias):
    """A bias by the head and the distance j - (offset + i) alone. Subclasses define `of`."""

    offset: int | None

    @abstractmethod
    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        """The bias at signed distances, negative for a key before its query. The index tensors broadcast."""

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.of(head, j - i - bound_offset(self.offset))

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return super().block(rows, columns, query=query, key=key, sizes=sizes)
        heads = torch.arange(sizes.heads, device=query.device)[:, None]
        return per_head_diagonals(self, heads, rows, columns, query.dtype)[None]

    def laid_out(self, sizes: Sizes, device: torch.device) -> Bias:
        first = 1 - sizes.queries - bound_offset(self.offset)
        distances = torch.arange(first, first + sizes.queries + sizes.keys - 1, device=device)
        values = self.of(torch.arange(sizes.heads, device=device)[:, None], distances)
        return Diagonals(values, sizes.queries - 1)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return _OfHeads(self, heads)


@dataclass(frozen=True, slots=True, eq=False)
class Diagonals(Bias):
    """values[h, j - i + origin]: a bias constant along each diagonal."""

    values: Tensor
    """(H, T + S - 1), or (heads of the choice, T + S - 1)."""
    origin: int
    heads: Tensor | None = None
    """After a choice of heads: pair n stands in batch row n, head 0, and reads the values of heads[n]."""

    def learned(self) -> tuple[Tensor, ...]:
        return (self.values,) if self.values.requires_grad else ()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        each = head if self.heads is None else self.heads[:, None, None, None]
        return self.values[each, j - i + self.origin]

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return super().block(rows, columns, query=query, key=key, sizes=sizes)
        # Window w of the values is row t - 1 - w of the block.
        values = self.values if self.heads is None else self.values[self.heads]
        upwards = torch.arange(len(rows) - 1, -1, -1, device=values.device)
        # (flip would give a column-major block; index_select gives a row-major one.)
        diagonals = values[:, self._places(rows, columns)].to(torch.promote_types(query.dtype, torch.float32))
        block = diagonals.unfold(-1, len(columns), 1).index_select(-2, upwards)
        return block[None] if self.heads is None else block[:, None]

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, BiasPull]:
        def pull(grad: Tensor, totals: Sequence[Tensor]) -> None:
            for total in totals:
                sums = diagonal_sums(grad)
                part = total[:, self._places(rows, columns)]
                if self.heads is None:
                    part += sums.sum(0)
                else:
                    part.index_add_(0, self.heads, sums.squeeze(1).to(part.dtype))

        return self.block(rows, columns, query=query, key=key, sizes=sizes).detach(), pull

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return replace(self, heads=heads if self.heads is None else self.heads[batches])

    def _places(self, rows: range, columns: range) -> slice:
        first = columns.start - (rows.stop - 1) + self.origin
        return slice(first, first + len(rows) + len(columns) - 1)


def diagonal_sums(block: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch diagonals"]:
    """The sum of each diagonal, from the bottom left corner to the top right: (..., t + s - 1)."""
    *batch, t, s = block.shape
    width = t + s - 1
    # Row i is shifted by t - 1 - i, which turns diagonals into columns.
    skewed = block.new_zeros(*batch, t, width)
    strides = (*skewed.stride()[:-2], width - 1, 1)
    skewed.as_strided(block.shape, strides, t - 1).copy_(block)
    return skewed.sum(-2)


@dataclass(frozen=True, slots=True, eq=False)
class _OfHeads(SelectedBias):
    """A bound relative bias with a choice of heads: pair n stands in batch row n, head 0."""

    bias: Relative

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return Bias.block(self, rows, columns, query=query, key=key, sizes=sizes)
        return per_head_diagonals(self.bias, self.heads[:, None, None], rows, columns, query.dtype)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return _OfHeads(self.bias, self.heads[batches])


def per_head_diagonals(bias: Relative, head: Tensor, rows: range, columns: range, dtype: torch.dtype) -> Tensor:
    """A block (..., t, s) that is constant along each diagonal, for heads (..., 1)."""
    first = columns.start - (rows.stop - 1) - bound_offset(bias.offset)
    distances = torch.arange(first, first + len(rows) + len(columns) - 1, device=head.device)
    # Window w of the distances is row t - 1 - w of the block. At least float32, cast before the expansion.
    diagonals = bias.of(head, distances).to(torch.promote_types(dtype, torch.float32))
    return diagonals.unfold(-1, len(columns), 1).flip(-2)


def gather_offsets(products: Tensor, index: Tensor) -> Tensor:
    """products[..., i, index[i, j]]."""
    return products.gather(-1, index.expand(*products.shape[:-1], index.shape[-1]))


def scaled_vectors(vectors: Tensor, scale: float | None) -> Tensor:
    """The vectors times the scale; the default is 1 / sqrt(D)."""
    return vectors * (vectors.shape[-1] ** -0.5 if scale is None else scale)


def query_offset(offset: int | None, sizes: Sizes) -> int:
    """The position of the first query; the default is S - T."""
    return sizes.keys - sizes.queries if offset is None else offset


def bound_offset(offset: int | None) -> int:
    if offset is None:
        raise ArgumentError("this bias has not met a call yet: bind it, or give it an offset")
    return offset


def require_heads(name: str, what: str, got: int, sizes: Sizes) -> None:
    if got != sizes.heads:
        raise ShapeError(f"{name} needs one for each of the query's {sizes.heads} heads, got {got} {what}")


def require_table(name: str, what: str, table: Tensor, *, dims: int) -> None:
    require(table, Tensor, f"the table of {name}", f"a float tensor {what}")
    if table.dim() != dims or not table.is_floating_point() or 0 in table.shape:
        raise ShapeError(f"{name} takes a float tensor {what}, got {table.dtype} of shape {tuple(table.shape)}")


def require_width(name: str, what: str, table: Tensor, query: Tensor) -> None:
    if table.shape[-1] != query.shape[-1]:
        raise ShapeError(f"{name} needs {what} as wide as the query, {query.shape[-1]}, got {tuple(table.shape)}")


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


@refuse_wrong_kinds
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
