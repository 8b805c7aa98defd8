"""Biases by the positions and the vectors of query and key.

- Shaw(table): c q_i . table[clip(j - i)], which reads the query;
- Disentangled(keys, queries): c (q_i . K_n + k_j . Q_n), DeBERTa's, which reads query and key.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.relative import (
    bound_offset,
    gather_offsets,
    query_offset,
    require_heads,
    require_table,
    require_width,
    scaled_vectors,
)
from regard.call.shapes import Sizes
from regard.errors import ArgumentError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Shaw(Bias):
    r"""Relative position representations: $b_{ij} = c \, q_i \cdot a_{\mathrm{clip}(j - i, -k, k)}$.

    Together with the score c q_i . k_j this gives the paper's $e_{ij} = c \, q_i \cdot (k_j + a_{ij})$.

    Args:
        table: $a^K$, (2k + 1, D); the first row is the vector of distance -k (the key stands k before the query). All
            heads share the table, as in the paper.
        scale: c, equal to that of the score. The default is 1/sqrt(D), as in `ScaledDot()`.
        offset: query i stands at position offset + i; default S - T.

    The other half of the paper, vectors $a^V$ added to the values (equation 3), is not a bias and is not implemented.

    Raises:
        ShapeError: the table is not 2-D and floating with an odd number of rows; or, in a call, its rows
            are not as wide as the query.

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
        require_table("Shaw", "(2k + 1, D)", self.table, dims=2)
        if self.table.shape[0] % 2 == 0:
            raise ShapeError(f"Shaw's table has 2k + 1 rows, for the distances -k to k; got {self.table.shape[0]}")

    def learned(self) -> tuple[Tensor, ...]:
        return (self.table,) if self.table.requires_grad else ()

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        return replace(self, table=self.table.to(device), offset=query_offset(self.offset, sizes))

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        require_width("Shaw", "table", self.table, query)
        furthest = self.table.shape[0] // 2
        products = scaled_vectors(query, self.scale) @ self.table.to(query.dtype).mT
        distance = (j - i - bound_offset(self.offset)).clamp(-furthest, furthest)
        return gather_offsets(products, distance + furthest)

    def __str__(self) -> str:
        return f"Shaw's relative positions up to {self.table.shape[0] // 2}"


def log_bucket(distance: Integer[Tensor, "*shape"], *, reach: int, max_distance: int) -> Integer[Tensor, "*shape"]:
    r"""A signed distance, kept up to reach / 2, and beyond in logarithmic steps that end at `max_distance`.

    With m = reach / 2, a distance d > m becomes
    $m + \lceil (m - 1) \log(d / m) / \log((d_{max} - 1) / m) \rceil$, with its sign.

    Source: the authors' `make_log_bucket_position`, in float32 there and here, so the buckets match those of
    checkpoints.
    """
    exact, away = reach // 2, distance.abs()
    steps = torch.log(away.clamp(min=exact) / exact) / math.log((max_distance - 1) / exact) * (exact - 1)
    return torch.where(away <= exact, distance, (exact + torch.ceil(steps).long()) * distance.sign())


@dataclass(frozen=True, slots=True, eq=False)
class Disentangled(Bias):
    r"""$b_{hij} = c \, (q_i \cdot K^r_{h,n} + k_j \cdot Q^r_{h,n})$ with $n = \mathrm{clip}(i - j + k, 0, 2k - 1)$.

    Together with the score c q_i . k_j this gives the paper's $\tilde A_{ij}$: content to content, content to position
    (the first term) and position to content (the second).

    Args:
        keys: $K^r$, (H, 2k, D): row k is distance 0, and the rows after it are keys before the query.
        queries: $Q^r$, of the same shape.
        scale: c, equal to that of the score: $1 / \sqrt{3 D}$ in the paper.
        max_distance: beyond k / 2, distances share rows in logarithmic steps up to this one (version 2); by default
            each distance has its own row.
        offset: query i stands at position offset + i; default S - T.

    Raises:
        ShapeError: the tables are not 3-D and floating with 2k rows, or differ; or, in a call, H or D differ.
        ArgumentError: `max_distance` leaves no logarithmic range.

    Source: He et al. 2021 (arXiv:2006.03654), equations 2 to 4; section 5 of arXiv:2111.09543 for version 2 and 3.

    >>> import regard
    >>> q, zeros = torch.ones(1, 1, 3, 1), torch.zeros(1, 4, 1)
    >>> bias = Disentangled(torch.tensor([[[0.0], [0.0], [2.0], [1.0]]]), zeros, scale=1.0)  # ahead, ahead, here, back
    >>> regard.attention(q, 0 * q, q, bias=bias, return_weights=True).weights[0, 0].dense().log()
    tensor([[-0.2395, -2.2395, -2.2395],
            [-1.4076, -0.4076, -2.4076],
            [-1.5514, -1.5514, -0.5514]])
    """

    reads_vectors = True

    keys: Float[Tensor, "H N D"]
    queries: Float[Tensor, "H N D"]
    scale: float | None = None
    max_distance: int | None = None
    offset: int | None = None

    def __post_init__(self) -> None:
        shapes = []
        for table in (self.keys, self.queries):
            require_table("Disentangled", "(H, 2k, D)", table, dims=3)
            shapes.append(tuple(table.shape))
        rows = self.keys.shape[1]
        if shapes[0] != shapes[1] or rows % 2:
            raise ShapeError(f"Disentangled takes two tables of one shape (H, 2k, D), got {shapes[0]} and {shapes[1]}")
        if self.max_distance is not None and not 0 < rows // 4 < self.max_distance - 1:
            raise ArgumentError(
                f"Disentangled with {rows} rows needs a max_distance above {rows // 4 + 1}, and that above 1; got "
                f"{self.max_distance}"
            )

    @property
    def head_count(self) -> int:
        return self.keys.shape[0]

    def learned(self) -> tuple[Tensor, ...]:
        return tuple(table for table in (self.keys, self.queries) if table.requires_grad)

    def bind(self, sizes: Sizes, device: torch.device) -> Bias:
        require_heads("Disentangled", "heads in its tables", self.head_count, sizes)
        keys, queries = self.keys.to(device), self.queries.to(device)
        return replace(self, keys=keys, queries=queries, offset=query_offset(self.offset, sizes))

    def value(self, head: Tensor, i: Tensor, j: Tensor, query: Tensor, key: Tensor) -> Tensor:
        require_width("Disentangled", "tables", self.keys, query)
        reach, distance, each = self.keys.shape[1] // 2, i + bound_offset(self.offset) - j, head[..., 0, 0]
        if self.max_distance is not None:
            distance = log_bucket(distance, reach=reach, max_distance=self.max_distance)
        row = (distance + reach).clamp(0, 2 * reach - 1)
        keys, queries = (table.to(query.dtype)[each].mT for table in (self.keys, self.queries))
        to_position = gather_offsets(scaled_vectors(query, self.scale) @ keys, row)
        return to_position + gather_offsets(scaled_vectors(key, self.scale) @ queries, row.mT).mT

    def __str__(self) -> str:
        return f"DeBERTa's relative positions up to {self.keys.shape[1] // 2}"
