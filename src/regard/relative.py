"""Where query and key stand, as something added to their score.

    ALiBi(8)                        -m_h |i - j|                       a slope per head, nothing learned
    T5Bias(table)                   table[bucket(j - i), h]            a number per bucket and head
    Shaw(table)                     c q_i . table[clip(j - i)]         reads the query
    TransformerXL(u, v, positions)  c ((q_i + v) . r_{i-j} + u . k_j)  reads query and key

Query i stands at position offset + i and key j at position j; "i - j" above means the distance of their
positions. The offset is S - T unless given, which aligns the last query with the last key, as `causal()`
does and a key-value cache needs. Any of them is passed to `attention` as `bias=`, with any mask; none
makes a T x S tensor outside the `reference` backend.
"""

import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.biases import Bias, Pull
from regard.errors import ArgumentError, ShapeError
from regard.shapes import Sizes


class Relative(Bias):
    """A bias that depends on the head and on the distance j - (offset + i) alone. Subclasses say `of`."""

    offset: int | None
    """Query i stands at offset + i; None is S - T."""

    @abstractmethod
    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        """The bias at signed distances, negative where the key stands first; index tensors that broadcast."""

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """The bias at each pair's distance."""
        return self.of(head, j - i - _bound(self.offset))

    def block(
        self, rows: range | Tensor, columns: range | Tensor, *, query: Tensor, key: Tensor, sizes: Sizes
    ) -> Tensor:
        """For neighbours, the t + s - 1 distances laid out along the diagonals, where gradients add up too."""
        if not isinstance(rows, range) or not isinstance(columns, range):
            return super().block(rows, columns, query=query, key=key, sizes=sizes)
        return _diagonals(self, torch.arange(sizes.heads, device=query.device)[:, None], rows, columns)[None]

    def laid_out(self, sizes: Sizes, device: torch.device) -> Bias:
        """One number for each head and distance: (H, T + S - 1) of them, computed and differentiated once."""
        first = 1 - sizes.queries - _bound(self.offset)
        distances = torch.arange(first, first + sizes.queries + sizes.keys - 1, device=device)
        values = self.of(torch.arange(sizes.heads, device=device)[:, None], distances)
        return Diagonals(values, sizes.queries - 1)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        """The bias of some heads, each as a batch row of one head."""
        return _OfHeads(self, heads)


@dataclass(frozen=True, slots=True, eq=False)
class Diagonals(Bias):
    """values[h, j - i + origin]: a bias that is the same along each diagonal."""

    values: Tensor
    """(H, T + S - 1), or (heads of the choice, T + S - 1)."""
    origin: int
    heads: Tensor | None = None
    """After a choice: pair n stands in batch row n, head 0, and reads the values of heads[n]."""

    def learned(self) -> tuple[Tensor, ...]:
        """The values, if they take a gradient."""
        return (self.values,) if self.values.requires_grad else ()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """At each pair."""
        each = head if self.heads is None else self.heads[:, None, None, None]
        return self.values[each, j - i + self.origin]

    def block(
        self, rows: range | Tensor, columns: range | Tensor, *, query: Tensor, key: Tensor, sizes: Sizes
    ) -> Tensor:
        """The t + s - 1 values of a block of neighbours, laid out along its diagonals."""
        if not isinstance(rows, range) or not isinstance(columns, range):
            return super().block(rows, columns, query=query, key=key, sizes=sizes)
        # Window w of the values is the row that stands w places before the last.
        values = self.values if self.heads is None else self.values[self.heads]
        upwards = torch.arange(len(rows) - 1, -1, -1, device=values.device)
        # (index_select, since flip would lay the block out by columns.)
        block = values[:, self._places(rows, columns)].unfold(-1, len(columns), 1).index_select(-2, upwards)
        return block[None] if self.heads is None else block[:, None]

    def linearize(
        self, rows: range, columns: range, *, query: Tensor, key: Tensor, sizes: Sizes, learned: Sequence[Tensor]
    ) -> tuple[Tensor, Pull]:
        """The gradient of a value is the sum of its diagonal."""

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
        """The values of those heads."""
        return replace(self, heads=heads if self.heads is None else self.heads[batches])

    def _places(self, rows: range, columns: range) -> slice:
        first = columns.start - (rows.stop - 1) + self.origin
        return slice(first, first + len(rows) + len(columns) - 1)


