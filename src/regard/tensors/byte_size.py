"""Bytes of tensors, and byte counts as text."""

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
