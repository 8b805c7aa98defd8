"""Models of a configuration, which is compared with the files before anything of its sizes is made."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError, RunFolderError
from regard.tasks.training.checkpoints import check_fit, fill_model

M = TypeVar("M", bound=nn.Module)


def made_of(make: Callable[[], M]) -> M:
    """The model of `make`; raises ArgumentError for sizes of no model, or of one for which there is no memory."""
    try:
        return make()
    except RegardError:
        raise
    except (RuntimeError, ArithmeticError, MemoryError, ValueError, TypeError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArgumentError(f"no model of these sizes can be made: {said}") from None


def filled(make: Callable[[], M], config: Any, tensors: dict[str, Tensor], *, source: Path) -> M:
    """A model with the weights of a checkpoint."""
    most = max((value for name, value in _integers(config) if name.endswith("layers")), default=0)
    if most > len(tensors):
        raise RunFolderError(f"{source} does not fit the model: it has {len(tensors)} tensors, and {most} layers")
    try:
        with torch.device("meta"):
            check_fit(made_of(make), tensors, source=source)
    except ArgumentError as error:
        raise RunFolderError(f"{source} does not fit the model: {error}") from None
    model = made_of(make)
    fill_model(model, tensors, source=source)
    return model


def _integers(config: Any) -> Iterator[tuple[str, int]]:
    """The integers among the settings, and among settings within, with their names."""
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _integers(value)
        elif isinstance(value, int):
            yield field.name, value
