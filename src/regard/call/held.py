"""The parts of a call that others may change before its backward pass or its map reads them again."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.masks.base import Mask
from regard.call.normalizations import Normalization, Softmax
from regard.call.scores.base import ScaledDot, Score
from regard.call.shapes import MOST_COPIED
from regard.errors import OverwrittenError
from regard.tensors.captures import Captures
from regard.tensors.tensor_tree import tensors_mapped

MOST_ELEMENTS = 1 << 14
"""The most elements of a bias, or of a score's or a normalization's tensor, that is copied for a call."""

Parts = tuple[Score, Normalization, Mask | None, Bias | None]
NAMES = ("score", "normalization", "mask", "bias")
_NUMBERS = (type(None), bool, int, float, str, torch.dtype, torch.device)


@dataclass(frozen=True, slots=True, eq=False)
class Held:
    """Tensors with gradients, large tensors, and the caller's own functions and classes."""

    captures: Captures
    has_code: bool
    """Whether there are functions or classes of the caller. They may depend on more, such as random numbers."""

    def require_unchanged(self, reader: str) -> None:
        """Check the tensors and values that were held when the call ran.

        Raises:
            OverwrittenError: one has changed.
        """
        changed = self.captures.changed()
        if changed is not None:
            raise OverwrittenError(
                f"{changed} has changed since the attention call, and {reader} reads it again: use it before the "
                "change, or hand the call a copy (a clone(), a function with values of its own)"
            )


def settled(parts: Parts) -> tuple[Parts, Held | None]:
    """The parts of a call with copies of their small tensors, and the rest that others may change; None for nothing.

    A bound mask has its own tensors already, unless they are large.
    """
    score, normalization, mask, bias = parts
    if bias is None and mask is None and type(score) is ScaledDot and type(normalization) is Softmax:
        return parts, None
    if not any(_is_code(held) for _, held in _reached(parts)):
        own = tensors_mapped((score, normalization, bias), _copied)
        parts = own[0], own[1], mask, own[2]
    held = {name: each for name, each in _reached(parts) if not (isinstance(each, Tensor) and _is_own(name, each))}
    if not held:
        return parts, None
    return parts, Held(Captures(*held.values(), names=held), any(map(_is_code, held.values())))


def held_entirely(parts: Parts) -> Held | None:
    """All that these parts hold, for parts that were made of others."""
    held = dict(_reached(parts))
    return Held(Captures(*held.values(), names=held), any(map(_is_code, held.values()))) if held else None


def _reached(parts: Parts) -> Iterator[tuple[str, Any]]:
    """The tensors of regard's own classes, and the objects of other classes, with their names."""
    waiting: list[tuple[str, Any]] = [*zip(NAMES, parts, strict=True)][::-1]
    while waiting:
        name, held = waiting.pop()
        if isinstance(held, _NUMBERS):
            continue
        if isinstance(held, tuple):
            waiting += [(f"{name}[{place}]", part) for place, part in enumerate(held)][::-1]
        elif isinstance(held, Tensor) or _is_code(held):
            yield name, held
        else:
            waiting += [(f"{name}.{field}", getattr(held, field)) for field in reversed(held.__dataclass_fields__)]


def _is_code(held: Any) -> bool:
    if isinstance(held, Tensor):
        return False
    return not (type(held).__module__.startswith("regard.") and hasattr(type(held), "__dataclass_fields__"))


def _is_own(name: str, tensor: Tensor) -> bool:
    most = MOST_COPIED if name.startswith("mask") else MOST_ELEMENTS
    return not tensor.requires_grad and tensor.numel() <= most


def _copied(tensor: Tensor) -> Tensor:
    return tensor if tensor.requires_grad or tensor.numel() > MOST_ELEMENTS else tensor.clone()
