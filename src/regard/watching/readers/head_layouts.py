"""How a model lays out its heads, and the names of the dimensions of a call."""

from typing import NamedTuple

from torch import Tensor

from regard.call.shapes import Dimensions


class Folding(NamedTuple):
    heads: int
    heads_last: bool
    """True if the heads of a sequence are adjacent (B * H), False if the sequences of a head are (H * B)."""

    def unfolded(self, tensor: Tensor) -> Tensor:
        """A tensor (B * H, ...) as (B, H, ...).

        >>> import torch
        >>> Folding(2, heads_last=True).unfolded(torch.arange(6))
        tensor([[0, 1],
                [2, 3],
                [4, 5]])
        >>> Folding(2, heads_last=False).unfolded(torch.arange(6))
        tensor([[0, 3],
                [1, 4],
                [2, 5]])
        """
        if self.heads_last:
            return tensor.unflatten(0, (-1, self.heads))
        return tensor.unflatten(0, (self.heads, -1)).transpose(0, 1)

    def folded(self, tensor: Tensor) -> Tensor:
        """A tensor (B, H, ...) as (B * H, ...), or as (H * B, ...).

        >>> import torch
        >>> folding = Folding(2, heads_last=False)
        >>> folding.folded(folding.unfolded(torch.arange(6)))
        tensor([0, 1, 2, 3, 4, 5])
        """
        return (tensor if self.heads_last else tensor.transpose(0, 1)).flatten(0, 1)

    def __str__(self) -> str:
        order = "(B * H, T, S)" if self.heads_last else "(H * B, T, S)"
        return f"the model folds {self.heads} heads into the batch, {order}: shown as (B, H, T, S)"


class MovedHeads(NamedTuple):
    """Heads that are not the dimension before the queries, as in (B, H, windows, T, D)."""

    place: int
    """The place of the heads, from the end."""

    def unfolded(self, tensor: Tensor) -> Tensor:
        """A tensor (B, H, ..., T, D) as (B, ..., H, T, D).

        >>> import torch
        >>> MovedHeads(-4).unfolded(torch.zeros(2, 3, 5, 7, 1)).shape
        torch.Size([2, 5, 3, 7, 1])
        """
        return tensor.movedim(self.place, -3) if tensor.dim() >= -self.place else tensor

    def folded(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(-3, self.place)

    def __str__(self) -> str:
        return "the model has its heads before its windows, (B, H, windows, T, S): shown as (B, windows, H, T, S)"


HeadLayout = Folding | MovedHeads


class Heads(NamedTuple):
    dimensions: Dimensions | None = None
    """Of the call as it is shown; None for those of its documentation."""
    layout: HeadLayout | None = None
    """None if the model has the heads before the queries, or none."""

    @property
    def notes(self) -> list[str]:
        found = [] if self.layout is None else [str(self.layout)]
        names = self.dimensions
        if names is not None and names.why:
            found.append(names.why)
        elif names is not None and ("window" in names.leading or names.head is None):
            found.append(f"its dimensions are {names}")
        return found


AS_DOCUMENTED = Heads()
