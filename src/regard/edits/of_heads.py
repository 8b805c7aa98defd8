"""The edits of heads: their output is scaled or silenced, or their weights are replaced."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod

import torch
from torch import Tensor

from regard.edits.base import CallPlace, Edit, Positions, check_axes, is_all, number_or_tensor, rows_of, where
from regard.edits.edited_weights import EditedWeights, Replaced
from regard.errors import ArgumentError, NonFiniteError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.given import given_weights
from regard.maps.sources.source import Source
from regard.watching.watch import Seen


@dataclass(frozen=True, slots=True, eq=False)
class ScaleHeads(Edit):
    r"""Multiply the output of heads by a factor, $a_h P_h V_h$; 0 silences them.

    A watch shows the weights before the product with the values, so its maps are scaled too; `seen.softmax(name)` is
    the plain softmax.

    Args:
        heads: as in `AddBias`; None for all.
        factor: a number, or a tensor (h,) with one for each chosen head, which may take a gradient.
        queries: as in `AddBias`; None for all.
        batch: rows of the batch; None for all.

    Raises:
        ArgumentError: a factor is not finite, or something cannot choose positions.

    Source: head ablation, Michel et al. 2019 (arXiv:1905.10650), section 2.2.

    >>> import regard, torch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> model = Block()
    >>> with regard.edit(model, {"": ScaleHeads(heads=1, factor=0.0)}):
    ...     model(torch.ones(1, 2, 3, 4)).sum(-1)
    tensor([[[4., 4., 4.],
             [0., 0., 0.]]])
    """

    heads: Positions
    factor: float | Tensor
    queries: Positions = None
    batch: Positions = None

    def __post_init__(self) -> None:
        number_or_tensor(self.factor, "a factor")
        check_axes(self)

    def apply(self, weights: EditedWeights, at: CallPlace) -> EditedWeights:
        sizes = at.sizes
        head, query = at.chosen(self.heads, "head"), at.chosen(self.queries, "query")
        rows = at.chosen(self.batch, "batch")
        count = sizes.heads if head is None else head.total
        if isinstance(self.factor, Tensor) and (self.factor.dim() > 1 or self.factor.numel() not in (1, count)):
            raise ShapeError(
                f"{at}: the factor is one number, or one for each of the {count} chosen heads; got "
                f"{tuple(self.factor.shape)}"
            )
        is_empty = any(chosen is not None and not len(chosen.local) for chosen in (head, query, rows))
        if is_empty or is_all(self.factor, 1.0):
            return weights
        given = torch.as_tensor(self.factor, dtype=at.dtype, device=at.device).expand(count)
        factors = given if head is None else given.new_ones(sizes.heads).index_copy(0, head.local, given[head.among])
        factors = torch.where(rows_of(rows, query, at), factors[None, :, None], 1.0)
        shown = f"{self.factor:g}" if not isinstance(self.factor, Tensor) else "a tensor"
        return weights.scaled(factors, f"output times {shown} in{where(self) or ' all heads'}")

    @property
    def needs_positions(self) -> bool:
        return self.queries is not None


OtherWeights = Tensor | AttentionMap | Seen | Mapping[tuple[str, int], AttentionMap]


@dataclass(frozen=True, slots=True, eq=False)
class ReplaceWeights(Edit):
    r"""Replace the weights of heads: $P' V$ with the values of this run.

    A map is multiplied with the values lazily, so no T x S tensor is made.

    Args:
        weights: a tensor or an `AttentionMap` (..., T, S) of the call's own T and S, with one map for each chosen head,
            or one for every head of the module; with or without a batch. Or the maps of another run: the `seen` of
            `regard.watch(...)`, or a mapping from (module path, number of the call) to maps, from which each call takes
            the map of its own name and number.
        heads: as in `AddBias`; None for all.
        queries: as in `AddBias`; None for all.
        batch: rows of the batch; None for all.

    Raises:
        ArgumentError: the weights are none of these, or something cannot choose positions.
        NonFiniteError: a tensor has NaN or infinity.
        ShapeError: when a call runs: its heads, queries or keys are not as many as those of the weights.
        NotSeenError: when a call runs: the other run has no map of its name and number.

    Source: Prompt-to-prompt, Hertz et al. 2022 (arXiv:2208.01626), section 3; patching of attention patterns, Wang et
    al. 2022 (arXiv:2211.00593).

    >>> import regard, torch
    >>> class Block(torch.nn.Module):
    ...     def forward(self, x):
    ...         return torch.nn.functional.scaled_dot_product_attention(x, x, x)
    >>> model = Block()
    >>> with regard.edit(model, {"": ReplaceWeights(torch.eye(3).flip(0))}):
    ...     model(torch.arange(3.0)[:, None])
    tensor([[2.],
            [1.],
            [0.]])
    """

    weights: OtherWeights
    heads: Positions = None
    queries: Positions = None
    batch: Positions = None

    def __post_init__(self) -> None:
        if not isinstance(self.weights, Tensor | AttentionMap | Seen | Mapping):
            raise ArgumentError(
                "ReplaceWeights() takes a tensor, an AttentionMap, the `seen` of a watch, or a mapping of maps; got "
                f"{type(self.weights).__name__}"
            )
        if isinstance(self.weights, Tensor):
            given_weights(self.weights)
            if not bool(torch.isfinite(self.weights.detach()).all()):
                raise NonFiniteError(f"the weights {tuple(self.weights.shape)} have NaN or infinity in them")
        check_axes(self)

    @property
    def needs_positions(self) -> bool:
        return self.queries is not None

    def apply(self, weights: EditedWeights, at: CallPlace) -> EditedWeights:
        heads, query = at.chosen(self.heads, "head"), at.chosen(self.queries, "query")
        rows = at.chosen(self.batch, "batch")
        if any(chosen is not None and not len(chosen.local) for chosen in (heads, query, rows)):
            return weights
        chosen = torch.arange(at.sizes.heads, device=at.device) if heads is None else heads.local
        replaced = rows_of(rows, query, at).expand(-1, len(chosen), -1)
        given, what = self._given(at)
        word = f"{what} in{where(self) or ' all heads'}, by a product"
        return weights.with_heads(Replaced(self._fitted(given, chosen, at), chosen, replaced), word)

    def _given(self, at: CallPlace) -> tuple[Source, str]:
        given = self.weights
        if isinstance(given, Tensor):
            return given_weights(given.to(at.device, at.dtype)), "given weights"
        if isinstance(given, AttentionMap):
            return given.source, "the weights of a map"
        if isinstance(given, Seen):
            return given[at.name, at.number].source, "the weights of another run"
        found = given.get((at.name, at.number))
        if not isinstance(found, AttentionMap):
            raise ArgumentError(f"{at}: the mapping has no map under {(at.name, at.number)!r}")
        return found.source, "the weights of another run"

    def _fitted(self, given: Source, heads: Tensor, at: CallPlace) -> Source:
        """The weights of the chosen heads, for (B, n) flat heads."""
        sizes = at.sizes
        lead, has = tuple(given.shape[:-2]), tuple(given.shape[-2:])
        heads_given = 1 if not lead or (not sizes.has_heads and len(lead) == 1) else lead[-1]
        batch = prod(lead[: len(lead) - (sizes.has_heads and bool(lead))])
        fits = heads_given in (1, len(heads), sizes.heads) and batch in (1, sizes.flat_batch)
        if not fits or has != (sizes.queries, sizes.keys):
            raise ShapeError(
                f"{at}: its weights are {tuple(sizes.map_shape)}, of which {len(heads)} of {sizes.heads} heads are "
                f"replaced; the weights that replace them are {tuple(given.shape)}"
            )
        device = heads.device
        columns = heads if heads_given == sizes.heads else torch.arange(len(heads), device=device) * (heads_given > 1)
        rows = torch.arange(sizes.flat_batch, device=device) * (batch > 1)
        flat_heads = rows[:, None] * heads_given + columns
        return given.choose(flat_heads.reshape(-1), (sizes.flat_batch, len(heads)))
