"""The state that a prepared decoder passes from step to step, and how its hypotheses change places.

The operations of torch want the keys of a hypothesis in one row, and those of its source at the hypothesis's place. So
they are copied whenever hypotheses change places. Compiled code is told where they stand, so that nothing is copied.
"""

from dataclasses import dataclass, replace

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.mechanisms.compiled_choice import Chooser, best_of_groups
from regard.models.compiled_step import CompiledStep, LateStep


@dataclass(frozen=True, slots=True, eq=False)
class Memory:
    """The projected sources: A of them."""

    key: tuple[Float[Tensor, "A G S D"], ...]
    """One entry per layer."""
    value: tuple[Float[Tensor, "A G S D"], ...]
    bias: Float[Tensor, "A 1 1 S"] | None
    """-inf at padding; None if there is no padding."""
    lengths: Int[Tensor, " A"] | None
    """The tokens of each source, int64; None if there is no padding."""

    @property
    def count(self) -> int:
        """How many sources there are."""
        return self.key[0].shape[0]

    def of(self, rows: Int[Tensor, " B"]) -> "Memory":
        """A copy of some sources."""
        return Memory(
            tuple(key.index_select(0, rows) for key in self.key),
            tuple(value.index_select(0, rows) for value in self.value),
            None if self.bias is None else self.bias.index_select(0, rows),
            None if self.lengths is None else self.lengths.index_select(0, rows),
        )


@dataclass(frozen=True, slots=True, eq=False)
class FixedState:
    """The state of N hypotheses of A sources."""

    memory: Memory
    owners: Int[Tensor, " N"]
    """Which of the A sources each hypothesis translates."""
    cache: tuple[Float[Tensor, "C capacity W"], ...]
    """Keys and values of the target so far, side by side, one entry per layer; C is N or more."""
    position: int
    """The number of filled positions in the cache."""
    places: Int[Tensor, "N P"] | None = None
    """The row of the cache in which each of the first P positions of each hypothesis stands; the others stand in the
    row of its own number. None if all do, and if the K hypotheses of a source stand side by side: N = A * K."""
    spare: tuple[Float[Tensor, "C capacity W"], ...] = ()
    """Buffers like those of the cache, which are no longer in use."""
    compiled: CompiledStep | None = None
    """What did the last step, or does the steps of this one sentence; None for the operations of torch."""
    late: LateStep | None = None
    """What chooses who does each step, if these are some of many sentences."""

    @property
    def chooser(self) -> Chooser | None:
        """What chooses among the logits of the last step, where compiled code did it."""
        return None if self.compiled is None else best_of_groups

    @property
    def count(self) -> int:
        """How many hypotheses there are."""
        return self.owners.shape[0]


def with_room(state: FixedState) -> FixedState:
    """A state whose cache has room for one more position."""
    capacity = state.cache[0].shape[1]
    if state.position < capacity:
        return state
    # What grows is copied in any case. So the rows of hypotheses that have ended are left behind.
    state = in_rows_of_their_own(state)
    cache = tuple(nn.functional.pad(old, (0, 0, 0, capacity)) for old in state.cache)
    return replace(state, cache=cache, spare=())


def state_of(state: FixedState, index: Int[Tensor, " N"]) -> FixedState:
    """The state of the hypotheses `index`. The one that was given is used up."""
    index = index.to(torch.int64)  # as compiled code reads it
    if state.compiled is not None and state.position and index.shape[0] <= state.cache[0].shape[0]:
        return _pointed_at(state, index)
    return _copied(state, index)


def in_rows_of_their_own(state: FixedState) -> FixedState:
    """The same hypotheses as the operations of torch want them."""
    if state.places is None:
        return state
    return _copied(state, torch.arange(state.count, device=state.owners.device))


def _pointed_at(state: FixedState, index: Int[Tensor, " N"]) -> FixedState:
    """Nothing is copied but where each position of each hypothesis stands."""
    known = 0 if state.places is None else state.places.shape[1]
    places = index[:, None].expand(-1, state.position - known)
    if state.places is not None:
        places = torch.cat([state.places.index_select(0, index), places], 1)
    return replace(state, owners=state.owners.index_select(0, index), places=places.contiguous(), spare=())


def _copied(state: FixedState, index: Int[Tensor, " N"]) -> FixedState:
    """Each hypothesis gets its own row of the cache. If the sources are the same as before, no memory is copied."""
    owners, count = state.owners.index_select(0, index), index.shape[0]
    if count == state.cache[0].shape[0]:
        cache = state.spare or tuple(map(torch.empty_like, state.cache))
    else:
        cache = tuple(old.new_empty(count, *old.shape[1:]) for old in state.cache)
    _fill(cache, state, index)
    if state.places is None and torch.equal(owners, state.owners):
        return replace(state, cache=cache, spare=state.cache)
    memory, owners = _memory_of(state.memory, owners)
    return replace(state, memory=memory, owners=owners, cache=cache, places=None, spare=())


def _fill(cache: tuple[Tensor, ...], state: FixedState, index: Int[Tensor, " N"]) -> None:
    """Copy the filled positions of the hypotheses `index` into rows of their own."""
    known = 0 if state.places is None else state.places.shape[1]
    for old, new in zip(state.cache, cache, strict=True):
        if state.places is not None:
            places = state.places.index_select(0, index)
            new[:, :known] = old[places, torch.arange(known, device=index.device)]
        torch.index_select(old[:, known : state.position], 0, index, out=new[:, known : state.position])


def _memory_of(memory: Memory, owners: Int[Tensor, " N"]) -> tuple[Memory, Int[Tensor, " N"]]:
    """One row for each source, if all have equally many hypotheses side by side; else one for each hypothesis."""
    kept, counts = torch.unique_consecutive(owners, return_counts=True)
    each = int(counts[0]) if len(kept) and bool((counts == counts[0]).all()) else 1
    rows = owners[::each]
    mine = torch.arange(len(rows), device=owners.device)
    same = len(rows) == memory.count and torch.equal(rows, mine)
    return memory if same else memory.of(rows), mine.repeat_interleave(each)
