"""Several sequences in one row, without padding; no document sees another."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.masks.patterns import documents
from regard.errors import ShapeError, require


@dataclass(frozen=True, slots=True, eq=False)
class Packed:
    values: Float[Tensor, " total *rest"]
    offsets: Integer[Tensor, " documents_plus_one"]
    """0, n_1, n_1 + n_2, ..., the total."""

    @property
    def mask(self) -> Mask:
        """A mask of each document on itself; combine it with `causal(0)` for language models."""
        return documents(offsets=self.offsets)

    @property
    def positions(self) -> Integer[Tensor, " total"]:
        """The position of each token in its own document."""
        offsets = self.offsets.long()
        starts = offsets[:-1].repeat_interleave(offsets.diff())
        return torch.arange(len(self.values), device=self.values.device) - starts

    def unpack(self, values: Tensor | None = None, *, dim: int = 0) -> list[Tensor]:
        """The single sequences, or the parts of another tensor with the same packing along `dim`.

        Raises:
            ShapeError: that dimension has another length.
        """
        values = self.values if values is None else values
        total = int(self.offsets[-1])
        if values.shape[dim] != total:
            raise ShapeError(f"dimension {dim} must hold the {total} packed tokens, got {tuple(values.shape)}")
        return list(values.split(self.offsets.long().diff().tolist(), dim=dim))


def pack(sequences: Sequence[Tensor]) -> Packed:
    """Concatenate sequences (length_n, ...) into one row.

    Raises:
        ShapeError: there is no sequence, or the other dimensions, dtypes or devices of the sequences differ.

    >>> import regard
    >>> packed = pack([torch.randn(2, 4), torch.randn(3, 4)])
    >>> x = packed.values
    >>> [tuple(part.shape) for part in packed.unpack(regard.attention(x, x, x, mask=packed.mask))]
    [(2, 4), (3, 4)]
    """
    require(sequences, Sequence, "sequences", "a list of tensors")
    for one in sequences:
        require(one, Tensor, "each sequence", "a tensor")
    if not sequences:
        raise ShapeError("pack takes at least one sequence, got none")
    kinds = {(tuple(s.shape[1:]), s.dtype, s.device) for s in sequences if s.dim()}
    if len(kinds) != 1 or not all(s.dim() for s in sequences):
        raise ShapeError(f"sequences must agree but in length, got {', '.join(str(tuple(s.shape)) for s in sequences)}")
    lengths = torch.tensor([0, *(len(s) for s in sequences)], device=sequences[0].device)
    return Packed(torch.cat(list(sequences)), lengths.cumsum(0))
