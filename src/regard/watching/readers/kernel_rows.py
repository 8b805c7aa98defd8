"""The sequences in the tensors of a kernel's call: rows of a batch, or documents packed one after the other."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, eq=False)
class KernelRows:
    """The sequences of a tensor (N, T, H, D), or of a packed one, (total, H, D)."""

    number: int
    """N."""
    length: int
    """T: the positions of the longest sequence."""
    starts: Tensor | None = None
    """(N,): where each packed sequence begins; None for rows of a batch."""
    counts: Tensor | None = None
    """(N,): how many positions each has; None if all have T."""

    @classmethod
    def of_batch(cls, tensor: Tensor, counts: Tensor | None = None) -> "KernelRows":
        """Rows of a batch, perhaps with padding behind the first positions."""
        return cls(tensor.shape[0], tensor.shape[1], None, None if counts is None else counts.long())

    @classmethod
    def packed(cls, ends: Tensor, longest: object = None, counts: Tensor | None = None) -> "KernelRows":
        """Documents by their cumulative lengths 0, n_1, n_1 + n_2, ...; `counts` are the positions in use."""
        starts = ends[:-1].long().clone()
        counts = ends.long().diff() if counts is None else counts.long()
        if longest is None:
            longest = counts.max() if len(counts) else 0
        return cls(len(starts), int(longest), starts, counts)  # type: ignore[call-overload]

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The vectors as (N, H, T, D), with zeros behind the end of each sequence."""
        if self.counts is None:
            return tensor.transpose(1, 2)
        places = torch.arange(self.length, device=tensor.device)
        behind = (places >= self.counts[:, None])[:, :, None, None]
        if self.starts is not None:
            # (A place behind the end of the last document is that of some vector.)
            tensor = tensor[(self.starts[:, None] + places).clamp(max=max(len(tensor) - 1, 0))]
        return tensor.masked_fill(behind, 0).transpose(1, 2)

    def row_states(self, states: Tensor) -> Tensor:
        """Numbers of rows as (N, H, T): from (N, H, T), which may be longer, or of packed sequences from (H, total)."""
        if self.counts is None or self.starts is None:
            return states[..., : self.length]
        if states.dim() == 3:
            return states[..., : self.length]
        return self.laid_out(states.mT[..., None])[..., 0]

    def document_of(self, row: int) -> tuple["KernelRows", Tensor, Tensor]:
        """The document of a packed row alone, its number (1,), and the row's place in it (1,)."""
        assert self.starts is not None
        number = torch.searchsorted(self.starts, torch.full((1,), row, device=self.starts.device), right=True) - 1
        return self.take(number), number, (row - self.starts[number]).clamp(max=self.length - 1)

    def take(self, number: Tensor) -> "KernelRows":
        """One of the sequences."""
        starts, counts = (None if one is None else one[number] for one in (self.starts, self.counts))
        return replace(self, number=1, starts=starts, counts=counts)
