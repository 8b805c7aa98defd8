"""Masks of pairs that a caller hands over: the pairs that they hide, and their meaning."""

import torch
from torch import Tensor

HUGE = 1e4
"""From here on, a number in an input stands for a hidden pair."""


def is_square(one: Tensor) -> bool:
    """True for a mask of pairs for each sequence, (B, ..., T, T): of flags, or added."""
    return one.dim() > 2 and one.shape[-1] == one.shape[-2] > 1 and hidden_pairs_of(one) is not None


def hidden_pairs_of(mask: Tensor) -> Tensor | None:
    """The pairs that a mask hides by the meaning of torch's kernels, bool (..., T, T); None for other numbers."""
    if mask.dtype == torch.bool:
        return ~mask
    if not mask.is_floating_point():
        return mask == 0 if bool(((mask == 0) | (mask == 1)).all()) else None
    return mask <= -HUGE if bool(((mask == 0) | (mask <= -HUGE)).all()) else None


def separate_blocks(mask: Tensor) -> Tensor | None:
    """The block of each position of a mask whose blocks see nothing of each other; None for one block."""
    hidden = hidden_pairs_of(mask)
    if hidden is None:
        return None
    seen = (~hidden).flatten(0, -3).any(0) if hidden.dim() > 2 else ~hidden
    crosses = [bool(seen[at:, :at].any() or seen[:at, at:].any()) for at in range(1, len(seen))]
    if all(crosses):
        return None
    return torch.tensor([0, *(not one for one in crosses)]).cumsum(0)


def is_triangle(mask: Tensor) -> bool:
    """True for a mask that hides all later keys and nothing else, of either meaning of True."""
    later = torch.ones_like(mask, dtype=torch.bool).triu(1)
    hidden = hidden_pairs_of(mask)
    return hidden is not None and (
        torch.equal(hidden, later) or (mask.dtype == torch.bool and torch.equal(mask, later))
    )
