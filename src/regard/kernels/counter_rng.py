"""The random bits of dropout as a function of row and column, for graphs without access to a generator's seed."""

from torch import Tensor


def kept_at(seed: Tensor, rows: Tensor, columns: Tensor, dropout: float) -> Tensor:
    """Whether each (row, column) is kept, with probability 1 - dropout. Equal seeds give equal answers.

    Args:
        seed: an integer tensor of one element.
        rows: (..., t, 1), below 2^31; numbered on from one flat_head to the next.
        columns: (s,), below 2^31.
        dropout: in [0, 1).

    The counter row * 2^31 + column + seed goes through the finalizer of SplitMix64, in wrapping 64-bit arithmetic.

    Source: Steele, Lea & Flood 2014 (doi:10.1145/2660193.2660195), figure 16.

    >>> import torch
    >>> kept = kept_at(torch.tensor(7), torch.arange(1000)[:, None], torch.arange(1000), 0.3)
    >>> round(kept.float().mean().item(), 2)
    0.7
    """
    state = ((rows << 31) + columns + seed) * -0x61C8864680B583EB
    for shift, factor in ((30, -0x40A7B892E31B1A47), (27, -0x6B2FB644ECCEEE15)):
        # torch shifts copies of the sign in from the left; the mask clears them.
        state = (state ^ ((state >> shift) & ((1 << (64 - shift)) - 1))) * factor
    state = state ^ ((state >> 31) & ((1 << 33) - 1))
    return (state & 0xFFFFFF) >= int(dropout * (1 << 24))
