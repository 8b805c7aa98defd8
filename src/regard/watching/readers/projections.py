"""Queries, keys or values as linear maps of an input: input and weights are saved, and projected on demand."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_tensor import SavedTensor


class LayerNormArguments(NamedTuple):
    """A layer norm as F.layer_norm takes it."""

    shape: tuple[int, ...]
    weight: Tensor | None
    bias: Tensor | None
    eps: float


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Projection:
    """How query, key or value is made: a linear map of an input, cut into heads, with rows appended."""

    input: Tensor
    weight: Tensor | None
    """None for a static projection."""
    bias: Tensor | None
    part: int
    """The index of its third in packed weights and biases."""
    is_packed: bool
    norm: "LayerNormArguments | None" = None
    """The layer norm the input goes through first."""
    row: Tensor | None = None
    """A learned row (1, 1, E) after the rows of the input."""
    zero: bool = False
    """True with a last row of zeros."""
    static: Tensor | None = None
    """Given heads (N * H, S, D) in place of the projection."""

    @property
    def is_extended(self) -> bool:
        """True if its rows are not those of the input alone: it is static, or has rows appended."""
        return self.static is not None or self.row is not None or self.zero

    def keep(
        self, policy: RetentionPolicy, what: str, beside: "SavedProjection | None" = None
    ) -> "tuple[Projection, list[SavedTensor]]":
        """The same projection with saved tensors; an input shared with another projection is saved once.

        Args:
            policy: the rules for saving tensors.
            what: the name of the module, for messages.
            beside: another projection of the call, as the model has it and as saved.
        """
        held: list[SavedTensor] = []

        def weight(tensor: Tensor | None) -> Tensor | None:
            if tensor is None:
                return None
            held.append(policy.keep_weight(tensor, f"the weights of {what}"))
            return held[-1].tensor

        def activation(tensor: Tensor, name: str) -> Tensor:
            held.append(policy.keep(tensor, f"the {name} of {what}"))
            return held[-1].tensor

        shared = beside is not None and beside[0].input is self.input
        x = beside[1].input if beside is not None and shared else activation(self.input, "input")
        kept = replace(
            self, input=x, weight=weight(self.weight), bias=weight(self.bias), row=weight(self.row),
            static=None if self.static is None else activation(self.static, "keys"),
            norm=None if self.norm is None else self.norm._replace(
                weight=weight(self.norm.weight), bias=weight(self.norm.bias)
            ),
        )  # fmt: skip
        return kept, held

    def parts(self) -> tuple[Tensor, Tensor | None]:
        """The matrix and the bias of this projection alone."""
        assert self.weight is not None, "a static projection has none"
        weight = self.weight.chunk(3)[self.part] if self.is_packed else self.weight
        return weight, None if self.bias is None else self.bias.chunk(3)[self.part]

    def normed(self) -> Tensor:
        """The input, through the layer norm before the projection if there is one."""
        return self.input if self.norm is None else F.layer_norm(self.input, *self.norm)

    def heads(self, num_heads: int, *, batch_first: bool) -> Tensor:
        """Compute the heads (N, H, L, D)."""
        if self.static is not None:
            return self.static.unflatten(0, (-1, num_heads))
        x = self.normed()
        x = x if x.dim() == 3 else x.unsqueeze(1)
        x = F.linear(x, *self.parts())
        x = x if batch_first else x.transpose(0, 1)
        if self.row is not None:
            x = torch.cat([x, self.row.to(x.dtype).expand(x.shape[0], 1, -1)], dim=1)
        if self.zero:
            x = torch.cat([x, x.new_zeros(x.shape[0], 1, x.shape[2])], dim=1)
        return x.unflatten(-1, (num_heads, -1)).transpose(1, 2)


SavedProjection = tuple[Projection, Projection]
"""A projection of the model, and its saved form."""
