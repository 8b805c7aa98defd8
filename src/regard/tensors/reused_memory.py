"""A pool of CPU memory for results, reused once a result is garbage.

Freed memory often goes back to the system and returns as new pages, at 2 us for each page of 4 KiB on an Intel Xeon in
a virtual machine: two pictures of 12 heads (6 MB) took 2 to 3 ms, beside 4 ms of attention.
"""

import mmap
import sys
import weakref
from collections.abc import Sequence
from functools import lru_cache, partial
from math import prod
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

LEAST, MOST = 2**18, 2**27
"""The bytes of the smallest pooled block, and of all free blocks together."""
PAGE = 4096
"""Blocks are whole pages; some processors confuse addresses with equal last 12 bits."""

LINE = 64
"""The bytes of a cache line, at which each copy begins."""

_free: list["_Block"] = []
"""The free blocks, oldest first. Any thread may free a tensor at any point, so each change is one atomic list
method.
"""
_lent: dict[int, "_Lent"] = {}


class _Block:
    """A mapping with resident pages, apart from the heap."""

    def __init__(self, size: int) -> None:
        self.size = size
        # Python shares a mapping with forked processes by default; Windows has no fork, and no flags.
        private = {} if sys.platform == "win32" else {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS}
        self._mapping = mmap.mmap(-1, size, **private)
        np.frombuffer(self._mapping, dtype=np.uint8).fill(0)

    def lent(self) -> Any:
        """All bytes as a NumPy array; the block is free once the array and its views are gone."""
        array = np.frombuffer(self._mapping, dtype=np.uint8)
        one = _Lent(self, array)
        _lent[id(one)] = one
        return array


class _Lent(weakref.ref):  # type: ignore[type-arg]
    """A weak reference to an array on a block; it returns the block when the array is gone."""

    def __new__(cls, _block: _Block, array: Any) -> "_Lent":
        # Everything is an argument, because the module's names may be gone at the exit of the process.
        return super().__new__(cls, array, partial(_give_back, _free, _lent))

    def __init__(self, block: _Block, _array: Any) -> None:
        self.block = block


def reused_memory(shape: Sequence[int], dtype: torch.dtype, *, away_from: Tensor | None = None) -> Tensor:
    """An uninitialised tensor, on pooled memory of this size if there is some.

    Its pages are resident. First touches by the two threads of a loop took seven times as long a page as by a torch
    operation (Linux in a virtual machine), and slowed the loop five times. The tensor is no view, so it may be written
    in place; its storage cannot be resized.

    Args:
        shape: its shape.
        dtype: its type; the memory begins at a cache line.
        away_from: a tensor; the memory begins half a page apart from it, modulo pages.

    >>> reused_memory((2, 3), torch.int64).shape
    torch.Size([2, 3])
    """
    wanted, more = prod(shape) * dtype.itemsize, 0 if away_from is None else PAGE
    if wanted < LEAST and away_from is None:
        return torch.empty(tuple(shape), dtype=dtype, device="cpu")
    size = -(-(wanted + more) // PAGE) * PAGE
    array = _lent_bytes(size) if wanted >= LEAST else torch.empty(size, dtype=torch.uint8, device="cpu").numpy()
    first = 0 if away_from is None else (away_from.data_ptr() + PAGE // 2 - array.ctypes.data) % PAGE
    numbers = array[first : first + wanted].view(str(dtype).removeprefix("torch."))
    return torch.from_numpy(numbers.reshape(tuple(shape)))


class Arena:
    """Memory for copies of tensors with similar lifetimes, such as those of a watch.

    Copies between a model's own tensors would fragment the heap: freed memory goes back to the system and returns as
    new pages in the next run, 10,000 pages a run of GPT-2 over 512 tokens. Large copies have their own blocks; smaller
    ones share blocks.
    """

    def __init__(self) -> None:
        self._block: Any = None
        self._used = 0

    def copied(self, tensor: Tensor) -> "ArenaCopy":
        """A copy of a tensor on the CPU.

        >>> tensor = torch.arange(12000.0).view(3, 4000).T
        >>> copy = Arena().copied(tensor).tensor()
        >>> torch.equal(copy, tensor), copy.stride(), copy.untyped_storage().nbytes()
        (True, (1, 4000), 48000)
        """
        array, first = self._room(tensor.numel() * tensor.element_size())
        strides = _dense_strides(tensor.shape, tensor.stride())
        copy = ArenaCopy(array, first, tuple(tensor.shape), strides, tensor.dtype)
        copy.numbers().as_strided(copy.shape, strides).copy_(tensor)
        return copy

    def _room(self, size: int) -> tuple[Any, int]:
        if size >= LEAST:
            return _lent_bytes(-(-size // PAGE) * PAGE), 0
        if self._block is None or self._used + size > self._block.nbytes:
            # Blocks grow, so a watch of a small model holds little more than its copies.
            next_size = LEAST // 4 if self._block is None else min(2 * self._block.nbytes, 4 * LEAST)
            self._block, self._used = _lent_bytes(max(next_size, -(-size // PAGE) * PAGE)), 0
        first = self._used
        self._used += -(-size // LINE) * LINE
        return self._block, first


class ArenaCopy(NamedTuple):
    """A copy without a tensor header, which would lie between the memory of the model."""

    array: Any
    first: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype

    def numbers(self) -> Tensor:
        return torch.frombuffer(self.array, dtype=self.dtype, count=prod(self.shape), offset=self.first)

    def tensor(self) -> Tensor:
        """A tensor of the copy, in the memory order of the original. It is no view and owns its storage."""
        flat = self.numbers()
        tensor = torch.empty(0, dtype=self.dtype, device="cpu")
        return tensor.set_(flat.untyped_storage(), 0, self.shape, self.strides)


@lru_cache(maxsize=256)
def _dense_strides(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    dense, step = [0] * len(shape), 1
    for dim in sorted(range(len(shape)), key=lambda d: (strides[d] == 0, strides[d], -d)):
        dense[dim] = step
        step *= shape[dim]
    return tuple(dense)


def _lent_bytes(size: int) -> Any:
    return (_taken(size) or _Block(size)).lent()


def _taken(size: int) -> _Block | None:
    for block in reversed(tuple(_free)):
        if block.size == size:
            try:
                _free.remove(block)
            except ValueError:  # another thread has just taken it
                continue
            return block
    return None


def _give_back(free: list[_Block], lent: dict[int, _Lent], one: _Lent) -> None:
    lent.pop(id(one), None)
    free.append(one.block)
    while sum(block.size for block in tuple(free)) > MOST:
        try:
            del free[0]
        except IndexError:
            return
