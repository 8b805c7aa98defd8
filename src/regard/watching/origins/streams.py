"""The sequences whose positions tensors have, from an input to queries and keys, and the channels of projections. Both
are known by the memory of a tensor, through weak references."""

import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.call.shapes import Sort
from regard.tensors.guards import is_transformed
from regard.tensors.torch_private import viewed


@dataclass(slots=True, eq=False)
class Stream:
    """A sequence of positions, which tensors have in common from an input to queries and keys; a lost one begins behind
    an unknown function, and may be any other."""

    sort: Sort
    maker: nn.Module | None = None
    """Of blocks the module that makes them,"""
    own: "Stream | None" = None
    """the positions before them,"""
    blocks: int = 0
    """and how many they are."""
    is_lost: bool = field(default=False, kw_only=True)


class Origins(NamedTuple):
    queries: Stream
    keys: Stream
    changed: tuple[tuple[str, bool | Tensor], ...] = ()
    """How masks of zeros and ones changed the scores in place of hiding keys: clauses, and whether they are true."""

    @property
    def crosses(self) -> bool | None:
        keys = self.keys.own or self.keys
        if self.queries is keys:
            return False
        return None if self.queries.is_lost or keys.is_lost else True


class Streams:
    def __init__(self) -> None:
        self._made: dict[int, _Memory] = {}
        self._most = MOST_MADE

    def projected(self, output: Tensor, *, channels_last: bool, of: object = None) -> None:
        """Record that a tensor is the output of a projection `of` another one, with channels on its last axis or its
        second."""
        stream = self._continued(of) if isinstance(of, Tensor) and of.is_floating_point() else None
        # (A projection of the output of weights, or of the weights themselves, has the positions of the queries.)
        self._put(base_of(output), stream.queries if isinstance(stream, Origins) else stream, channels_last)

    def is_channel(self, tensor: Tensor, axis: int) -> bool | None:
        """True if an axis runs over the channels of a projection, False over positions; None if unknown. Known for a
        projection's output and for its views, by strides."""
        made = self._found(tensor)
        if made is None or made.channels_last is None or tensor.shape[axis] < 2 or not tensor.stride(axis):
            return None
        return made.is_channel(base_of(tensor), tensor.stride(axis), tensor.shape[axis])

    def _found(self, tensor: Tensor) -> "_Memory | None":
        base = base_of(tensor)
        made = self._made.get(_number(base))
        return None if made is None or made.is_gone() else made

    def _put(self, base: Tensor, stream: "Stream | Origins | None", channels_last: bool | None = None) -> None:
        if len(self._made) > self._most:
            self._made = {n: one for n, one in self._made.items() if not one.is_gone()}
            self._most = max(MOST_MADE, 2 * len(self._made))
        if not _is_known_by_memory(base):
            self._made[id(base)] = _Memory(weakref.ref(base), None, channels_last, stream)
        else:
            shape = tuple(base.shape) if channels_last is not None and base.is_contiguous() else None
            self._made[_number(base)] = _Memory(StorageWeakRef(base.untyped_storage()), shape, channels_last, stream)

    def stream(self, tensor: Tensor) -> "Stream | Origins | None":
        """The sequence whose positions a tensor has; of scores, those of its queries and keys. None if unknown."""
        made = self._found(tensor)
        return None if made is None else made.stream

    def follow(self, result: object, *sources: object) -> None:
        """Record that a tensor has the positions of another: of the first source with a known stream, else of the first
        that is not learned."""
        if not isinstance(result, Tensor):
            return
        # (Some tens of functions of each layer come here.)
        unknown = []
        for one in sources:
            if isinstance(one, Tensor):
                made = self._found(one)
                if made is not None and made.stream is not None:
                    self.carry(result, made.stream)
                    return
                unknown.append(one)
        # Ids and masks have no vectors: those that are made of them begin a stream.
        unknown = [one for one in unknown if one.is_floating_point()]
        if unknown:
            self.carry(result, self._continued(next((one for one in unknown if not is_learned(one)), unknown[0])))
        else:
            self.given(result)

    def join(self, result: Tensor, parts: Sequence[object], dim: int) -> None:
        """Record the stream of joined tensors: that of scores, beside which a sink has none; of positions with blocks
        behind them; or else of the last known one."""
        found = [(one, self.stream(one)) for one in parts if isinstance(one, Tensor)]
        scores = next((stream for _, stream in found if isinstance(stream, Origins)), None)
        own = next((stream for _, stream in reversed(found[:-1]) if isinstance(stream, Stream)), None)
        tensor, last = found[-1]
        if scores is not None:
            self.carry(result, scores)
        elif isinstance(last, Stream) and last.sort == "blocks" and own is not None and own is not last:
            count = tensor.shape[dim]
            self.carry(result, Stream("positions and blocks", last.maker, own, count) if count else own)
        else:
            self.follow(result, *reversed(parts))

    def carry(self, result: Tensor, stream: Stream | Origins) -> None:
        made = self._found(result)
        if made is None or made.stream is not stream:
            self._put(base_of(result), stream, None if made is None else made.channels_last)

    def compare(self, scores: Tensor, query: Tensor, key: Tensor) -> None:
        if isinstance(weights := self.stream(query), Origins):
            self.carry(scores, weights.queries)
        elif (origins := self.origins(query, key)) is not None:
            self.carry(scores, origins)

    def masked(self, scores: object, clause: str, *masks: object) -> None:
        if isinstance(scores, Tensor) and isinstance(stream := self.stream(scores), Origins):
            found = [(clause, flag) for one in masks if (flag := _is_mask(one, scores)) is not False]
            if clause == ADDED:
                found += [(WEAK, low) for one in masks if (low := _lowered(one, scores)) is not None]
            if found:
                self.carry(scores, stream._replace(changed=(*stream.changed, *found)))

    def origins(self, query: Tensor, key: Tensor) -> Origins | None:
        if self.is_over_depth(query, key):
            return Origins(Stream("slots"), Stream("layers"))
        of_queries, of_keys = self.stream(query), self.stream(key)
        are_known = isinstance(of_queries, Stream) and isinstance(of_keys, Stream)
        return Origins(of_queries, of_keys) if are_known else None  # type: ignore[arg-type]

    def is_over_depth(self, query: Tensor, key: Tensor) -> bool:
        """True for the same learned queries at every position (B, T, Q, D), for keys that each position has of its own:
        outputs of layers. (Keys of several heads are channels of a projection.)"""
        if not query.dim() == key.dim() == 4 or not 1 < query.shape[1] == key.shape[1]:
            return False
        stream = self.stream(query)
        is_slots = is_learned(query) or (isinstance(stream, Stream) and stream.sort == "slots")
        is_of_positions = isinstance(self.stream(key), Stream) and bool(key.stride(1)) and not self.is_channel(key, 1)
        return is_slots and not query.stride(1) and is_of_positions

    def origins_of_inputs(self, query: Tensor, key: Tensor) -> Origins | None:
        self._continued(query), self._continued(key)
        return self.origins(query, key)

    def _continued(self, tensor: Tensor, sort: Sort = "positions") -> "Stream | Origins":
        if (stream := self.stream(tensor)) is None:
            made, sort = self._found(tensor), "slots" if is_learned(tensor) else sort
            is_lost = sort != "slots" and (made is None or made.channels_last is not None)
            self.carry(tensor, stream := Stream(sort, is_lost=is_lost))
        return stream

    def begin(self, tensor: object, sort: Sort) -> None:
        if isinstance(tensor, Tensor):
            self._continued(tensor, sort)

    def given(self, *tensors: object) -> None:
        """Record tensors that may begin a stream: the inputs of a model, and those made of no other vectors."""
        for one in tensors:
            if isinstance(one, Tensor) and one.is_floating_point():
                if isinstance(stream := self.stream(one), Stream):
                    stream.is_lost = False
                elif self._found(one) is None:
                    self._put(base_of(one), None)


