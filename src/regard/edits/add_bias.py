"""Edits that add to scores: a bias of keys, or the logarithm of a factor."""

import math
from dataclasses import dataclass

from torch import Tensor

from regard.call.biases.base import Bias, DenseBias
from regard.call.biases.combined import OfQueries
from regard.call.normalizations import Softmax
from regard.edits.base import Edit, check_axes, indicator, is_all, number_or_tensor, of_keys, where
from regard.edits.call_place import CallPlace, Positions
from regard.edits.edited_weights import EditedWeights
from regard.edits.knockout import Knockout
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
    """The bias of the chosen pairs, or None if the call has none of them."""
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
