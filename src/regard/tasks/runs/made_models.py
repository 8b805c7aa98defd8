"""The model and the optimizer of a configuration, which is compared with the files before anything is made of it."""

from collections.abc import Callable, Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any, TypedDict, TypeVar, Unpack

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError, RunFolderError
from regard.tasks.config import TrainingConfig
from regard.tasks.training.checkpoints import check_fit, fill_model
from regard.tasks.training.optimizers import adamw, muon

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
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _integers(value)
        elif isinstance(value, int):
            yield field.name, value


class AdamSettings(TypedDict, total=False):
    betas: tuple[float, float]
    eps: float


def chosen_optimizer(
    config: TrainingConfig, model: nn.Module, output: nn.Module, **settings: Unpack[AdamSettings]
) -> torch.optim.Optimizer:
    """AdamW, or Muon with AdamW, over a model whose last layer is `output`."""
    decay = config.weight_decay
    if config.optimizer == "muon":
        return muon(model, aside=[output], rate=config.muon_rate, weight_decay=decay, **settings)
    return adamw(model, weight_decay=decay, **settings)
