"""The optimizer that the settings of a run name."""

from typing import TypedDict, Unpack

import torch
from torch import nn

from regard.tasks.config import TrainingConfig
from regard.training.optimizers import adamw, muon, torchs_muon
from regard.training.precise_muon import PreciseMuon


class AdamSettings(TypedDict, total=False):
    """What a task sets of AdamW otherwise than its defaults."""

    betas: tuple[float, float]
    eps: float


def chosen_optimizer(
    config: TrainingConfig, model: nn.Module, output: nn.Module, **settings: Unpack[AdamSettings]
) -> torch.optim.Optimizer:
    """AdamW, or Muon with AdamW, over a model whose last layer is `output`.

    What is trained in float32 is so because bf16 is no faster there, or because it was asked for.
    """
    if config.optimizer == "muon":
        kind = torchs_muon if config.precision == "bf16" else PreciseMuon
        decay = config.weight_decay
        return muon(model, aside=[output], rate=config.muon_rate, weight_decay=decay, kind=kind, **settings)
    return adamw(model, weight_decay=config.weight_decay, **settings)
