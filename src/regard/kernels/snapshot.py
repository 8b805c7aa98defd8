"""The parts of a call that others may change before its backward pass or its map reads them again."""

from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.call.shapes import MOST_COPIED
from regard.kernels.base import Call, Snapshot
from regard.tensors.fingerprint import Fingerprints
from regard.tensors.tensor_tree import tensors_mapped

MOST_ELEMENTS = 1 << 14
"""The most elements of a tensor of a bias, score or normalization that is copied for a call."""
PARTS = ("score", "normalization", "mask", "bias")
_NUMBERS = (type(None), bool, int, float, str, torch.dtype, torch.device)


def with_snapshot(call: Call, captured: tuple[Tensor, ...] = ()) -> Call:
    """Copies the small tensors of the parts, and the rest that others may change, such as the tensors captured by
    functions. A bound mask has its own tensors already, unless they are large."""
    own: dict[str, Any] = {}
    held: dict[str, Any] = {f"captured[{place}]": tensor for place, tensor in enumerate(captured)}
    for name in PARTS:
        part = getattr(call, name)
        found = dict(_reached(name, part))
        if name != "mask" and any(map(_is_code, found.values())):
            held |= found  # A copy of an object of another class might not be one.
            continue
        held |= {place: each for place, each in found.items() if not _is_own(place, each)}
        copy = part if name == "mask" else tensors_mapped(part, partial(_copied, name))
        if copy is not part:
            own[name] = copy
    return _holding(replace(call, **own) if own else call, held)


def with_new_snapshot(call: Call) -> Call:
    return _holding(call, {place: each for name in PARTS for place, each in _reached(name, getattr(call, name))})


def _holding(call: Call, named: dict[str, Any]) -> Call:
    if not named:
        return call if call.snapshot is None else replace(call, snapshot=None)
    return replace(call, snapshot=Snapshot(Fingerprints(named), any(map(_is_code, named.values()))))


def _reached(name: str, part: Any) -> Iterator[tuple[str, Any]]:
    waiting = [(name, part)]
    while waiting:
        name, part = waiting.pop()
        if isinstance(part, tuple):
            waiting += [(f"{name}[{place}]", each) for place, each in enumerate(part)][::-1]
        elif isinstance(part, Tensor) or _is_code(part):
            yield name, part
        elif not isinstance(part, _NUMBERS):
            waiting += [(f"{name}.{field}", getattr(part, field)) for field in reversed(part.__dataclass_fields__)]


def _is_code(part: Any) -> bool:
    if isinstance(part, (Tensor, tuple, *_NUMBERS)):
        return False
    return not (type(part).__module__.startswith("regard.") and hasattr(type(part), "__dataclass_fields__"))


def _is_own(name: str, part: Any) -> bool:
    if not isinstance(part, Tensor) or (part.requires_grad and name.startswith("score")):
        return False  # Autograd keeps learned tensors of a score, with which it prepared queries and keys.
    return part.numel() <= (MOST_COPIED if name.startswith("mask") else MOST_ELEMENTS)


def _copied(name: str, tensor: Tensor) -> Tensor:
    # A gradient flows through the copy.
    return tensor.clone() if _is_own(name, tensor) else tensor
