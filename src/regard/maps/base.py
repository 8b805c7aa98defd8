"""What any lazy map can be asked: blocks, products, statistics, choices."""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Self

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError, TooLargeError
from regard.maps import statistics as st
from regard.maps.bins import Bins
from regard.maps.indices import expand_ellipsis, positions
from regard.maps.statistics import TopK
from regard.maps.tiles import Source, Statistic, one_pass
from regard.mechanisms.byte_size import human

if TYPE_CHECKING:
    from regard.maps.spectrum import Spectrum

DENSE_LIMIT_BYTES = 2**30
Summary = dict[str, "Tensor | TopK"]
STATISTICS = (
    "received", "entropy", "participation", "distance", "max", "argmax", "topk", "quantile_mass",
    "pooled", "pooled_mean", "pooled_sum", "pooled_max",
)  # fmt: skip
"""What `summary` knows by name."""


class LazyMap(ABC):
    """Weights P of shape (batch..., H, T, S) that are computed where they are read, and what can be asked of them.

    Everything is exact, and in memory linear in T and S but for `dense()`. Smooth statistics carry gradients to
    the query and key, also in linear memory, so that they serve as losses. Rows with no key are exactly 0 in every
    statistic, unlike in libraries whose masked rows are uniform.
    """

    @property
    @abstractmethod
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 input."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where the factors are."""

    @abstractmethod
    def _source(self) -> Source:
        """Where tiles of the weights come from."""

    @abstractmethod
    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        """The map of some cells, flat indices of the leading dimensions, laid out as `leading`."""

    @abstractmethod
    def _product(self, x: Tensor) -> Tensor:
        """P x for x (S, N) or (..., S, N), laid out as the map."""

    @abstractmethod
    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        """A statistic (cells, ...) by products with the whole map, or None where it takes tiles."""

    # -- what it is ------------------------------------------------------------------------------------

    @property
    def leading(self) -> tuple[int, ...]:
        """(batch..., H): the dimensions before queries and keys."""
        return tuple(self.shape[:-2])

    @property
    def ndim(self) -> int:
        """The number of dimensions."""
        return len(self.shape)

    @property
    def dense_bytes(self) -> int:
        """What `dense()` would allocate."""
        return math.prod(self.shape) * self.dtype.itemsize

    def __len__(self) -> int:
        """The size of the first dimension."""
        return self.shape[0]

    # -- blocks ----------------------------------------------------------------------------------------

    def __getitem__(self, index: Any) -> "Self | Tensor":
        """A map of some heads, or a block of weights. See the class."""
        index = expand_ellipsis(index if isinstance(index, tuple) else (index,), self.ndim)
        lead, pair = index[: self.ndim - 2], index[self.ndim - 2 :]
        chosen = self._choose_leading(lead)
        if all(isinstance(i, slice) and i == slice(None) for i in pair):
            return chosen
        rows, columns = (
            positions(i, n, name, self.device)
            for i, n, name in zip(pair, self.shape[-2:], ("query", "key"), strict=True)
        )
        weights = chosen.block(rows, columns)
        if isinstance(pair[0], int):
            weights = weights[..., 0, :]
        return weights[..., 0] if isinstance(pair[1], int) else weights

    def block(self, rows: range | Tensor, columns: range | Tensor, *, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """The weights of some queries and keys, (batch..., H, t, s): the outer block of the two.

        Raises:
            TooLargeError: the block would take more than `limit_bytes`.
        """
        cost = math.prod(self.leading) * len(rows) * len(columns) * self.dtype.itemsize
        if cost > limit_bytes:
            raise TooLargeError(
                f"{len(rows)} x {len(columns)} weights of a map {tuple(self.shape)} take {human(cost)}, above the "
                f"limit of {human(limit_bytes)}: read fewer rows at a time, or call block() or dense() with a "
                "higher limit_bytes"
            )
        source = self._source()
        weights = source.part(range(source.cells))(rows, columns).weights
        return weights.reshape(*self.leading, *weights.shape[-2:])

    def dense(self, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """All of P as a tensor of shape (batch..., H, T, S).

        Raises:
            TooLargeError: it would take more than `limit_bytes`.
        """
        return self.block(range(self.shape[-2]), range(self.shape[-1]), limit_bytes=limit_bytes)

    # -- products --------------------------------------------------------------------------------------

    def __matmul__(self, other: Tensor) -> Tensor:
        """P @ x for x of shape (S, N) or (batch..., H, S, N); of an `AttentionMap` also (batch..., G, S, N).

        Raises:
            ShapeError: x does not fit the map.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
        >>> weights @ torch.tensor([[1.0], [0.0], [0.0]])
        tensor([[0.4711],
                [0.2645],
                [0.2645]])
        """
        keys = self.shape[-1]
        if other.dim() < 2 or other.shape[-2] != keys:
            raise ShapeError(
                f"map @ x needs x of shape (..., {keys}, N) for a map {tuple(self.shape)}, got {tuple(other.shape)}"
            )
        return self._product(other)

    @property
    def mT(self) -> "Transposed":
        """The transposed map, for `map.mT @ x`: what every key receives of x.

        >>> import regard
        >>> q = torch.zeros(2, 1)
        >>> weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        >>> weights.mT @ torch.tensor([[1.0], [0.5]])
        tensor([[1.2500],
                [0.2500]])
        """
        return Transposed(self)

    def _transposed_product(self, other: Tensor) -> Tensor:
        queries = self.shape[-2]
        if other.dim() < 2 or other.shape[-2] != queries:
            raise ShapeError(
                f"map.mT @ x needs x of shape (..., {queries}, N) for a map {tuple(self.shape)}, "
                f"got {tuple(other.shape)}"
            )
        return self._laid_out(self._ask(st.TransposedProduct(self._values(other)))[0].mT)

    def _values(self, x: Tensor) -> Tensor:
        """x (cells or 1, length, N) in the map's dtype."""
        tail = x.shape[-2:]
        if x.dim() == 2:
            return x.to(self.dtype)[None]
        try:
            return x.expand(*self.leading, *tail).reshape(-1, *tail).to(self.dtype)
        except RuntimeError as error:
            raise ShapeError(
                f"values of shape {tuple(x.shape)} do not broadcast to {(*self.leading, *tail)}"
            ) from error

    # -- statistics ------------------------------------------------------------------------------------

    def received(self, reduce: Literal["sum", "mean"] = "sum") -> Tensor:
        r"""The attention that each key gets: $\sum_i P_{ij}$, (batch..., H, S), in [0, T].

        Args:
            reduce: "sum", or "mean" for the sum divided by T, in [0, 1].

        Under softmax the sums add up to the number of live queries. One fused call for softmax of dot products.

        Raises:
            ArgumentError: another `reduce`.

        >>> import regard
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.received()
        tensor([1.8333, 0.8333, 0.3333])
        """
        if reduce not in ("sum", "mean"):
            raise ArgumentError(f"reduce must be 'sum' or 'mean', got {reduce!r}")
        (sums,) = self._ask(st.Received())
        return self._laid_out(sums if reduce == "sum" else sums / self.shape[-2])

    def entropy(self) -> Tensor:
        r"""How spread each query's attention is: $-\sum_j P_{ij} \ln P_{ij}$ in nats, (batch..., H, T).

        In [0, ln S] for rows that sum to 1, with 0 ln 0 = 0; exactly 0 for rows with no key. Of weights that do
        not sum to 1 (a sink, sigmoid, kernels as they are) it is the same sum. One fused call for softmax of dot
        products.

        >>> import regard
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.entropy()
        tensor([0.0000, 0.6931, 1.0986])
        """
        return self._laid_out(self._ask(st.Entropy())[0])

    def participation(self) -> Tensor:
        r"""How many keys take part in each query's attention: $(\sum_j P_{ij})^2 / \sum_j P_{ij}^2$, (batch..., H, T).

        The participation ratio, in [1, S]: 1 where one key has all, n where n keys share alike; 0 for rows with no
        key. It does not change if a row is scaled, so that a sink does not count. One fused call for softmax of dot
        products. Its inverse is the sum of squares, of which exp(-entropy) is the counterpart for Shannon.

        Source: Bell & Dean 1970 (the participation ratio); as a diversity, Simpson 1949.

        >>> import regard
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.participation()
        tensor([1.0000, 2.0000, 3.0000])
        """
        return self._laid_out(participation(*self._ask(st.Moments())))

    def expected(self, f: Tensor | Callable[[Tensor], Tensor]) -> Tensor:
        r"""The mean of a function of the key: $\sum_j P_{ij} f(j)$, (batch..., H, T) or (batch..., H, T, N).

        Args:
            f: values (S,) or (S, N), or a function from positions (S,) to them. Its gradient flows too.

        In the range of f for rows that sum to 1; 0 for rows with no key. One fused call.

        Raises:
            ShapeError: f is neither (S,) nor (S, N).

        >>> import regard
        >>> q = torch.zeros(3, 1)
        >>> weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        >>> weights.expected(lambda j: j)
        tensor([0.0000, 0.5000, 1.0000])
        """
        keys = self.shape[-1]
        values = st.positions(f, keys, self.device).to(self.device, self.dtype)
        if values.dim() not in (1, 2) or values.shape[0] != keys:
            raise ShapeError(
                f"expected(f) needs one number or one vector for each of {keys} keys: shape ({keys},) or ({keys}, N), "
                f"got {tuple(values.shape)}"
            )
        means = self @ (values[:, None] if values.dim() == 1 else values)
        return means[..., 0] if values.dim() == 1 else means

    def distance(self, offset: int | None = None) -> Tensor:
        r"""How far each query looks: $\sum_j P_{ij} |i + o - j|$ in positions, (batch..., H, T).

        Args:
            offset: o: query i stands at position o + i. None aligns the last query with the last key (S - T), as
                `causal()` does.

        In [0, S + T); 0 for rows with no key. In float32 a product over S keys errs by about 1e-7 S, which is the
        way taken under a causal mask; tiles err by 1e-7 of the distance itself.

        >>> import regard
        >>> q = torch.zeros(3, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.distance()
        tensor([0.0000, 0.5000, 1.0000])
        """
        offset = self.shape[-1] - self.shape[-2] if offset is None else offset
        return self._laid_out(self._ask(st.Distance(offset))[0])

    def max(self) -> Tensor:
        """The largest weight of each query, (batch..., H, T), in [0, 1] under softmax. Tiles.

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.max()
        tensor([0.4711, 0.4711, 0.4711])
        """
        return self._laid_out(self._ask(st.Largest())[0])

    def argmax(self) -> Tensor:
        """The first key that has the largest weight of each query, (batch..., H, T); -1 for rows with no key. Tiles.

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.argmax()
        tensor([0, 1, 2])
        """
        return self._laid_out(self._ask(st.ArgLargest())[0])

    def topk(self, k: int) -> TopK:
        """The k largest weights of each query and their keys, (batch..., H, T, k) each, from the largest down. Tiles.

        Where fewer than k keys have a weight, the rest is 0 with the index -1. The values carry gradients.

        Raises:
            ArgumentError: k is not in [1, S].

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.topk(1)
        TopK(values=tensor([[0.4711],
            [0.4711],
            [0.4711]]), indices=tensor([[0],
            [1],
            [2]]))
        """
        return self._topk(self._ask(self._top_weights(k)))

    def quantile_mass(self, p: float) -> Tensor:
        """How many keys hold the share p of each query's attention, at the least: (batch..., H, T) of int64. Tiles.

        In [1, S]; 0 for rows with no key. The mass of a row is the sum of its weights.

        Raises:
            ArgumentError: p is not in (0, 1].

        >>> import regard
        >>> q = torch.zeros(4, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.quantile_mass(0.6)
        tensor([1, 2, 2, 3])
        """
        return self._laid_out(self._ask(self._quantile(p))[0])

    def pooled(self, rows: int, columns: int, how: Literal["mean", "sum", "max"] = "mean") -> Tensor:
        """The map as a picture of at most rows x columns blocks, exact: (batch..., H, rows, columns).

        Args:
            rows: blocks of queries; a map of fewer queries keeps its own T.
            columns: blocks of keys, in the same way.
            how: "sum" of the weights of a block, "max" for the largest, or "mean" for the sum divided by the number
                of pairs in the block, those that are masked and rows with no key included.

        Blocks differ by one in size at the most, the larger ones first, as `torch.tensor_split` cuts. All three
        carry gradients.

        Raises:
            ArgumentError: fewer than 1 row or column, or another `how`.

        >>> import regard
        >>> q = torch.zeros(4, 1)
        >>> regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights.pooled(2, 2, "sum")
        tensor([[2.0000, 0.0000],
                [1.1667, 0.8333]])
        """
        return self._laid_out(self._ask(self._grid(rows, columns, how))[0])

    def summary(
        self,
        *names: str,
        k: int = 8,
        p: float = 0.9,
        rows: int = 256,
        columns: int = 256,
        how: Literal["mean", "sum", "max"] = "mean",
    ) -> Summary:
        """Several statistics by name, from one pass over the map.

        Args:
            names: of received, entropy, participation, distance, max, argmax, topk, quantile_mass, pooled, and
                pooled_mean, pooled_sum, pooled_max; none means received, entropy, topk and pooled.
            k: for topk.
            p: for quantile_mass.
            rows: for pooled.
            columns: for pooled.
            how: for pooled.

        Raises:
            ArgumentError: an unknown name, or an argument that the statistic refuses.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
        >>> summary = weights.summary("received", "topk", k=1)
        >>> summary["received"], summary["topk"].indices
        (tensor([1., 1., 1.]), tensor([[0],
            [1],
            [2]]))
        """
        names = names or ("received", "entropy", "topk", "pooled")
        wanted = self._named(names, k=k, p=p, rows=rows, columns=columns, how=how)
        asked = list(dict.fromkeys(wanted.values()))
        answers = dict(zip(asked, self._ask_all(asked), strict=True))
        return {name: self._finished(name, answers[statistic]) for name, statistic in wanted.items()}

    def _named(
        self, names: Sequence[str], *, k: int, p: float, rows: int, columns: int, how: Literal["mean", "sum", "max"]
    ) -> dict[str, Statistic]:
        """The statistics of those names. See `summary`.

        Raises:
            ArgumentError: an unknown name, or an argument that the statistic refuses.
        """
        makers: dict[str, Callable[[], Statistic]] = {
            "received": st.Received,
            "entropy": st.Entropy,
            "participation": st.Moments,
            "distance": lambda: st.Distance(self.shape[-1] - self.shape[-2]),
            "max": st.Largest,
            "argmax": st.ArgLargest,
            "topk": lambda: self._top_weights(k),
            "quantile_mass": lambda: self._quantile(p),
            "pooled": lambda: self._grid(rows, columns, how),
            **{f"pooled_{kind}": partial(self._grid, rows, columns, kind) for kind in ("mean", "sum", "max")},
        }
        check_names(names, "summary()")
        return {name: makers[name]() for name in names}

    def singular_values(self, k: int, *, iterations: int = 4, seed: int = 0) -> "Spectrum":
        """The k largest singular values of each head's map, with how far they can be off. See `Spectrum`.

        Args:
            k: how many, in [1, min(T, S)].
            iterations: blocks of the Krylov space beyond the first; each costs two products with k + 4 columns.
            seed: of the random block.

        By randomised block Krylov iteration, in memory linear in T and S. It takes no gradient.

        Raises:
            ArgumentError: k out of range, or negative iterations.

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.singular_values(2).values
        tensor([1.0000, 0.2066])
        """
        from regard.maps.spectrum import singular_values

        return singular_values(self, k, iterations=iterations, seed=seed)

    # -- other maps ------------------------------------------------------------------------------------

    def select(self, *, heads: Any = None, rows: Any = None, columns: Any = None) -> "LazyMap":
        """A map of some heads, queries or keys, still lazy.

        Args:
            heads: an integer, slice or index tensor for the dimension before queries and keys.
            rows: a slice or a 1-D index tensor (integers or bools) of queries.
            columns: the same of keys. Weights stay as they were: rows need not sum to 1 then.

        Raises:
            ShapeError: an index out of range, or a choice of heads in a map without any.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(4)] * 3, return_weights=True).weights
        >>> weights.select(rows=slice(1, 3), columns=torch.tensor([0, 3])).received()
        tensor([0.4302, 0.4302])
        """
        from regard.maps.derived import Selection

        if heads is not None and self.ndim < 3:
            raise ShapeError(f"a map {tuple(self.shape)} has no heads to choose from: with_heads() gives it one")
        chosen = self if heads is None else self._choose_leading((*(slice(None),) * (self.ndim - 3), heads))
        if rows is None and columns is None:
            return chosen
        places = []
        for index, length, name in zip((rows, columns), self.shape[-2:], ("query", "key"), strict=True):
            whole = slice(None) if index is None else slice(index, index + 1) if isinstance(index, int) else index
            places.append(positions(whole, length, name, self.device))
            if not len(places[-1]):
                raise ShapeError(f"a selection needs at least one {name}, got none of {length}")
        return Selection(chosen, *places)

    def average(self, dim: int = -3, *, weights: Tensor | Sequence[float] | None = None) -> "LazyMap":
        r"""The mean of the map over heads, or over another dimension before queries and keys; still lazy.

        Args:
            dim: which, counted as in `shape`; -3 is the heads. `map.select(heads=...)` takes some of them first.
            weights: one for each; they are divided by their sum. None weighs all alike.

        Sums and products of the average are the averages of the heads' own; other statistics go by tiles.

        Raises:
            ArgumentError: a dimension that is not before queries and keys, or not as many weights.

        >>> import regard
        >>> q = torch.randn(2, 4, 5, 3)
        >>> weights = regard.attention(q, q, q, return_weights=True).weights
        >>> torch.allclose(weights.average().dense(), weights.dense().mean(-3))
        True
        """
        from regard.maps.derived import average

        return average(self, dim, weights)

    # -- how it is answered ----------------------------------------------------------------------------

    def _ask(self, statistic: Statistic) -> tuple[Tensor, ...]:
        """The answers (cells, ...) of a statistic, by products where the map can."""
        return self._ask_all([statistic])[0]

    def _ask_all(self, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
        """The answers of several, in one pass: of all, if some of them take tiles whatever the map is."""
        share = len(statistics) > 1 and any(isinstance(s, st.TILES_ONLY) for s in statistics)
        answers = [None if share else self._at_once(statistic) for statistic in statistics]
        missing = [s for s, answer in zip(statistics, answers, strict=True) if answer is None]
        found = iter(one_pass(self._source(), missing) if missing else ())
        return [next(found) if answer is None else answer for answer in answers]

    def _finished(self, name: str, answers: tuple[Tensor, ...]) -> "Tensor | TopK":
        if name == "topk":
            return self._topk(answers)
        if name == "participation":
            return self._laid_out(participation(*answers))
        return self._laid_out(answers[0])

    def _laid_out(self, answer: Tensor) -> Tensor:
        """An answer (cells, ...) with the map's leading dimensions."""
        return answer.reshape(*self.leading, *answer.shape[1:])

    def _topk(self, answers: tuple[Tensor, ...]) -> TopK:
        return TopK(*(self._laid_out(answer) for answer in answers))

    def _top_weights(self, k: int) -> Statistic:
        if not 1 <= k <= self.shape[-1]:
            raise ArgumentError(f"topk needs k in [1, {self.shape[-1]}], the number of keys; got {k}")
        return st.TopWeights(k)

    def _quantile(self, p: float) -> Statistic:
        if not 0 < p <= 1:
            raise ArgumentError(f"quantile_mass needs a share p in (0, 1], got {p}")
        return st.QuantileMass(p)

    def _grid(self, rows: int, columns: int, how: str) -> Statistic:
        if how not in ("mean", "sum", "max"):
            raise ArgumentError(f"how must be 'mean', 'sum' or 'max', got {how!r}")
        queries, keys = self.shape[-2:]
        return st.Pooled(Bins.at_most(rows, queries, "queries"), Bins.at_most(columns, keys, "keys"), how)

    def _choose_leading(self, lead: tuple[Any, ...]) -> Self:
        if all(isinstance(i, slice) and i == slice(None) for i in lead):
            return self
        cells = torch.arange(math.prod(self.leading), device=self.device).view(self.leading)
        try:
            cells = cells[lead]
        except IndexError as error:
            raise ShapeError(f"cannot index a map {tuple(self.shape)} by {lead}: {error}") from error
        return self._choose(cells.reshape(-1), tuple(cells.shape))


def check_names(names: Sequence[str], where: str) -> None:
    """Raise unless all are names of statistics.

    Raises:
        ArgumentError: one is not.
    """
    if unknown := [name for name in names if name not in STATISTICS]:
        raise ArgumentError(f"{where} knows {', '.join(STATISTICS)}; got {', '.join(map(repr, unknown))}")


class Transposed:
    """A map seen from its keys: `map.mT @ x` is P^T x, one fused call for softmax of dot products."""

    def __init__(self, of: LazyMap) -> None:
        self.mT = of

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, S, T)."""
        *leading, queries, keys = self.mT.shape
        return torch.Size((*leading, keys, queries))

    def __matmul__(self, other: Tensor) -> Tensor:
        """P^T x for x of shape (T, N) or (batch..., H, T, N): (batch..., H, S, N).

        Raises:
            ShapeError: x does not fit the map.
        """
        return self.mT._transposed_product(other)

    def dense(self, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """All of P^T, (batch..., H, S, T).

        Raises:
            TooLargeError: it would take more than `limit_bytes`.
        """
        return self.mT.dense(limit_bytes).mT

    def __repr__(self) -> str:
        """What it is of."""
        return f"transposed {self.mT!r}"


def participation(sums: Tensor, squares: Tensor) -> Tensor:
    """sums^2 / squares; 0 where there is nothing."""
    dead = squares == 0
    return (sums.square() / squares.masked_fill(dead, 1.0)).masked_fill(dead, 0.0)
