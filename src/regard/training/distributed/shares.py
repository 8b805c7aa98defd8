"""The share that a rank holds of a tensor that is shared out among ranks."""

from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import ArgumentError


class Share(NamedTuple):
    """The rows of a tensor that a rank holds."""

    rows: Tensor
    """The rows that this rank holds: (rows here, ...)."""
    first: int
    """The index of the first of these rows in the whole tensor; if there is none, the number of rows of the whole."""
    shape: tuple[int, ...]
    """The shape of the whole tensor."""


def is_shared_out(tensor: Tensor) -> bool:
    """Whether ranks hold shares of the tensor, so that it is a `DTensor`."""
    # `isinstance` would need the type `DTensor`, whose import takes a second.
    return hasattr(tensor, "to_local")


def share(tensor: Tensor) -> Share:
    """The share that this rank holds of a tensor that is shared out.

    Raises:
        ArgumentError: the tensor is shared out in another way than by rows over one group of ranks.
    """
    shared: Any = tensor
    (placement, *others), mesh = shared.placements, shared.device_mesh
    if others or not placement.is_shard(0):
        raise ArgumentError(f"expected a tensor whose rows are shared out among ranks, got {shared.placements}")
    shape = tuple(tensor.shape)
    first = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
    return Share(shared.to_local(), first, shape)


def held(tensor: Tensor) -> Tensor:
    """The part of a tensor that is in the memory of this rank: its share, or all of it if it is not shared out."""
    shared: Any = tensor
    rows: Tensor = shared.to_local() if is_shared_out(tensor) else tensor
    return rows


def like(tensor: Tensor, rows: Tensor) -> Tensor:
    """A tensor that is shared out as `tensor` is, and of which this rank holds `rows`."""
    shared: Any = tensor
    kept: Tensor = type(shared).from_local(
        rows, shared.device_mesh, shared.placements, run_check=False, shape=shared.shape, stride=shared.stride()
    )
    return kept
