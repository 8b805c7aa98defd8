"""The edit that scales or silences the output of heads."""

from dataclasses import dataclass

import torch
from torch import Tensor

from regard.edits.base import Edit, check_axes, is_all, number_or_tensor, rows_of, where
from regard.edits.call_place import CallPlace, Positions
from regard.edits.edited_weights import EditedWeights
from regard.errors import ShapeError


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
