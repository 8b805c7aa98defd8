"""The memory of tensors: its bytes and layout, and the widest numbers of a device."""

import torch
from torch import Tensor


def is_part(tensor: Tensor) -> bool:
    """Whether the tensor's memory holds more than its elements: a cache with room for more keys.

    >>> import torch
    >>> is_part(torch.zeros(4, 2)[:2]), is_part(torch.zeros(4, 2))
    (True, False)
    """
    return tensor.untyped_storage().nbytes() > tensor.numel() * tensor.element_size()


def human(size: float) -> str:
    """A byte count in the largest unit with a value of at least 1.

    >>> human(1536), human(3 * 2**40)
    ('1.5 KiB', '3.0 TiB')
    """
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def widest_dtype(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def row_contiguous(tensor: Tensor) -> Tensor:
    """A tensor (..., D) with contiguous rows without overlap: itself or a copy.

    Kernels take it for granted. torch's CPU kernel lays its output out like the queries; for overlapping queries, whose
    last dimension may not be the last in memory, it silently returns wrong values.
    """
    *others, last = tensor.stride()
    if last != 1:
        return tensor.contiguous()
    width = tensor.shape[-1]
    for size, stride in zip(tensor.shape, others, strict=False):
        if 0 < stride < width and size > 1:
            return tensor.contiguous()
    return tensor
