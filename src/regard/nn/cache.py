"""Projected keys and values, and states of recurrences: passed into attention and returned."""

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.tensors.guards import is_compiling, is_inference, is_recorded


@dataclass(frozen=True, slots=True, eq=False)
class KeyValue:
    """Projected keys and values of S positions, in buffers with or without spare room.

    `MultiHeadAttention.project` makes it, and `append` extends it, perhaps into the spare room of the buffers. The old
    object keeps its own positions, but must not be appended to again.

    >>> kv = KeyValue.of(torch.zeros(1, 2, 3, 4), torch.zeros(1, 2, 3, 4))
    >>> kv.append(KeyValue.of(torch.ones(1, 2, 1, 4), torch.ones(1, 2, 1, 4))).key.shape
    torch.Size([1, 2, 4, 4])
    """

    key_buffer: Float[Tensor, "*batch G capacity D"]
    value_buffer: Float[Tensor, "*batch G capacity E"]
    length: int
    """S: the number of filled positions in the buffers."""

    @classmethod
    def of(cls, key: Float[Tensor, "*batch G S D"], value: Float[Tensor, "*batch G S E"]) -> "KeyValue":
        """Keys and values without free room."""
        return cls(key, value, key.shape[-2])

    @property
    def key(self) -> Float[Tensor, "*batch G S D"]:
        """The filled part of the keys, a view."""
        # A full buffer is itself, because even a view takes microseconds.
        buffer = self.key_buffer
        return buffer if buffer.shape[-2] == self.length else buffer[..., : self.length, :]

    @property
    def value(self) -> Float[Tensor, "*batch G S E"]:
        """The filled part of the values, a view."""
        buffer = self.value_buffer
        return buffer if buffer.shape[-2] == self.length else buffer[..., : self.length, :]

    def append(self, new: "KeyValue") -> "KeyValue":
        """These positions followed by the new ones.

        While gradients are recorded, buffers are never written to. Otherwise new positions go into the spare room;
        without any, the buffers grow to twice the length, so n appends copy at most 2n positions.
        """
        if is_recorded():
            return KeyValue.of(torch.cat([self.key, new.key], -2), torch.cat([self.value, new.value], -2))
        room, length = self.with_room(new.length), self.length + new.length
        room.key_buffer[..., self.length : length, :] = new.key
        room.value_buffer[..., self.length : length, :] = new.value
        return KeyValue(room.key_buffer, room.value_buffer, length)

    def with_room(self, more: int) -> "KeyValue":
        """The same positions, in buffers with room for `more`: these, or new ones of twice the length."""
        length = self.length + more
        if length <= self.key_buffer.shape[-2] and _is_writable(self.key_buffer):
            return self
        free = 2 * length - self.length
        return KeyValue(
            torch.nn.functional.pad(self.key, (0, 0, 0, free)),
            torch.nn.functional.pad(self.value, (0, 0, 0, free)),
            self.length,
        )

    def shift(self, places: Int[Tensor, " N"]) -> "KeyValue":
        """Each row of the first batch dimension rotated towards its end by so many positions, in new buffers."""
        steps = torch.arange(self.length, device=places.device)
        index = ((steps - places[:, None]) % self.length).view(len(places), *(1,) * (self.key.dim() - 3), -1, 1)
        return KeyValue.of(*(part.gather(-2, index.expand_as(part)) for part in (self.key, self.value)))

    def reorder(self, index: Int[Tensor, " N"]) -> "KeyValue":
        """Rows `index` of the first batch dimension, in that order, in new buffers."""
        return KeyValue(self.key_buffer.index_select(0, index), self.value_buffer.index_select(0, index), self.length)


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentState:
    """The state of a linear recurrence after `length` positions. Its size does not grow with them.

    >>> state = RecurrentState(torch.zeros(2, 4, 8, 8), torch.zeros(2, 3, 96), 5)
    >>> state.reorder(torch.tensor([1, 1, 0])).state.shape
    torch.Size([3, 4, 8, 8])
    """

    state: Float[Tensor, "*batch H D E"]
    inputs: Float[Tensor, "*batch K C"]
    """The last inputs of the short convolution; of no positions without one."""
    length: int
    """The positions that were read, with padding."""

    def shift(self, places: Int[Tensor, " N"]) -> "RecurrentState":
        """The same state: padding has left no trace in it, on whichever side it was."""
        return self

    def reorder(self, index: Int[Tensor, " N"]) -> "RecurrentState":
        """Rows `index` of the first batch dimension, in that order."""
        return RecurrentState(self.state.index_select(0, index), self.inputs.index_select(0, index), self.length)


MixerCache = KeyValue | RecurrentState


class Past:
    """The cache that one call of a module reads, and in whose place it puts the longer one: the result of the call
    that `extend` makes is then the output alone, as hooks of the module know it."""

    __slots__ = ("cache", "offset")

    def __init__(self, cache: MixerCache | None = None, offset: int | Tensor | None = None) -> None:
        self.cache: Any = cache
        self.offset: int | Tensor = (0 if cache is None else cache.length) if offset is None else offset
        """The position of the first new vector."""

    def append(self, new: KeyValue) -> KeyValue:
        self.cache = new if self.cache is None else self.cache.append(new)
        longer: KeyValue = self.cache
        return longer


def _is_writable(buffer: Tensor) -> bool:
    """Whether in-place writes are allowed here: inference tensors are read-only outside inference mode."""
    # torch.compile cannot trace is_inference_mode.
    return is_compiling() or is_inference() or not buffer.is_inference()
