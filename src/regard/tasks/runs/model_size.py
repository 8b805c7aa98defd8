"""The model and the optimizer of a run: parameters counted before the model is made, and the memory to train it."""

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypedDict, TypeVar, Unpack, cast

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.models.config import OneStackConfig, RNNConfig, StackConfig
from regard.models.layer_pattern import read_layers
from regard.tasks.config import TrainingConfig
from regard.tasks.runs.made_models import made_of
from regard.tasks.training.distributed.devices import find_device
from regard.tasks.training.optimizers import adamw, muon
from regard.tasks.training.reporting.memory import most_bytes
from regard.tensors.byte_size import human

M = TypeVar("M", bound=nn.Module)
S = TypeVar("S", bound=StackConfig | RNNConfig)

NUMBER_BYTES = 4
"""The bytes of a weight, a gradient and an element of the optimizer's state: autocast leaves all of them in float32."""
OPTIMIZER_NUMBERS = {"adamw": 2, "muon": 1}
"""The least elements that each optimizer keeps for a parameter. Muon keeps one for a hidden matrix, and AdamW, which
updates all else beside it, keeps two."""


def count_parameters(make: Callable[[S], nn.Module], sizes: S) -> int:
    """The number of parameters of the model of these settings.

    Nothing of those sizes is made: models of few layers are made on the `meta` device, where they take no memory. The
    layers of a stack have the same shapes from the second on, or from one round of their pattern to the next: these
    models tell of all layers.

    >>> from regard.models import DecoderOnly, DecoderOnlyConfig
    >>> sizes = DecoderOnlyConfig(dim=8, num_heads=2, feed_forward_dim=16, num_layers=10**9)
    >>> f"{count_parameters(partial(DecoderOnly, vocab_size=100), sizes):,}"
    '600,000,000,816'
    """
    depths = {name: getattr(sizes, name) for name in sizes.depths}
    kinds = len(read_layers(sizes.layers)) if isinstance(sizes, OneStackConfig) else 1
    deep = {name: depth for name, depth in depths.items() if depth > 2 * kinds}
    two = {name: kinds + (depth - 1) % kinds + 1 for name, depth in deep.items()}

    def count(**layers: int) -> int:
        with torch.device("meta"):
            model = made_of(partial(make, cast(S, replace(cast(Any, sizes), **layers))))
        return sum(parameter.numel() for parameter in model.parameters())

    few = count(**two)
    rounds = {name: (depth - two[name]) // kinds for name, depth in deep.items()}
    return few + sum(more * (few - count(**{**two, name: two[name] - kinds})) for name, more in rounds.items())


def refuse_too_large(make: Callable[[S], nn.Module], sizes: S, config: TrainingConfig) -> None:
    """Refuse a model whose training needs more memory than the device, or the machine, has in all.

    Counted are the weights, their gradients, their moving average and the optimizer's state; batches come on top.
    Nothing is refused where the system does not tell how much memory it has.
    """
    device = find_device(config.device)
    there, count = most_bytes(device), count_parameters(make, sizes)
    numbers = 2 + OPTIMIZER_NUMBERS[config.optimizer] + (config.fit.ema_decay > 0)
    needed = count * numbers * NUMBER_BYTES * _copies(device)
    if there and needed > there:
        average = ", their average" if config.fit.ema_decay else ""
        owner = f"the device {device}" if device.type == "cuda" else "this machine, with its swap,"
        raise ArgumentError(
            f"a model of these sizes has at least {count:,} parameters, whose training takes at least {human(needed)} "
            f"(weights, gradients{average}, and what {config.optimizer} keeps), but {owner} has {human(there)} of "
            "memory: take a smaller model"
        )


def _copies(device: torch.device) -> int:
    """How many copies of the model one device holds for the ranks of `torchrun`."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", "1")) if device.type == "cpu" else 1


def made_for_training(make: Callable[[S], M], sizes: S, config: TrainingConfig) -> M:
    """The model of these settings, if there is memory to train it."""
    refuse_too_large(make, sizes, config)
    return made_of(partial(make, sizes))


class AdamSettings(TypedDict, total=False):
    """The settings of AdamW in which a task differs from its defaults."""

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
