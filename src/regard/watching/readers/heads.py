"""Which dimension of a call's tensors are the heads, by evidence; how the model lays them out; and their names.

A head is a part of the channels of a projection, so that its dimension steps through channels; one of sequences, or of
windows, steps through positions. Tensors of their own memory have no such steps: then a size that the running modules
give as their number of heads tells it. Where the two are silent, the documentation of the called function counts, and
where it has none, the dimension is unknown.

Rows without labels, (B * H, T, S) in place of (B, H, T, S), get their order from the values: each row is a slice of the
output of a layer of the running module for the arguments of one sequence, so the last vector of a row occurs in that
sequence alone. Without that evidence nothing is unfolded.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FrameType
from typing import NamedTuple
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.call.shapes import BATCH, DimensionName, Dimensions
from regard.tensors.torch_private import DisableTorchFunction
from regard.tensors.undisturbed import undisturbed
from regard.watching.running.thread_state import ThreadState


class Folding(NamedTuple):
    heads: int
    heads_last: bool
    """True if the heads of a sequence are adjacent (B * H), False if the sequences of a head are (H * B)."""

    def unfolded(self, tensor: Tensor) -> Tensor:
        """A tensor (B * H, ...) as (B, H, ...)."""
        if self.heads_last:
            return tensor.unflatten(0, (-1, self.heads))
        return tensor.unflatten(0, (self.heads, -1)).transpose(0, 1)

    def folded(self, tensor: Tensor) -> Tensor:
        """A tensor (B, H, ...) as (B * H, ...), or as (H * B, ...)."""
        return (tensor if self.heads_last else tensor.transpose(0, 1)).flatten(0, 1)

    def __str__(self) -> str:
        order = "(B * H, T, S)" if self.heads_last else "(H * B, T, S)"
        return f"the model folds {self.heads} heads into the batch, {order}: shown as (B, H, T, S)"


class MovedHeads(NamedTuple):
    """Heads that are not the dimension before the queries, as in (B, H, windows, T, D)."""

    place: int
    """The place of the heads, from the end."""

    def unfolded(self, tensor: Tensor) -> Tensor:
        """A tensor (B, H, ..., T, D) as (B, ..., H, T, D)."""
        return tensor.movedim(self.place, -3) if tensor.dim() >= -self.place else tensor

    def folded(self, tensor: Tensor) -> Tensor:
        return tensor.movedim(-3, self.place)

    def __str__(self) -> str:
        return "the model has its heads before its windows, (B, H, windows, T, S): shown as (B, windows, H, T, S)"


HeadLayout = Folding | MovedHeads


class Heads(NamedTuple):
    dimensions: Dimensions | None = None
    """Of the call as it is shown; None for those of its documentation."""
    layout: HeadLayout | None = None
    """None if the model has the heads before the queries, or none."""

    @property
    def notes(self) -> list[str]:
        found = [] if self.layout is None else [str(self.layout)]
        names = self.dimensions
        if names is not None and names.why:
            found.append(names.why)
        elif names is not None and ("window" in names.leading or names.head is None):
            found.append(f"its dimensions are {names}")
        return found


AS_DOCUMENTED = Heads()
OVER_DEPTH = Heads(Dimensions((*BATCH, "window"), queries="slots", keys="layers"))


def documented_heads(thread: ThreadState, tensors: Sequence[Tensor]) -> Heads:
    """Heads before the queries, (batch..., H, T, D), of a value, a key and a query of one rank above 3."""
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
    rank = len(leading)
    if counts is None:
        counts = [n for frame in thread.stack[: -MODULES - 1 : -1] for n in inferred_heads(frame.module)]
    steps = [_steps(thread, tensors, place - rank - 2) for place in range(rank)]
    places = [n for n, step in enumerate(steps) if step]
    if not places:
        places = [
            n for n, (step, size) in enumerate(zip(steps, leading, strict=True)) if step is None and size in counts
        ]
    if len(places) == 2 and rank == 2 and leading[0] == leading[1] and tensors and tensors[0].dim() == 4:
        # The values of each sequence tell two dimensions of one size apart.
        folding = find_folding(tensors[0].flatten(0, 1))
        places = [int(folding.heads_last)] if isinstance(folding, Folding) else places
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


SAMPLES = 4
CLOSE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far two computations of one vector may be apart, relative to its largest number; 1e-4 in other dtypes."""