def diagonal_sums(block: Float[Tensor, "*batch t s"]) -> Float[Tensor, "*batch diagonals"]:
    """The sum of each diagonal, from the bottom left corner to the top right: (..., t + s - 1).

    >>> diagonal_sums(torch.tensor([[1.0, 2.0], [3.0, 4.0]]))
    tensor([3., 5., 2.])
    """
    *batch, t, s = block.shape
    width = t + s - 1
    # Row i shifted by t - 1 - i, so that diagonals become columns.
    skewed = block.new_zeros(*batch, t, width)
    strides = (*skewed.stride()[:-2], width - 1, 1)
    skewed.as_strided(block.shape, strides, t - 1).copy_(block)
    return skewed.sum(-2)


SPLIT_REACH = 128.0
"""The largest bias above the middle query's that ALiBi is split into keys and queries with, in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class _OfHeads(Bias):
    """A bound relative bias seen through a choice of heads: pair n stands in batch row n, head 0."""

    bias: Relative
    heads: Tensor

    def learned(self) -> tuple[Tensor, ...]:
        return self.bias.learned()

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return self.bias.value(self.heads[:, None, None, None], i, j, query, key)

    def block(
        self, rows: range | Tensor, columns: range | Tensor, *, query: Tensor, key: Tensor, sizes: Sizes
    ) -> Tensor:
        if not isinstance(rows, range) or not isinstance(columns, range):
            return Bias.block(self, rows, columns, query=query, key=key, sizes=sizes)
        return _diagonals(self.bias, self.heads[:, None, None], rows, columns)

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        return _OfHeads(self.bias, self.heads[batches])


def _diagonals(bias: Relative, head: Tensor, rows: range, columns: range) -> Tensor:
    """A block (..., t, s) that is the same along each diagonal, for heads (..., 1)."""
    first = columns.start - (rows.stop - 1) - _bound(bias.offset)
    distances = torch.arange(first, first + len(rows) + len(columns) - 1, device=head.device)
    # Window w of the distances is the row that stands w places before the last.
    return bias.of(head, distances).unfold(-1, len(columns), 1).flip(-2)


# -- functions of the distance ---------------------------------------------------------------------------


def alibi_slopes(num_heads: int) -> Float[Tensor, " H"]:
    r"""The slopes of ALiBi: $m_h = 2^{-8h/H}$ for h = 1, ..., H, where H is a power of two.

    For any other H: the slopes of the power of two n below it, then every other slope of 2n, from the first.

    Raises:
        ArgumentError: fewer than one head.

    Source: Press et al. 2022 (arXiv:2108.12409), section 3; H that is no power of two as in the authors' code.

    >>> alibi_slopes(4)
    tensor([0.2500, 0.0625, 0.0156, 0.0039])
    >>> alibi_slopes(3)
    tensor([0.0625, 0.0039, 0.2500])
    """
    if num_heads < 1:
        raise ArgumentError(f"ALiBi needs at least one head, got {num_heads}")
    power = 1 << (num_heads.bit_length() - 1)
    slopes = [2.0 ** (-8.0 * h / power) for h in range(1, power + 1)]
    slopes += [2.0 ** (-4.0 * h / power) for h in range(1, 2 * (num_heads - power), 2)]
    return torch.tensor(slopes)


@dataclass(frozen=True, slots=True, eq=False)
class ALiBi(Relative):
    r"""Attention with linear biases: $b_{hij} = -m_h \, |i - j|$.

    Args:
        slopes: m, (H,); or the number of heads H, for `alibi_slopes(H)`. It may take a gradient.
        offset: query i stands at position offset + i; None is S - T.

    Raises:
        ArgumentError: fewer than one head.
        ShapeError: the slopes are not one float per head; or, when it meets a call, are not H.

    Under a causal mask it is a sum of one number per key and one per query, so the fused kernels run it as
    they run a padding mask, where m_h times half the length is at most 128; beyond that, float32 would round
    the scores by more than the weights may err, and the bias goes in by blocks of queries.

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
            object.__setattr__(self, "slopes", alibi_slopes(self.slopes))
        elif self.slopes.dim() != 1 or not self.slopes.is_floating_point():
            got = f"{self.slopes.dtype} of shape {tuple(self.slopes.shape)}"
            raise ShapeError(f"ALiBi takes the number of heads or one float slope per head, got {got}")

    @property
    def _m(self) -> Tensor:
        assert isinstance(self.slopes, Tensor)
        return self.slopes

    def learned(self) -> tuple[Tensor, ...]:
        """The slopes, if they take a gradient."""
        return (self._m,) if self._m.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        """Resolve the offset; one slope for each head."""
        _require_heads("ALiBi", "slopes", self._m.shape[0], sizes)
        return ALiBi(self._m.to(device), _offset(self.offset, sizes))

    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        """-m |distance|."""
        return self._m[head] * -distance.abs()

    def split(self, sizes: Sizes, device: torch.device, *, causal: bool) -> tuple[Tensor, Tensor] | None:
        """Where no query sees a key after it: m (j - c) per key and m (c - i) per query, for any c."""
        offset = _bound(self.offset)
        # `causal` speaks of queries at S - T + i; where they stand later still, no key is after them either.
        if not causal or offset < sizes.keys - sizes.queries:
            return None
        # How far the slopes reach is a value, on which a compiled graph must not depend.
        if torch.compiler.is_compiling():
            return None
        # Numbers near 0 round least: c is the middle query's position, and the only one's when decoding.
        middle = offset + sizes.queries // 2
        m = self._m[:, None]
        # A score is rounded at the size of its bias: beyond this the weights would be off by more than 5e-6.
        if float(m.max()) * max(sizes.queries // 2, sizes.keys - 1 - middle) > SPLIT_REACH:
            return None
        per_key = m * (torch.arange(sizes.keys, device=device) - middle)
        per_query = m * (middle - offset - torch.arange(sizes.queries, device=device))
        return per_key[None, :, None], per_query[None]

    def __str__(self) -> str:
        return "ALiBi"


def t5_bucket(
    distance: Int[Tensor, "*shape"], *, num_buckets: int, bidirectional: bool = True, max_distance: int = 128
) -> Int[Tensor, "*shape"]:
    r"""Which of T5's buckets a signed distance j - i falls into.

    Of the n buckets on a side, the first n/2 hold one distance each, the others logarithmic ranges:
    $n/2 + \lfloor \tfrac n2 \log(\tfrac{d}{n/2}) / \log(\tfrac{d_{max}}{n/2}) \rfloor$, at most n - 1.

    Args:
        distance: j - i; negative where the key stands first.
        num_buckets: all buckets; half of them on each side if `bidirectional`.
        bidirectional: keys after the query have buckets of their own (the second half); otherwise they share
            the bucket of distance 0.
        max_distance: from here on all distances share the last bucket.

    Source: Raffel et al. 2020 (arXiv:1910.10683), section 2.1; the formula is in Mesh TensorFlow's
    `_relative_position_bucket`, in float32 as here, so that each distance falls where checkpoints learned it.

    >>> t5_bucket(torch.tensor([-200, -9, -8, -1, 0, 1, 8]), num_buckets=32)
    tensor([15,  8,  8,  1,  0, 17, 24])
    """
    side = num_buckets // 2 if bidirectional else num_buckets
    away = distance.abs() if bidirectional else (-distance).clamp(min=0)
    exact = side // 2
    steps = torch.log(away.clamp(min=exact).float() / exact) / math.log(max_distance / exact) * (side - exact)
    bucket = torch.where(away < exact, away, (exact + steps.long()).clamp(max=side - 1))
    return bucket + side * (distance > 0) if bidirectional else bucket


@dataclass(frozen=True, slots=True, eq=False)
class T5Bias(Relative):
    r"""A learned number for each bucket of distances and each head: $b_{hij} = table_{bucket(j - i),\,h}$.

    Args:
        table: (buckets, H), T5's `relative_attention_bias.weight`.
        bidirectional: see `t5_bucket`; True in T5's encoder, False in its decoder.
        max_distance: from here on all distances share the last bucket.
        offset: query i stands at position offset + i; None is S - T.

    T5 does not scale its scores: `attention(..., score=ScaledDot(scale=1.0), bias=T5Bias(...))`.

    Raises:
        ShapeError: the table is not 2-D and floating; or, when it meets a call, has not H columns.
        ArgumentError: an odd number of buckets or fewer than 4 if bidirectional, fewer than 2 otherwise; a
            `max_distance` that leaves no logarithmic range.

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
        _require_table("T5Bias", "(buckets, H)", self.table, dims=2)
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

    def learned(self) -> tuple[Tensor, ...]:
        """The table, if it takes a gradient."""
        return (self.table,) if self.table.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        """Resolve the offset; one column for each head."""
        _require_heads("T5Bias", "columns in its table", self.table.shape[1], sizes)
        return replace(self, table=self.table.to(device), offset=_offset(self.offset, sizes))

    def of(self, head: Tensor, distance: Tensor) -> Tensor:
        """table[bucket, head]."""
        buckets = self.table.shape[0]
        bucket = t5_bucket(
            distance, num_buckets=buckets, bidirectional=self.bidirectional, max_distance=self.max_distance
        )
        return self.table[bucket, head]

    def __str__(self) -> str:
        return f"T5 bias with {self.table.shape[0]} buckets"


# -- functions of the vectors too --------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Shaw(Bias):
    r"""Relative position representations: $b_{ij} = c \, q_i \cdot a_{\mathrm{clip}(j - i, -k, k)}$.

    Added to c q_i . k_j it makes the paper's $e_{ij} = c \, q_i \cdot (k_j + a_{ij})$.

    Args:
        table: $a^K$, (2k + 1, D), the vector of distance -k first (the key stands k before the query). All
            heads share it, as in the paper.
        scale: c, the score's own: None is 1/sqrt(D), as in `ScaledDot()`; give both the same otherwise.
        offset: query i stands at position offset + i; None is S - T.

    The paper's other half, vectors $a^V$ added to the values (equation 3), is not a bias and not here.

    Raises:
        ShapeError: the table is not 2-D and floating with an odd number of rows; or, when it meets a call,
            is not as wide as the query.

    Source: Shaw et al. 2018 (arXiv:1803.02155), equations 4 and 5 and section 3.2.

    >>> import regard
    >>> q = torch.ones(3, 1)
    >>> bias = Shaw(torch.tensor([[0.0], [1.0], [2.0]]))
    >>> regard.attention(q, 0 * q, q, bias=bias, return_weights=True).weights.dense().log()
    tensor([[-1.8620, -0.8620, -0.8620],
            [-2.4076, -1.4076, -0.4076],
            [-1.5514, -1.5514, -0.5514]])
    """

    reads_vectors = True

    table: Float[Tensor, "distances D"]
    scale: float | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        _require_table("Shaw", "(2k + 1, D)", self.table, dims=2)
        if self.table.shape[0] % 2 == 0:
            raise ShapeError(f"Shaw's table has 2k + 1 rows, for the distances -k to k; got {self.table.shape[0]}")

    def learned(self) -> tuple[Tensor, ...]:
        """The table, if it takes a gradient."""
        return (self.table,) if self.table.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        """Resolve the offset."""
        return replace(self, table=self.table.to(device), offset=_offset(self.offset, sizes))

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """One product with the 2k + 1 vectors per query, read at each pair's distance."""
        _require_width("Shaw", "table", self.table, query)
        furthest = self.table.shape[0] // 2
        products = _scaled(query, self.scale) @ self.table.to(query.dtype).mT
        distance = (j - i - _bound(self.offset)).clamp(-furthest, furthest)
        return _read(products, distance + furthest)

    def __str__(self) -> str:
        return f"Shaw's relative positions up to {self.table.shape[0] // 2}"


@dataclass(frozen=True, slots=True, eq=False)
class TransformerXL(Bias):
    r"""Transformer-XL's positions: $b_{hij} = c \, ((q_i + v_h) \cdot r_{h,i-j} + u_h \cdot k_j)$.

    Added to c q_i . k_j it makes c times the paper's
    $A^{rel}_{ij} = q_i \cdot k_j + q_i \cdot r_{i-j} + u \cdot k_j + v \cdot r_{i-j}$, terms (a) to (d).

    Args:
        content_bias: u, (H, D).
        position_bias: v, (H, D).
        positions: r, (H, N, D): row n is $W_{k,R} R_n$, the projected sinusoid of distance i - j = first + n,
            where `sinusoidal(torch.arange(first, first + N), ...)` is R.
        first: the distance of the first row. With 0, as in the paper, there is no r for a key after its query:
            such a pair is excluded (its bias is -inf). For attention in both directions it is -(T - 1), when
            T = S.
        scale: c, the score's own: None is 1/sqrt(D), as in `ScaledDot()`; give both the same otherwise.
        offset: query i stands at position offset + i; None is S - T.

    Raises:
        ShapeError: tensors that do not fit each other; or, when it meets a call, another H or D, or too few
            rows for the furthest key.

    Source: Dai et al. 2019 (arXiv:1901.02860), section 3.3.

    >>> import regard
    >>> zero, q = torch.zeros(1, 2), torch.ones(1, 1, 3, 2)
    >>> r = torch.tensor([[[0.0, 0.0], [1.0, 1.0], [2.0, 2.0]]])  # the further, the better
    >>> bias = TransformerXL(zero, zero, r, scale=0.5)
    >>> regard.attention(q, 0 * q, q, bias=bias, return_weights=True).weights[0, 0].dense()
    tensor([[1.0000, 0.0000, 0.0000],
            [0.7311, 0.2689, 0.0000],
            [0.6652, 0.2447, 0.0900]])
    """

    reads_vectors = True

    content_bias: Float[Tensor, "H D"]
    position_bias: Float[Tensor, "H D"]
    positions: Float[Tensor, "H N D"]
    first: int = 0
    scale: float | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        _require_table("TransformerXL", "positions of shape (H, N, D)", self.positions, dims=3)
        heads, _, dim = self.positions.shape
        for name, tensor in (("content_bias", self.content_bias), ("position_bias", self.position_bias)):
            if tensor.shape != (heads, dim):
                raise ShapeError(
                    f"TransformerXL with positions {tuple(self.positions.shape)} needs a {name} of shape "
                    f"{(heads, dim)}, got {tuple(tensor.shape)}"
                )

    def learned(self) -> tuple[Tensor, ...]:
        """u, v and r, where they take a gradient."""
        return tuple(t for t in (self.content_bias, self.position_bias, self.positions) if t.requires_grad)

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        """Resolve the offset; heads and rows enough for the call."""
        _require_heads("TransformerXL", "heads in its positions", self.positions.shape[0], sizes)
        offset = _offset(self.offset, sizes)
        furthest, rows = offset + sizes.queries - 1, self.positions.shape[1]
        if furthest >= self.first + rows:
            raise ShapeError(
                f"TransformerXL needs positions up to distance {furthest}, from the last query to the first key: "
                f"{furthest - self.first + 1} rows from distance {self.first} on, got {rows}"
            )
        u, v, r = (t.to(device) for t in (self.content_bias, self.position_bias, self.positions))
        return replace(self, content_bias=u, position_bias=v, positions=r, offset=offset)

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        """Terms (b), (c) and (d); the products with every r are made once per query, and read by distance."""
        _require_width("TransformerXL", "positions", self.positions, query)
        each = head[..., 0]  # (H, 1), or (N, 1, 1) for a choice of heads
        u, v = (t.to(query.dtype)[each] for t in (self.content_bias, self.position_bias))
        r = self.positions.to(query.dtype)[each[..., 0]]
        products = _scaled(query + v, self.scale) @ r.mT
        row = i + _bound(self.offset) - j - self.first
        near = _read(products, row.clamp(0, r.shape[-2] - 1))
        return near.masked_fill(row < 0, -torch.inf) + _scaled(u, self.scale) @ key.mT

    def __str__(self) -> str:
        return "Transformer-XL's relative positions"


def _read(products: Tensor, index: Tensor) -> Tensor:
    """products[..., i, index[i, j]]."""
    return products.gather(-1, index.expand(*products.shape[:-1], index.shape[-1]))


def _scaled(vectors: Tensor, scale: float | None) -> Tensor:
    return vectors * (vectors.shape[-1] ** -0.5 if scale is None else scale)


# -- checks ------------------------------------------------------------------------------------------------


def _offset(offset: int | None, sizes: Sizes) -> int:
    return sizes.keys - sizes.queries if offset is None else offset


def _bound(offset: int | None) -> int:
    if offset is None:
        raise ArgumentError("this bias has not met a call yet: bind it, or give it an offset")
    return offset


def _require_heads(name: str, what: str, got: int, sizes: Sizes) -> None:
    if got != sizes.heads:
        raise ShapeError(f"{name} needs one for each of the query's {sizes.heads} heads, got {got} {what}")


def _require_table(name: str, what: str, table: Tensor, *, dims: int) -> None:
    if table.dim() != dims or not table.is_floating_point() or 0 in table.shape:
        raise ShapeError(f"{name} takes a float tensor {what}, got {table.dtype} of shape {tuple(table.shape)}")


def _require_width(name: str, what: str, table: Tensor, query: Tensor) -> None:
    if table.shape[-1] != query.shape[-1]:
        raise ShapeError(f"{name} needs {what} as wide as the query, {query.shape[-1]}, got {tuple(table.shape)}")
