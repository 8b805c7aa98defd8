"""Whether a model is no more than its configuration and its weights, the content of an export."""

from collections.abc import Callable
from copy import deepcopy
from itertools import chain
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.tensors.torch_private import counted_version, has_hooks_of_all, is_bare

M = TypeVar("M", bound=nn.Module)
NUMBERS = 8
"""How many elements of each weight are compared: a fused optimizer writes without counting it."""


class PlainModel:
    """A model that was no more than its configuration and its weights when it was exported, and may change since.

    Raises:
        ArgumentError: it is more: an export would be of another model.
    """

    def __init__(self, model: nn.Module, made: nn.Module) -> None:
        if reason := why_not_plain(model, made):
            raise ArgumentError(f"an export would be another model than the one that was loaded: {reason}")
        self._model, self._made, self._weights = model, made, _weights(model)

    def why_changed(self) -> str | None:
        """How the model differs from the exported one by now; None if it does not."""
        if (reason := why_not_plain(self._model, self._made)) is None:
            reason = None if _weights(self._model) == self._weights else "its weights were written or replaced"
        return reason and f"has an older model than the one that is asked: {reason}"


def plain_model(model: M, make: Callable[[], nn.Module]) -> tuple[PlainModel, M]:
    """A model as the export is compared with it, and on the CPU; `make` makes one of its configuration."""
    with torch.device("meta"):
        plain = PlainModel(model, make())
    return plain, model if next(model.parameters()).device.type == "cpu" else deepcopy(model).cpu()


def _weights(model: nn.Module) -> list[object]:
    found: list[object] = []
    for one in chain(model.parameters(), model.buffers()):
        few = one.detach().flatten()[:: max(1, one.numel() // NUMBERS)][:NUMBERS]
        found.append((id(one), one.data_ptr(), counted_version(one), few.tolist()))
    return found


def why_not_plain(model: nn.Module, made: nn.Module) -> str | None:
    """Why a model may compute something else than its weights in a model of its configuration; None if it cannot.

    Adapters, parametrisations and subclasses of layers are modules of other types; a changed setting is another value.

    Args:
        model: the model.
        made: a new model of the same configuration; its weights may be on the device "meta".

    >>> why_not_plain(nn.Sequential(nn.ReLU()), nn.Sequential(nn.ReLU()))
    >>> why_not_plain(nn.Sequential(nn.LayerNorm(2, eps=0.1)), nn.Sequential(nn.LayerNorm(2)))
    'its module 0 has other settings than its configuration: eps'
    """
    if has_hooks_of_all():
        return "there are hooks on all modules"
    ours, theirs = dict(model.named_modules()), dict(made.named_modules())
    for name in sorted(ours.keys() ^ theirs.keys()):
        return f"its module {name} is not as its configuration makes it"
    for name, module in ours.items():
        kind, said = type(module), f"its module {name}" if name else "it"
        if kind is not type(theirs[name]):
            return f"{said} is a {kind.__name__} where its configuration has a {type(theirs[name]).__name__}"
        if not is_bare(module, kind, kind.forward):
            return f"{said} has hooks, or another forward than its class"
        if changed := _changed(module, theirs[name]):
            return f"{said} has other settings than its configuration: {', '.join(changed)}"
    return None


def _changed(module: nn.Module, other: nn.Module) -> list[str]:
    ours, theirs = _settings(module), _settings(other)
    return sorted(name for name in ours.keys() | theirs.keys() if ours.get(name) != theirs.get(name))


def _settings(module: nn.Module) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(module).items()
        if not name.startswith("_") and name != "training" and not isinstance(value, Tensor)
    }
