"""What a rank holds of a tensor that is shared out among ranks."""

from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import ArgumentError


class Share(NamedTuple):
    """The rows of a tensor that a rank holds."""

    rows: Tensor
    """Of shape (rows here, ...)."""
    first: int
    """The number of the first of them in the whole tensor; the number of rows, if there is none."""
    shape: tuple[int, ...]
    """Of the whole tensor."""


def is_shared_out(tensor: Tensor) -> bool:
    """Whether ranks hold shares of it (a `DTensor`; importing that type takes a second, asking so does not)."""
    return hasattr(tensor, "to_local")


def share(tensor: Tensor) -> Share:
    """What this rank holds of a tensor that is shared out.

    Raises:
        ArgumentError: it is shared out in another way than by rows over one group of ranks.
    """
    shared: Any = tensor
    (placement, *others), mesh = shared.placements, shared.device_mesh
    if others or not placement.is_shard(0):
        raise ArgumentError(f"expected a tensor whose rows are shared out among ranks, got {shared.placements}")
    shape = tuple(tensor.shape)
    first = min(mesh.get_local_rank() * -(-shape[0] // mesh.size()), shape[0])
    return Share(shared.to_local(), first, shape)


def held(tensor: Tensor) -> Tensor:
    """The memory of a tensor on this rank: of its share, if it is shared out, or of all of it."""
    shared: Any = tensor
    rows: Tensor = shared.to_local() if is_shared_out(tensor) else tensor
    return rows


def like(tensor: Tensor, rows: Tensor) -> Tensor:
    """These rows as this rank's share of a tensor that is shared out as another one is."""
    shared: Any = tensor
    kept: Tensor = type(shared).from_local(
        rows, shared.device_mesh, shared.placements, run_check=False, shape=shared.shape, stride=shared.stride()
    )
    return kept
