"""The interface of every map: blocks, single weights and statistics."""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.shapes import Rows, without_autocast
from regard.errors import ArgumentError, ShapeError, TooLargeError
from regard.maps.indexing import positions
from regard.maps.sources.call import largest_score, log_sum_exp
from regard.maps.sources.combined import shares_of_sizes
from regard.maps.sources.derived import SizeSource
from regard.maps.sources.source import Source, Statistic
from regard.maps.statistics import definitions as st
from regard.maps.statistics.by_name import USUAL, How, Of, Summary, as_summary, by_name, pooled, top_p_count
from regard.maps.statistics.definitions import TopKeys
from regard.maps.statistics.key_sets import Spans, by_spans, kept_mass
from regard.maps.statistics.pooling import Grid
from regard.maps.statistics.tiles import ask, ask_all
from regard.tensors.memory import human

DENSE_LIMIT_BYTES = 2**30
"""The default limit of a block of weights."""


class MapStatistics:
    """The statistics of weights P of shape (batch..., H, T, S), computed on demand.

    Everything is exact, in memory linear in T and S, except `dense()`. Smooth statistics carry gradients to the query
    and key, also in linear memory, for use as losses. Rows without keys are exactly 0 in every statistic, where some
    libraries make them uniform.
    """

    def __init__(self, source: Source) -> None:
        self.source = source

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""
        return self.source.shape

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of all answers: float32, or float64 for float64 input, unless `to` changed it."""
        return self.source.answer_dtype

    @property
    def device(self) -> torch.device:
        """The device of the factors."""
        return self.source.device

    @property
    def leading(self) -> tuple[int, ...]:
        """(batch..., H): the dimensions before queries and keys."""
        return tuple(self.shape[:-2])

    def __len__(self) -> int:
        return self.shape[0]

    def block(self, rows: Rows, columns: Rows, *, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """The weights of some queries and keys, (batch..., H, t, s): the outer block of the two.

        Args:
            rows: a range of queries, or a 1-D tensor of them; negative ones of a tensor count from the end.
            columns: the same for keys.
            limit_bytes: the most bytes of the block.

        Raises:
            ShapeError: a query or a key is out of range.
            TooLargeError: the block would take more than `limit_bytes`.
            NotKeptError: the map has statistics only.
        """
        source, dtype, (*leading, queries, keys) = self.source, self.dtype, self.shape
        if not source.has_blocks:
            source.refuse("a block of weights")
        rows = rows if isinstance(rows, range) else positions(rows, queries, "query", self.device)
        columns = columns if isinstance(columns, range) else positions(columns, keys, "key", self.device)
        for name, asked, length in (("queries", rows, queries), ("keys", columns, keys)):
            if isinstance(asked, range) and (asked.step != 1 or asked.start < 0 or asked.stop > length):
                raise ShapeError(f"a block takes a range of {name} by ones within 0 and {length}, got {asked}")
        cost = math.prod(leading) * len(rows) * len(columns) * dtype.itemsize
        if cost > limit_bytes:
            raise TooLargeError(
                f"{len(rows)} x {len(columns)} weights of a map {tuple(self.shape)} take {human(cost)}, above the "
                f"limit of {human(limit_bytes)}: read fewer rows at a time, or call block() or dense() with a "
                "higher limit_bytes"
            )
        with without_autocast(self.device):
            weights = source.part(range(math.prod(leading)))(rows, columns).weights
        return weights.to(dtype).reshape(*leading, len(rows), len(columns))

    def dense(self, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """All of P as a tensor of shape (batch..., H, T, S).

        Raises:
            TooLargeError: it would take more than `limit_bytes`.
        """
        *_, queries, keys = self.shape
        return self.block(range(queries), range(keys), limit_bytes=limit_bytes)

    def received(self, reduce: Literal["sum", "mean"] = "sum") -> Tensor:
        r"""The attention received by each key: $\sum_i P_{ij}$, (batch..., H, S), in [0, T].

        Args:
            reduce: "sum", or "mean" for the sum divided by T, in [0, 1].

        Under softmax the sums add up to the number of live queries. One fused call for softmax of dot products.

        Raises:
            ArgumentError: another `reduce`.

        >>> import regard, torch
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.received()
        tensor([1.8333, 0.8333, 0.3333])
        """
        if reduce not in ("sum", "mean"):
            raise ArgumentError(f"reduce must be 'sum' or 'mean', got {reduce!r}")
        sums = self._say(st.Received())
        return sums if reduce == "sum" else sums / self.shape[-2]

    def entropy(self, of: Of = "value") -> Tensor:
        r"""The spread of each query's attention: $-\sum_j P_{ij} \ln P_{ij}$ in nats, (batch..., H, T).

        For weights with signs, `of="size"` is that of the shares $|P_{ij}| / \sum_j |P_{ij}|$; it goes by tiles.
        In [0, ln S] for rows that sum to 1, with 0 ln 0 = 0; exactly 0 for rows with no key. If weights do not sum to
        1 (with a sink, sigmoid, or kernels without normalisation) it is the same sum. One fused call for softmax of dot
        products.

        >>> import regard, torch
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.entropy()
        tensor([0.0000, 0.6931, 1.0986])
        """
        return self.source.laid_out(ask(self._source_of(of, shares_of_sizes), st.Entropy())[0])

    def participation_ratio(self) -> Tensor:
        r"""The effective number of keys of each query: $(\sum_j P_{ij})^2 / \sum_j P_{ij}^2$, (batch..., H, T).

        The participation ratio, in [1, S]: 1 if one key has all weight, n if n keys have equal shares; 0 for rows
        without keys. Scaling a row does not change it, so a sink has no effect. One fused call for softmax of dot
        products. For rows that sum to 1 its inverse is the sum of squares; exp(-entropy) is Shannon's counterpart.

        Source: Bell & Dean 1970 (the participation ratio); as a diversity, Simpson 1949.

        >>> import regard, torch
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.participation_ratio()
        tensor([1., 2., 3.])
        """
        return self.source.laid_out(ask(self.source, st.ParticipationRatio())[0])

    def distance(self, offset: int | None = None) -> Tensor:
        r"""The mean distance of each query: $\sum_j P_{ij} |i + o - j|$ in positions, (batch..., H, T).

        Args:
            offset: o: query i stands at position o + i. The default S - T aligns the last query with the last key, as
                in `causal()`; rows and columns of a part of a map stand where they do in the whole.

        In [0, S + T); 0 for rows without keys. Under a causal mask it is one product over S keys, with an error of
        about 1e-7 S in float32; otherwise it goes by tiles, with a relative error of 1e-7.

        >>> import regard, torch
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.distance()
        tensor([0.0000, 0.5000, 1.0000])
        """
        if offset is not None:
            return self._say(st.Distance(offset))
        return self._say(st.distance_in(self.source.part_of, self.device))

    def top_keys(self, k: int, of: Of = "value") -> TopKeys:
        """The k largest weights of each query and their keys, (batch..., H, T, k) each, from the largest down. Tiles.

        With `of="size"` they are the largest in absolute value. With fewer than k keys of some weight, the rest is 0
        with the index -1. The values carry gradients.

        Raises:
            ArgumentError: k is not in [1, S].

        >>> import regard, torch
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.top_keys(1)
        TopKeys(values=tensor([[0.4711],
            [0.4711],
            [0.4711]]), indices=tensor([[0],
            [1],
            [2]]))
        """
        source = self.source if of == "value" else self._source_of(of, SizeSource)
        (found,) = ask_all(source, [st.TopWeights.of(k, source.shape[-1])])
        return TopKeys(*map(self.source.laid_out, found))

    def top_p_count(self, p: float) -> Tensor:
        r"""The smallest number of keys with the share p of each query's attention: (batch..., H, T), int64. Tiles.

        The smallest n for which the n largest weights of the row sum to at least $p \sum_j P_{ij}$. In [1, S]; 0 for
        rows without keys. Equal keys count one by one: for n equal weights it is the smallest integer not below p n.
        Weights are summed in float64; a sum within a relative 1e-12 of the share counts as reached. With p = 1 it is
        the number of keys with weights above 0.

        Raises:
            ArgumentError: p is not in (0, 1].

        >>> import regard, torch
        >>> q = torch.zeros(4, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.top_p_count(0.6)
        tensor([1, 2, 2, 3])
        """
        return self._say(top_p_count(p))

    def pooled(self, rows: int, columns: int, how: How = "mean") -> Tensor:
        """The map as a picture of at most rows x columns blocks, exact: (batch..., H, rows, columns).

        Args:
            rows: the most blocks of queries; a map with fewer queries has one block for each.
            columns: the most blocks of keys, in the same way.
            how: "sum" of the weights of a block, "max" for the largest, or "mean" for the sum divided by the number of
                all pairs in the block, masked ones and rows without keys included.

        The sizes of blocks differ by at most one, and the larger blocks come first, as in `torch.tensor_split`. All
        three carry gradients.

        Raises:
            ArgumentError: fewer than 1 row or column is asked, or `how` is unknown.

        >>> import regard, torch
        >>> q = torch.zeros(4, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.pooled(2, 2, "sum")
        tensor([[2.0000, 0.0000],
                [1.1667, 0.8333]])
        """
        queries, keys = self.shape[-2:]
        return self._say(pooled(rows, columns, queries, keys, how))

    def mass(self, mask: Mask | Tensor) -> Tensor:
        r"""The share of each query's weight within a mask: $\sum_{j \in M_i} P_{ij}$, (batch..., H, T).

        Args:
            mask: a mask such as `regard.window(8)` or `regard.lengths(4)`, or a bool tensor of the map's rank, True =
                keep.

        In [0, 1] for rows that sum to 1; 0 for rows without keys. With gradients. Under softmax it is
        $\exp(\mathrm{lse}^M_i - \mathrm{lse}_i)$, one call of the backend under both masks; otherwise tiles.

        Raises:
            ShapeError: the mask does not fit the map.

        >>> import regard, torch
        >>> q = torch.zeros(4, 1)
        >>> weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        >>> weights.mass(regard.lengths(1))
        tensor([1.0000, 0.5000, 0.3333, 0.2500])
        """
        return kept_mass(self.source, mask)

    def spans(self, keys: Spans | None = None, queries: Spans | None = None) -> Tensor:
        r"""Weights between spans of tokens: $\frac{1}{|Q|} \sum_{i \in Q} \sum_{j \in K} P_{ij}$.

        Args:
            keys: (first, stop) of each span K, a list or an integer tensor (N, 2); None makes each key a span.
            queries: the same for Q.

        Returns (batch..., H, spans of queries, spans of keys): sums over the keys of a span and means over its queries,
        the word-level weights of Clark et al. Spans may overlap and may leave tokens out. With gradients. One pass over
        tiles.

        Source: Clark et al. 2019 (arXiv:1906.04341), section 4.1.

        Raises:
            ShapeError: a span is empty or outside the map.

        >>> import regard, torch
        >>> q = torch.zeros(4, 1)
        >>> weights = regard.attention(q, q, q, return_weights=True).weights
        >>> weights.spans(keys=[(0, 1), (1, 4)], queries=[(0, 2), (2, 4)])
        tensor([[0.2500, 0.7500],
                [0.2500, 0.7500]])
        """
        return by_spans(self.source, keys, queries)

    @property
    def lse(self) -> Tensor:
        r"""The log-sum-exp of each query's scores: $\ln \sum_j \exp s_{ij}$, (batch..., H, T); -inf without keys.

        With a sink the sum counts it too. Every weight is $\exp(s_{ij} - \mathrm{lse}_i)$.

        Raises:
            ArgumentError: the map is not from one call under softmax.

        >>> import regard, torch
        >>> q = torch.zeros(4, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.lse
        tensor([0.0000, 0.6931, 1.0986, 1.3863])
        """
        return log_sum_exp(self.source)

    def max_logit(self) -> Tensor:
        r"""The largest score of each query: $\max_j s_{ij}$, (batch..., H, T); -inf for rows without keys. Tiles.

        Scores are scaled, biased and masked, as in the input of the normalization. `max_logit().amax(-1)` is that of
        each head, as in QK-clip. It takes no gradient.

        Source: Kimi Team 2025 (arXiv:2507.20534), section 2.1 (QK-clip).

        Raises:
            ArgumentError: the map is not from one call.

        >>> import regard, torch
        >>> x = 2 * torch.eye(4)
        >>> regard.attention(x, x, x, return_weights=True).weights.max_logit().round(decimals=4)
        tensor([2., 2., 2., 2.])
        """
        return largest_score(self.source)

    def summary(
        self,
        *names: str,
        k: int | None = None,
        p: float = 0.9,
        rows: int = 256,
        columns: int = 256,
        how: How = "mean",
    ) -> Summary:
        """Several statistics by name, from one pass over the map.

        Args:
            names: received, entropy, participation_ratio, distance, top_weight, top_key, top_keys, top_p_count, pooled,
                pooled_mean, pooled_sum or pooled_max; by default received, entropy, top_keys and pooled.
            k: for top_keys; the default is 8, or all keys of a map with fewer.
            p: for top_p_count.
            rows: for pooled.
            columns: for pooled.
            how: for pooled.

        Raises:
            ArgumentError: a name is unknown, or a statistic refuses an argument.

        >>> import regard, torch
        >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
        >>> summary = weights.summary("received", "top_keys", k=1)
        >>> summary["received"], summary["top_keys"].indices
        (tensor([1., 1., 1.]), tensor([[0],
            [1],
            [2]]))
        """
        queries, keys = self.shape[-2:]
        k = min(8, keys) if k is None else k
        wanted = by_name(
            names or USUAL, queries, keys, k=k, p=p, rows=rows, columns=columns, how=how,
            distance=st.distance_in(self.source.part_of, self.device),
        )  # fmt: skip
        return self._told(wanted)

    @property
    def statistics(self) -> Summary:
        """All saved statistics, by name, of a map with statistics only; empty for any other map."""
        return self._told(self.source.kept)

    def grid(self, rows: int, columns: int, how: How = "mean") -> Grid:
        """The grid of the finest picture of at most rows x columns blocks for `pooled`.

        It is the requested grid, with at most one block for each query or key. For a map with statistics only, it is
        the finest such grid among the saved ones, if there is one.

        Raises:
            ArgumentError: fewer than 1 row or column is asked.

        >>> import regard, torch
        >>> q = torch.zeros(5, 1)
        >>> grid = regard.attention(q, q, q, return_weights=True).weights.grid(3, 512)
        >>> grid.rows.ranges(), grid.columns.count
        ([range(0, 2), range(2, 4), range(4, 5)], 5)
        """
        return self.source.grid(Grid.at_most(rows, columns, self.source.queries, self.source.keys), how)

    def _source_of(self, of: Of, sizes: Callable[[Source], Source]) -> Source:
        if of not in ("value", "size"):
            raise ArgumentError(f"of must be 'value' or 'size', got {of!r}")
        return self.source if of == "value" else sizes(self.source)

    def _say(self, statistic: Statistic) -> Tensor:
        return self.source.laid_out(ask(self.source, statistic)[0])

    def _told(self, wanted: Mapping[str, Statistic]) -> Summary:
        asked = list(dict.fromkeys(wanted.values()))
        return as_summary(self.source, wanted, dict(zip(asked, ask_all(self.source, asked), strict=True)))


def row_at(source: Source, index: tuple[Any, ...]) -> Tensor | None:
    """The weights of one query, or one of them, where each dimension before the keys has an integer; else None."""
    place, number, shape = 0, len(index), source.shape
    if not len(shape) - 1 <= number <= len(shape) or not source.has_blocks:
        return None
    for at, length in zip(index, shape, strict=False):
        if type(at) is not int or not -length <= at < length:
            return None
        place = place * length + at % length
    queries, keys = shape[-2:]
    place, column = (place, slice(None)) if number < len(shape) else divmod(place, keys)
    flat_head, row = divmod(place, queries)
    with without_autocast(source.device):
        weights = source.part(range(flat_head, flat_head + 1))(range(row, row + 1), range(keys)).weights
    return weights[0, 0, column].to(source.answer_dtype)
