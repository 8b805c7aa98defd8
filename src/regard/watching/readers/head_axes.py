"""Which dimension of a call's tensors are the heads, by evidence: channels of a projection, or the sizes of a module.

A head is a part of the channels of a projection, so that its dimension steps through channels; one of sequences, or of
windows, steps through positions. Tensors of their own memory have no such steps: then a size that the running modules
give as their number of heads tells it. Where the two are silent, the documentation of the called function counts, and
where it has none, the dimension is unknown.
"""

from collections.abc import Sequence

from torch import Tensor

from regard.call.shapes import BATCH, DimensionName, Dimensions
from regard.watching.readers.foldings import MODULES, find_folding, inferred_heads, own_heads, running
from regard.watching.readers.head_layouts import AS_DOCUMENTED, Folding, Heads, MovedHeads
from regard.watching.running.thread_state import ThreadState


def documented_heads(thread: ThreadState, tensors: Sequence[Tensor]) -> Heads:
    """The heads of a call whose documentation has them before the queries, (batch..., H, T, D).

    `tensors` are its value, key and query, of one rank above 3.
    """
    steps, leading = _steps(thread, tensors, -3), tensors[-1].shape[:-2]
    documented = AS_DOCUMENTED if len(leading) == 2 else _at(len(leading) - 1, len(leading))
    if steps:
        return documented
    counts = [n for frame in thread.stack[: -MODULES - 1 : -1] for n in own_heads(frame.module)]
    if steps is None and (not counts or leading[-1] in counts):
        return documented
    found = found_heads(thread, tensors, leading, counts)
    if steps is None and found.dimensions is not None and "unknown" in found.dimensions.leading:
        # Several maps for each head are plausible if the other dimension is the whole batch.
        is_whole = any(len(tensor) == leading[0] for _, given in running() for tensor in given)
        return documented if is_whole else found
    return found


def folded_heads(values: Tensor) -> Heads:
    """The heads of a call of one leading dimension (N, S, E): folded into it, or none."""
    folding = find_folding(values)
    if isinstance(folding, Folding):
        return Heads(Dimensions(("batch", "head")), folding)
    return Heads(None if folding is None else Dimensions.unknown(1, folding))


def found_heads(
    thread: ThreadState, tensors: Sequence[Tensor], leading: Sequence[int], counts: Sequence[int] | None = None
) -> Heads:
    """The heads of a call by evidence alone; `leading` are the sizes before queries and keys."""
    rank = len(leading)
    if counts is None:
        counts = [n for frame in thread.stack[: -MODULES - 1 : -1] for n in inferred_heads(frame.module)]
    steps = [_steps(thread, tensors, place - rank - 2) for place in range(rank)]
    places = [n for n, step in enumerate(steps) if step]
    if not places:
        places = [
            n for n, (step, size) in enumerate(zip(steps, leading, strict=True)) if step is None and size in counts
        ]
    if len(places) == 2 and rank == 2 and leading[0] == leading[1]:
        places = _told_apart(tensors) or places
    if len(places) == 1:
        return _at(places[0], rank)
    if not places and all(step is False for step in steps):
        return Heads(Dimensions(_beside(rank)))
    told = f"the modules around it have {' or '.join(map(str, dict.fromkeys(counts)))} heads" if counts else (
        "no module around it gives its number of heads, as `num_heads` does"
    )  # fmt: skip
    why = (
        f"which of the dimensions {tuple(leading)} has the heads is not known: its values are no view of a projection, "
        f"and {told}"
    )
    return Heads(Dimensions.unknown(rank, why))


def _at(place: int, rank: int) -> Heads:
    names = Dimensions((*_beside(rank - 1), "head"))
    return Heads(names, None if place == rank - 1 else MovedHeads(place - rank - 2))


def _beside(count: int) -> tuple[DimensionName, ...]:
    windows: tuple[DimensionName, ...] = ("window",)
    return (*BATCH, *windows * (count - 1)) if count else ()


def _steps(thread: ThreadState, tensors: Sequence[Tensor], axis: int) -> bool | None:
    """True if a dimension steps through the channels of a projection, False through its positions; None if unknown."""
    for tensor in tensors:
        if tensor.dim() >= -axis and (found := thread.streams.is_channel(tensor, axis)) is not None:
            return found
    return None


def _told_apart(tensors: Sequence[Tensor]) -> list[int]:
    """The place of the heads among two dimensions of one size, by the values of each sequence."""
    folding = find_folding(tensors[0].flatten(0, 1)) if tensors and tensors[0].dim() == 4 else None
    return [int(folding.heads_last)] if isinstance(folding, Folding) else []