_found_in: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The output in which the rows of a module were found last, and are looked for first: the order itself is not kept."""


def find_folding(values: Tensor) -> Folding | str | None:
    """The folding of the running module's heads into the rows of its values (N, S, E); None, or why it is unknown."""
    with undisturbed(), DisableTorchFunction():
        for module, tensors in running():
            if (slices := _slice_of(module, tensors, len(values))) is not None:
                return slices
            heads = [n for n in inferred_heads(module) if n > 1 and len(values) % n == 0]
            if any(len(tensor) == len(values) for tensor in tensors):
                # The rows came from outside: folded already, or one for each sequence; but lengths may come first.
                found = _order_of(module, tensors, values, heads)
                if found is not None or heads:
                    return found
                continue
            first = [len(values) // len(t) for t in tensors if len(t) and len(values) % len(t) == 0]
            if (found := _order_of(module, tensors, values, heads or first)) is not None:
                return found
            if len(values) in heads and any(len(tensor) == 1 for tensor in tensors):
                return Folding(len(values), heads_last=True)
            if folds := heads or first:
                return (
                    f"its {len(values)} maps are {len(values) // folds[0]} sequences of {folds[0]} heads or blocks, in "
                    "an order that is not known"
                )
    return None


def _slice_of(module: nn.Module, tensors: list[Tensor], rows: int) -> str | None:
    """A sentence if the rows are a part of a module's maps, computed in turns (diffusers' sliced attention)."""
    heads, batch = [n for n in inferred_heads(module) if n > 1], {len(tensor) for tensor in tensors}
    if len(heads) != 1 or len(batch) != 1 or rows % heads[0] == 0:
        return None
    sequences = batch.pop()
    if rows % sequences == 0 or any(tensor.dim() > 2 and tensor.shape[1] < sequences for tensor in tensors):
        return None  # a loop over heads, or positions come first
    maps = sequences * heads[0]
    return (
        f"a slice: {rows} of the {maps} (sequence x head) maps of its module, {sequences} sequences of {heads[0]} heads"
    )


def _order_of(module: nn.Module, tensors: list[Tensor], values: Tensor, folds: list[int]) -> Folding | None:
    return next((found for heads in folds if (found := _order(module, tensors, values, heads)) is not None), None)


def _order(module: nn.Module, tensors: list[Tensor], values: Tensor, heads: int) -> Folding | None:
    count = len(values)
    sequences = count // heads
    rows = [n for n in range(1, count) if n // heads != n % sequences] or [1]
    rows = rows[:: max(1, len(rows) // SAMPLES)][:SAMPLES]
    wanted = values.detach()[rows, -1].float()
    outputs, first = [*_last_vectors(module, tensors, sequences, values.shape[-1])], _found_in.get(module, 0)
    for place in sorted(range(len(outputs)), key=lambda place: place != first):
        last = outputs[place]()
        neighbours = [bool(_occurs(one, last[n // heads], values.dtype)) for n, one in zip(rows, wanted, strict=True)]
        others = [bool(_occurs(one, last[n % sequences], values.dtype)) for n, one in zip(rows, wanted, strict=True)]
        is_next = all(neighbours) and (sequences == 1 or not all(others))
        if is_next or (all(others) and not all(neighbours)):
            _found_in[module] = place
            return Folding(heads, heads_last=is_next)
    return None


def _last_vectors(
    module: nn.Module, tensors: list[Tensor], sequences: int, width: int
) -> Iterator[Callable[[], Tensor]]:
    """The output of each layer of a module for the last vector of each sequence (B, C), for each argument."""
    children = [layer for child in module.children() for layer in (child, *child.children())]
    weights = [(layer, getattr(layer, "weight", None)) for layer in children]
    layers = [(layer, w.detach()) for layer, w in weights if isinstance(w, Tensor) and w.dim() == 2]
    for tensor in tensors:
        for x in _ends(tensor.detach(), sequences):
            if x.shape[-1] >= width:
                yield x.float
            for layer, own in layers:
                # A weight stands as in nn.Linear, or the other way round.
                for weight in (own.mT, own):
                    if weight.shape[0] == x.shape[-1] and weight.shape[1] >= width:
                        yield partial(_through, x, weight, getattr(layer, "bias", None))


def _through(x: Tensor, weight: Tensor, bias: object) -> Tensor:
    made = x.float() @ weight.float()
    return made + bias.float() if isinstance(bias, Tensor) and bias.shape == made.shape[-1:] else made


def _ends(tensor: Tensor, sequences: int) -> Iterator[Tensor]:
    """The last vectors (B, C) of a tensor (B, ..., T, C), (T, B, C) or (B, C, T)."""
    if len(tensor) == sequences:
        yield tensor.flatten(1, -2)[:, -1]
        yield tensor.flatten(2)[..., -1]
    if tensor.dim() == 3 and tensor.shape[1] == sequences:
        yield tensor[-1]


def _occurs(vector: Tensor, inside: Tensor, dtype: torch.dtype) -> Tensor:
    apart = (inside.unfold(0, len(vector), 1) - vector).abs().amax(-1)
    return apart.min() <= CLOSE.get(dtype, 1e-4) * vector.abs().max()


NAMES = frozenset({
    "num_heads", "num_attention_heads", "n_heads", "n_head", "heads", "nhead", "nheads", "num_head", "head_num",
    "no_heads", "decoder_attention_heads", "encoder_attention_heads", "h",
})  # fmt: skip
"""The attributes of modules, or of their `config`, with the number of heads."""


def inferred_heads(module: nn.Module) -> list[int]:
    config = vars(module).get("config", vars(type(module)).get("config"))
    found = _counts(getattr(config, "__dict__", {})) or _counts({name: _of_config(config, name) for name in NAMES})
    return list(dict.fromkeys([*own_heads(module), *found]))


def own_heads(module: nn.Module) -> list[int]:
    # A property of a module may run anything, and is not read.
    return _counts(vars(module)) or _counts(vars(type(module)))


def _counts(given: Mapping[str, object]) -> list[int]:
    found = (given[name] for name in NAMES & given.keys())
    return [n for n in found if isinstance(n, int) and not isinstance(n, bool) and n > 0]


def _of_config(config: object, name: str) -> object:
    try:
        return getattr(config, name, None)
    except Exception:  # A config of others may raise anything.
        return None


MODULES = 3
"""The most running modules tried, from the innermost outwards: some leave the softmax to a module inside."""


def running() -> Iterator[tuple[nn.Module, list[Tensor]]]:
    frame: FrameType | None = sys._getframe(2)
    found: list[nn.Module] = []
    while frame is not None and len(found) < MODULES:
        module, *given = _arguments(frame)
        if isinstance(module, nn.Module) and _is_forward(frame, module) and not any(module is m for m in found):
            tensors = [t for t in given if isinstance(t, Tensor) and t.is_floating_point() and t.dim() > 2]
            if tensors:
                found.append(module)
                yield module, tensors
        frame = frame.f_back


def _arguments(frame: FrameType) -> list[object]:
    code, given = frame.f_code, frame.f_locals
    named = code.co_argcount + code.co_kwonlyargcount
    found = [given.get(name) for name in code.co_varnames[: code.co_argcount]]
    stars = code.co_varnames[named : named + bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)]
    for star in (given.get(name) for name in stars):
        found += star.values() if isinstance(star, dict) else star if isinstance(star, tuple) else ()
    found += [given.get(name) for name in code.co_varnames[code.co_argcount : named]]
    return found or [None]


def _is_forward(frame: FrameType, module: nn.Module) -> bool:
    forward = getattr(inspect.unwrap(getattr(type(module), "forward", _is_forward)), "__code__", None)
    return frame.f_code.co_name == "forward" or frame.f_code is forward
