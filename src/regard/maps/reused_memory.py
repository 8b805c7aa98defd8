"""Memory for answers on the CPU that is taken again once nobody holds the answer any more.

Memory that was freed often goes back to the system, and comes back as pages that have to be made anew: 2 us for each
page of 4 KiB on an Intel Xeon in a virtual machine, so that the 6 MB of two pictures of 12 heads took 2 to 3 ms, where
the pass of the attention took 4. Whether it goes back depends on what else the process has freed.
"""

import weakref
from collections.abc import Sequence
from math import prod

import torch
from torch import Tensor

LEAST, MOST = 2**18, 2**27
"""The bytes of the smallest block that is kept, and of all blocks together that wait to be taken again."""
PAGE = 4096
"""Blocks are whole pages."""

_free: list["_Block"] = []
"""The blocks that nobody holds, the oldest first. What is done to it is one call of a list's method at a time, because
the last tensor on a block may be freed by any thread, and in the middle of anything."""


class _Block:
    """Some bytes whose pages are there."""

    def __init__(self, size: int) -> None:
        self.bytes = torch.zeros(size, dtype=torch.uint8, device="cpu")

    def lent(self) -> Tensor:
        """All bytes; when no tensor on them is left, the block is free."""
        array = self.bytes.numpy()
        # A tensor's storage holds the array that it was made of, and so do all views of it.
        weakref.finalize(array, _give_back, self).atexit = False
        return torch.from_numpy(array)

    @property
    def size(self) -> int:
        return self.bytes.numel()


def reused_memory(shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """A tensor of any values, on memory of an answer that was freed, if there is such memory of this size.

    All pages of it are there. Where the two threads of a loop were the first to touch the pages of an array, a page
    took seven times as long as by one of torch's operations (Linux in a virtual machine), and the loop five times.

    Args:
        shape: its shape.
        dtype: its type; the memory begins at a whole line of the cache.

    >>> reused_memory((2, 3), torch.int64).shape
    torch.Size([2, 3])
    """
    wanted = prod(shape) * dtype.itemsize
    if wanted < LEAST:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    size = -(-wanted // PAGE) * PAGE
    return (_taken(size) or _Block(size)).lent()[:wanted].view(dtype).view(tuple(shape))


def _taken(size: int) -> _Block | None:
    """A free block of this size, which is no longer free."""
    for block in reversed(tuple(_free)):
        if block.size == size:
            try:
                _free.remove(block)
            except ValueError:  # another thread has just taken it
                continue
            return block
    return None


def _give_back(block: _Block) -> None:
    _free.append(block)
    while sum(block.size for block in tuple(_free)) > MOST:
        try:
            del _free[0]
        except IndexError:
            return
