"""Edits before the softmax: a bias of keys, the logarithm of a factor, a mask of pairs."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch
from torch import Tensor

from regard.call.biases.base import Bias, DenseBias
from regard.call.biases.combined import OfQueries
from regard.call.masks.base import AXES, DenseMask, Mask
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes
from regard.edits.base import (
    CallPlace,
    Edit,
    Positions,
    check_axes,
    indicator,
    is_all,
    number_or_tensor,
    of_keys,
    where,
)
from regard.edits.edited_weights import EditedWeights
from regard.errors import ArgumentError


@dataclass(frozen=True, slots=True, eq=False)
class AddBias(Edit):
    r"""Add a bias to the scores of chosen keys: $s_{ij} + b_j$ before the softmax.

    A tensor with `requires_grad` is learned: a steering vector on attention.

    Args:
        bias: a number, a tensor (n,) with one for each chosen key, or (h, n) with one for each chosen head and key.
        keys: a number or indices (negative ones count from the newest key), a slice (cropped to existing keys), a bool
            tensor (S,), or (B, S) for each row of the batch. Counted from the first key of the whole sequence, also in
            a generation. None for all.
        queries: counted in the same way; None for all.
        heads: numbered as in the maps of a watch; None for all.
        batch: rows of the batch; None for all.

    Raises:
        ArgumentError: a number is not finite, or something cannot choose positions.

    >>> import regard, torch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(0 * x, x, x)
    >>> model = Block()
    >>> with regard.edit(model, {"": AddBias(torch.tensor([1.0, 2.0]), keys=slice(0, 2))}):
    ...     model(torch.eye(3))[0]
    tensor([0.2447, 0.6652, 0.0900])
    """

    bias: float | Tensor
    keys: Positions = None
    queries: Positions = None
    heads: Positions = None
    batch: Positions = None

    def __post_init__(self) -> None:
        number_or_tensor(self.bias, "a bias")
        check_axes(self)

    def apply(self, weights: EditedWeights, at: CallPlace) -> EditedWeights:
        bias = bias_of(self.bias, self, at, "bias")
        if bias is None or is_all(self.bias, 0.0):
            return weights
        return weights.biased(bias, f"bias on{where(self) or ' all keys'}")


@dataclass(frozen=True, slots=True, eq=False)
class Reweight(Edit):
    r"""Multiply the weights of chosen keys by a factor, each row scaled so it keeps its sum.

    $P'_{ij} = a_j P_{ij} / \sum_l a_l P_{il}$, a bias of $\log a$: it runs in the fused kernel. The factor 0 is a
    `Knockout` of these keys, 1 changes nothing. PASTA multiplies the other tokens by 0.01, which equals a factor of 100
    for the stressed tokens.

    Args:
        keys: as in `AddBias`.
        factor: a number of at least 0, a tensor (n,) above 0 with one for each chosen key, or (h, n) with one for each
            chosen head and key.
        queries: as in `AddBias`.
        heads: see `AddBias`.
        batch: see `AddBias`.

    Raises:
        ArgumentError: a factor is not finite or below 0, or something cannot choose positions; when a call runs: its
            weights are not made by a softmax.

    Source: PASTA, Zhang et al. 2023 (arXiv:2311.02262), equation 2; a bias of log a in place of scaling and
    renormalising.

    >>> import regard, torch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(0 * x, x, x)
    >>> model = Block()
    >>> with regard.edit(model, {"": Reweight(keys=0, factor=2.0)}):
    ...     model(torch.eye(3))[0]
    tensor([0.5000, 0.2500, 0.2500])
    """

    keys: Positions
    factor: float | Tensor
    queries: Positions = None
    heads: Positions = None
    batch: Positions = None

    def __post_init__(self) -> None:
        number_or_tensor(self.factor, "a factor", least=0.0)
        if isinstance(self.factor, Tensor) and bool((self.factor.detach() == 0).any()):
            raise ArgumentError("the factors of a tensor must be above 0: cut the other keys by a Knockout")
        check_axes(self)

    def apply(self, weights: EditedWeights, at: CallPlace) -> EditedWeights:
        if not isinstance(weights.call.normalization, Softmax):
            raise ArgumentError(
                f"{at}: its weights are made by {weights.call.normalization}, and only a softmax turns a factor into a "
                "bias: use Knockout, ScaleHeads or ReplaceWeights here"
            )
        if is_all(self.factor, 0.0):
            keys = slice(None) if self.keys is None else self.keys
            return Knockout(keys, queries=self.queries, heads=self.heads, batch=self.batch).apply(weights, at)
        bias = self.factor.log() if isinstance(self.factor, Tensor) else math.log(self.factor)
        made = bias_of(bias, self, at, "factor")
        if made is None or is_all(self.factor, 1.0):
            return weights
        shown = f"{self.factor:g}" if not isinstance(self.factor, Tensor) else "a tensor"
        return weights.biased(made, f"times {shown} on{where(self) or ' all keys'}, by a bias")


def bias_of(value: float | Tensor, edit: "AddBias | Reweight", at: CallPlace, what: str) -> Bias | None:
    queries = at.chosen(edit.queries, "query")
    numbers = of_keys(value, at, edit.keys, edit.heads, edit.batch, what)
    if numbers is None or (queries is not None and not len(queries.local)):
        return None
    bias = DenseBias(numbers)
    if queries is None or len(queries.local) == at.sizes.queries:
        return bias
    rows = indicator(queries, at.sizes.queries, at.device)
    assert rows is not None
    return OfQueries(bias, rows, tuple(sorted(queries.local.tolist())))


Edges = Sequence[tuple[int, int]] | Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None


@dataclass(frozen=True, slots=True, eq=False)
class Knockout(Edit):
    """Mask edges: the chosen queries do not attend to the chosen keys; each row is rescaled to its sum.

    A row without a key left is exactly 0, and so is its output; the report counts such rows.

    Args:
        keys: as in `AddBias`. Every chosen query loses every chosen key.
        queries: counted from the first of the whole sequence; None for all.
        heads: as in `AddBias`; None for all.
        batch: rows of the batch; None for all.
        edges: in place of keys and queries: pairs (query, key), or a function (batch, head, query, key) -> bool on
            index tensors that broadcast, as in `regard.predicate`, True for masked edges.

    Raises:
        ArgumentError: nothing is chosen, or edges together with keys or queries; when a call runs: a position is
            outside it.

    Source: attention knockout, Geva et al. 2023 (arXiv:2304.14767), section 5.

    >>> import regard, torch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(0 * x, x, x)
    >>> model = Block()
    >>> with regard.edit(model, {"": Knockout(keys=0, queries=[1, 2])}):
    ...     model(torch.eye(3))
    tensor([[0.3333, 0.3333, 0.3333],
            [0.0000, 0.5000, 0.5000],
            [0.0000, 0.5000, 0.5000]])
    """

    keys: Positions = None
    queries: Positions = None
    heads: Positions = None
    batch: Positions = None
    edges: Edges = None

    def __post_init__(self) -> None:
        check_axes(self)
        if self.edges is None:
            if self.keys is None and self.queries is None:
                raise ArgumentError(
                    "Knockout() needs keys, queries or edges to cut; ScaleHeads(heads, 0) silences heads"
                )
            return
        if self.keys is not None or self.queries is not None:
            raise ArgumentError("Knockout() takes edges, or keys and queries, not both")
        if not callable(self.edges):
            object.__setattr__(self, "edges", _pairs(self.edges))

    def apply(self, weights: EditedWeights, at: CallPlace) -> EditedWeights:
        mask = self._product(at) if self.edges is None else self._edges(at)
        if mask is None:
            return weights
        shown = "" if self.edges is None else f" {len(self.edges)} edges" if not callable(self.edges) else " edges"
        return weights.masked(mask, f"cut{shown}{where(self)}, by a mask")

    def _product(self, at: CallPlace) -> Mask | None:
        queries = at.chosen(self.queries, "query")
        numbers = of_keys(1.0, at, self.keys, self.heads, self.batch, "mask")
        if numbers is None or (queries is not None and not len(queries.local)):
            return None
        cut = numbers > 0
        rows = indicator(queries, at.sizes.queries, at.device)
        if rows is None or bool(rows.all()):
            return DenseMask(~cut)
        return KnockedOutBlock.of(rows, cut)

    def _edges(self, at: CallPlace) -> Mask | None:
        sizes, device = at.sizes, at.device
        heads = indicator(at.chosen(self.heads, "head"), sizes.heads, device)
        batch = indicator(at.chosen(self.batch, "batch"), sizes.flat_batch, device)
        edges = self.edges
        if callable(edges):
            return KnockedOutEdges(edges, at.first_query, at.first_key, heads, batch)
        assert edges is not None
        found = [(q - at.first_query, k - at.first_key) for q, k in _existing(edges, at)]
        found = [(q, k) for q, k in found if q >= 0 and k >= 0]
        if not found:
            at.missing.append("edge")
            return None
        return KnockedOutPairs.of(found, sizes, device, heads, batch)


def _pairs(edges: object) -> tuple[tuple[int, int], ...]:
    rows = edges.tolist() if isinstance(edges, Tensor) else edges
    try:
        pairs = tuple((query, key) for query, key in rows)  # type: ignore[attr-defined]
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"edges are pairs (query, key) or a function; got {edges!r}") from error
    if not pairs or not all(isinstance(n, int) and not isinstance(n, bool) for pair in pairs for n in pair):
        raise ArgumentError(f"edges are at least one pair (query, key) of integers, or a function; got {edges!r}")
    return pairs


def _existing(edges: Sequence[tuple[int, int]], at: CallPlace) -> list[tuple[int, int]]:
    """The edges with positions from the first; negative ones counted from the end."""
    found = []
    for pair in edges:
        placed = []
        for n, axis, end in zip(pair, ("query", "key"), (at.queries.stop, at.keys.stop), strict=True):
            if not -end <= n < end:
                raise ArgumentError(
                    f"{at}: there is no {axis} {n} for the edge {pair}: the last one so far is {end - 1}"
                )
            placed.append(n + end if n < 0 else n)
        found.append((placed[0], placed[1]))
    return found


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KnockedOutBlock(Mask):
    rows: Tensor
    """bool (T)"""
    cut: Tensor
    """bool (B or 1, H or 1, 1, S)"""
    rows_before: tuple[int, ...]
    """How many chosen queries there are before each query, and in all."""
    keys_before: tuple[int, ...]
    """How many chosen keys there are before each key, and in all."""

    @classmethod
    def of(cls, rows: Tensor, cut: Tensor) -> "KnockedOutBlock":
        keys = cut.flatten(0, 2).any(0)
        return cls(rows, cut, tuple(accumulate(rows.tolist(), initial=0)), tuple(accumulate(keys.tolist(), initial=0)))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        zero = torch.zeros_like(batch)
        where_ = zero if len(self.cut) == 1 else batch, zero if self.cut.shape[1] == 1 else head
        return ~(self.rows[query] & self.cut[(*where_, zero, key)])

    def depends_on(self) -> frozenset[str]:
        differing = {axis for axis, n in zip(("batch", "head"), self.cut.shape, strict=False) if n > 1}
        return frozenset({"query", "key", *differing})

    def covers(self, rows: range, columns: range) -> bool:
        return _count(self.rows_before, rows) == 0 or _count(self.keys_before, columns) == 0

    def __str__(self) -> str:
        return f"without {self.keys_before[-1]} keys for {self.rows_before[-1]} queries"


def _count(before: tuple[int, ...], where_: range) -> int:
    return before[where_.stop] - before[where_.start] if where_ else 0


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KnockedOutPairs(Mask):
    codes: Tensor
    """query * S + key of each (n,)."""
    keys: int
    heads: Tensor | None
    """The masked heads, bool (H); None for all."""
    batch: Tensor | None
    """The masked rows of the batch, bool (B); None for all."""
    pairs: tuple[tuple[int, int], ...]

    @classmethod
    def of(
        cls, pairs: list[tuple[int, int]], sizes: Sizes, device: torch.device, heads: Tensor | None,
        batch: Tensor | None,
    ) -> "KnockedOutPairs":  # fmt: skip
        codes = torch.tensor([q * sizes.keys + k for q, k in pairs], device=device)
        return cls(codes, sizes.keys, heads, batch, tuple(pairs))

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cut = torch.isin(query * self.keys + key, self.codes)
        return ~_in_flat_heads(cut, self.heads, self.batch, head, batch)

    def depends_on(self) -> frozenset[str]:
        return _axes(self.heads, self.batch)

    def covers(self, rows: range, columns: range) -> bool:
        return not any(q in rows and k in columns for q, k in self.pairs)

    def __str__(self) -> str:
        return f"without {len(self.pairs)} pairs"


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class KnockedOutEdges(Mask):
    function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    first_query: int
    first_key: int
    heads: Tensor | None
    batch: Tensor | None

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        cut = self.function(batch, head, query + self.first_query, key + self.first_key)
        if not isinstance(cut, Tensor) or cut.dtype != torch.bool:
            kind = str(cut.dtype) if isinstance(cut, Tensor) else type(cut).__name__
            raise ArgumentError(f"the function of Knockout(edges=...) returns a bool tensor, True = cut; got {kind}")
        return ~_in_flat_heads(cut, self.heads, self.batch, head, batch)

    def depends_on(self) -> frozenset[str]:
        return AXES

    def __str__(self) -> str:
        return "without the edges that a function names"


def _axes(heads: Tensor | None, batch: Tensor | None) -> frozenset[str]:
    some = {axis for axis, chosen in (("head", heads), ("batch", batch)) if chosen is not None}
    return frozenset({"query", "key", *some})


def _in_flat_heads(cut: Tensor, heads: Tensor | None, batch: Tensor | None, head: Tensor, row: Tensor) -> Tensor:
    cut = cut if heads is None else cut & heads[head]
    return cut if batch is None else cut & batch[row]
