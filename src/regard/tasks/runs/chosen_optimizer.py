"""The optimizer of the settings of a run."""

from typing import TypedDict, Unpack

import torch
from torch import nn

from regard.tasks.config import TrainingConfig
from regard.tasks.training.optimizers import adamw, muon


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
