"""The order of heads folded into the batch, (B * H, T, S) in place of (B, H, T, S), where rows have no labels.

Their number comes from the running module (its attributes, or the batch of its arguments). The order comes from the
values: each row is a slice of the output of a layer of the module for the arguments of one sequence, so the last vector
of a row occurs in that sequence alone. Without that evidence nothing is unfolded.
"""

import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from inspect import CO_VARARGS, CO_VARKEYWORDS
from types import FrameType
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from regard.tensors.torch_private import DisableTorchFunction
from regard.tensors.undisturbed import undisturbed
from regard.watching.readers.head_layouts import Folding

SAMPLES = 4
"""How many rows are looked for in the module's arguments."""
CLOSE = {torch.float16: 1e-2, torch.bfloat16: 5e-2}
"""How far two computations of one vector may be apart, relative to its largest number; 1e-4 in other dtypes."""

_found_in: WeakKeyDictionary[nn.Module, int] = WeakKeyDictionary()
"""The output in which the rows of a module were found last, and are looked for first: the order itself is not kept."""


def find_folding(values: Tensor) -> Folding | str | None:
    """Infer the folding of the running module's heads into the rows of its values (N, S, E).

    Returns:
        The folding; None without one; or a sentence that explains why it is unknown.
    """
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
    """A value of a config; None if it has none, or one per layer."""
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
    """The arguments of a running function, those of `*args` and `**kwargs` too; [None] for none."""
    code, given = frame.f_code, frame.f_locals
    named = code.co_argcount + code.co_kwonlyargcount
    found = [given.get(name) for name in code.co_varnames[: code.co_argcount]]
    stars = code.co_varnames[named : named + bool(code.co_flags & CO_VARARGS) + bool(code.co_flags & CO_VARKEYWORDS)]
    for star in (given.get(name) for name in stars):
        found += star.values() if isinstance(star, dict) else star if isinstance(star, tuple) else ()
    found += [given.get(name) for name in code.co_varnames[code.co_argcount : named]]
    return found or [None]


def _is_forward(frame: FrameType, module: nn.Module) -> bool:
    """True if a function is the forward of a module, under whatever name it was written."""
    forward = getattr(inspect.unwrap(getattr(type(module), "forward", _is_forward)), "__code__", None)
    return frame.f_code.co_name == "forward" or frame.f_code is forward
