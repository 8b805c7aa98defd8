"""A mask of the keys that each query chose, in memory of T k."""

from dataclasses import dataclass

import torch
from jaxtyping import Integer
from torch import Tensor

from regard.call.masks.base import Mask
from regard.call.shapes import Sizes, counted
from regard.errors import ShapeError, require
from regard.tensors.guards import has_values


def chosen(indices: Integer[Tensor, "... T k"]) -> Mask:
    """Attend to the k keys that each query chose, as an indexer does.

    Args:
        indices: key indices (T, k), or of the input's rank with k in place of S, each leading dimension full or 1;
            also (batch..., T, k) for all heads alike. An index of -1 is no key; the order is free.

    Raises:
        ShapeError: the indices are no whole numbers; or, in a call, they do not fit it or name no key of it.

    Source: DeepSeek-AI 2025 (arXiv:2512.02556), section 2.1, equation 2.

    >>> chosen(torch.tensor([[0, -1], [0, 2]])).to_tensor(2, 3).int()
    tensor([[1, 0, 0],
            [1, 0, 1]], dtype=torch.int32)
    """
    require(indices, Tensor, "indices", "a tensor of key indices")
    if indices.is_floating_point() or indices.is_complex() or indices.dtype == torch.bool or indices.dim() < 2:
        raise ShapeError(f"chosen takes whole numbers (..., T, k), got {indices.dtype} {tuple(indices.shape)}")
    return ChosenKeys(indices)


@dataclass(frozen=True, slots=True, eq=False, repr=False)
class ChosenKeys(Mask):
    """`key in indices[query]`, with sorted indices once it is bound. See `chosen`."""

    indices: Tensor

    def bind(self, sizes: Sizes, device: torch.device) -> Mask:
        indices = counted(self.indices, device)
        if has_values(indices) and indices.numel() and not -1 <= int(indices.min()) <= int(indices.max()) < sizes.keys:
            raise ShapeError(
                f"the chosen keys must be from 0 to {sizes.keys - 1}, or -1 for none; "
                f"got {int(indices.min())} to {int(indices.max())}"
            )
        return ChosenKeys(_canonical(indices, sizes).sort(-1).values)

    def allowed(self, batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        batches, heads = self.indices.shape[:2]
        row = self.indices[batch if batches > 1 else 0, head if heads > 1 else 0, query]  # (..., k)
        if row.dim() < 2 or row.shape[-2] != 1:  # one key for each query: not a block
            return (row == key[..., None]).any(-1)
        row = row.squeeze(-2).contiguous()
        wanted = key.expand(*row.shape[:-1], key.shape[-1]).contiguous()
        place = torch.searchsorted(row, wanted).clamp_max(row.shape[-1] - 1)
        return row.gather(-1, place) == wanted

    def depends_on(self) -> frozenset[str]:
        axes = zip(("batch", "head"), self.indices.shape, strict=False)
        return frozenset({"query", "key", *(axis for axis, n in axes if n > 1)})

    def __str__(self) -> str:
        return f"{self.indices.shape[-1]} chosen keys for each query"


def _canonical(indices: Tensor, sizes: Sizes) -> Tensor:
    """Indices (B or 1, H or 1, T, k)."""
    *leading, queries, most = indices.shape
    full = sizes.map_shape[:-2]
    if len(leading) == len(sizes.batch) and sizes.has_heads:  # alike for all heads
        leading = [*leading, 1]
    fits = queries == sizes.queries and (
        not leading or (len(leading) == len(full) and all(n in (1, m) for n, m in zip(leading, full, strict=True)))
    )
    if not fits or not most:
        raise ShapeError(
            f"the chosen keys must be ({sizes.queries}, k), or have k in place of S in {sizes.map_shape}; "
            f"got {tuple(indices.shape)}"
        )
    if not leading:
        return indices[None, None]
    head = leading[-1] if sizes.has_heads else 1
    batch = leading[: len(sizes.batch)]
    if all(n == 1 for n in batch):
        return indices.reshape(1, head, queries, most)
    return (
        indices.reshape(*batch, head, queries, most)
        .expand(*sizes.batch, head, queries, most)
        .flatten(0, len(batch) - 1)
    )