class _Memory(NamedTuple):
    reference: Any
    shape: tuple[int, ...] | None
    """The shape of an inference tensor, which its views cannot name; None if it is not contiguous."""
    channels_last: bool | None = None
    """The axis of the channels of a projection's output; None for other tensors."""
    stream: Stream | Origins | None = None

    def is_channel(self, base: Tensor, stride: int, size: int) -> bool | None:
        """True if an axis with this stride and size, of the output or of its view, runs over the channels; None if it
        runs beyond them."""
        shape = self.shape if base.is_inference() else base.shape if base.is_contiguous() else None
        if shape is None or (len(shape) < 3 and not self.channels_last):
            return None
        step = 1 if self.channels_last else prod(shape[2:])
        whole = step * shape[-1 if self.channels_last else 1]
        return None if step <= stride < whole < stride * size else step <= stride < whole

    def is_gone(self) -> bool:
        if isinstance(self.reference, StorageWeakRef):
            return self.reference.expired()
        return self.reference() is None


MOST_MADE = 4096


def base_of(tensor: Tensor) -> Tensor:
    base = viewed(tensor)
    return tensor if base is None else base


WEAK = "0 and {:g} are added to the scores"
"""The clause of a mask of two numbers, whose flag is the lower one, or 0 for other tensors."""
HIDES = -1e3
"""Below this, exp of a score is 0."""
ADDED, MULTIPLIED = "0 and 1 are added to the scores", "the scores are multiplied by 0 and 1"


def _is_mask(tensor: object, scores: Tensor) -> bool | Tensor:
    """True for a mask of scores; of numbers a tensor, because a device is not waited for, from one row in 16."""
    if not isinstance(tensor, Tensor) or tensor.requires_grad or tensor.shape[-1:] != scores.shape[-1:]:
        return False
    if tensor.dtype == torch.bool:
        return True
    zero, one = ((torch.atleast_2d(tensor)[..., ::16, :] == number) for number in (0, 1))
    return (zero | one).all() & zero.any() & one.any()


def _lowered(tensor: object, scores: Tensor) -> Tensor | None:
    """The number below 0 that a mask of it and 0 adds to scores, from one row in 16; 0 for other tensors."""
    if not isinstance(tensor, Tensor) or tensor.requires_grad or tensor.shape[-1:] != scores.shape[-1:]:
        return None
    if not tensor.is_floating_point() or not tensor.numel() or tensor.is_meta:
        return None
    rows = torch.atleast_2d(tensor)[..., ::16, :]
    low, zero = rows.min(), rows == 0
    return torch.where((zero | (rows == low)).all() & zero.any() & (low < 0) & (low > HIDES), low, 0.0)


def _number(base: Tensor) -> int:
    return base.untyped_storage().data_ptr() if _is_known_by_memory(base) else id(base)


def _is_known_by_memory(base: Tensor) -> bool:
    # In inference mode a view does not name its base. Under vmap a tensor has no memory of its own.
    return base.is_inference() and not is_transformed()


def is_learned(tensor: Tensor) -> bool:
    return isinstance(tensor, nn.Parameter) or isinstance(viewed(tensor), nn.Parameter)
