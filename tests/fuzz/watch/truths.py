"""A random model's record of its own attention, in the order in which it attends."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn


@dataclass
class Truth:
    module: nn.Module
    writing: str
    right: Callable[[], list[Tensor]]
    """The weights (B, H, T, S) that multiplied the values; more than one where dropout stands between two of them."""
    first: int = 0
    """The position of the first query in a generation."""
    first_key: int = 0
    """The position of the first key that the call was given."""


@dataclass
class Truths:
    calls: list[Truth] = field(default_factory=list)
    decoys: list[nn.Module] = field(default_factory=list)
    """Modules with a softmax that is no attention."""

    def add(self, module: nn.Module, writing: str, *right: Tensor, first: int = 0, first_key: int = 0) -> None:
        kept = [t.detach().double().clone() for t in right]
        self.calls.append(Truth(module, writing, lambda: kept, first, first_key))

    def add_scores(self, module: nn.Module, writing: str, query: Tensor, key: Tensor, **options: Any) -> None:
        q, k = query.detach().double().clone(), key.detach().double().clone()
        kept: dict[str, Any] = {n: t.detach().clone() if isinstance(t, Tensor) else t for n, t in options.items()}
        self.calls.append(Truth(module, writing, lambda: [kernel_weights(q, k, **kept)]))


def kernel_weights(
    query: Tensor, key: Tensor, mask: Tensor | None = None, is_causal: bool = False, scale: float | None = None
) -> Tensor:
    """The weights of F.scaled_dot_product_attention, (B, H, T, S), from its documentation."""
    key = key.repeat_interleave(query.shape[-3] // key.shape[-3], -3)
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(~torch.ones(scores.shape[-2:], dtype=torch.bool).tril(), -torch.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else scores + mask.double()
    dead = (scores == -torch.inf).all(-1, keepdim=True)
    return scores.masked_fill(dead, 0.0).softmax(-1).masked_fill(dead, 0.0)
