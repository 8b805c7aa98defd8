"""The optimizer that the settings of a run name."""

from functools import partial
from typing import TypedDict, Unpack

import torch
from torch import nn

from regard.tasks.config import TrainingConfig
from regard.training.batched_muon import BatchedMuon
from regard.training.optimizers import adamw, muon


class AdamSettings(TypedDict, total=False):
    """What a task sets of AdamW otherwise than its defaults."""

    betas: tuple[float, float]
    eps: float


def chosen_optimizer(
    config: TrainingConfig, model: nn.Module, output: nn.Module, **settings: Unpack[AdamSettings]
) -> torch.optim.Optimizer:
    """AdamW, or Muon with AdamW, over a model whose last layer is `output`.

    Muon computes in the precision of the run: where that is float32, bf16 is no faster, or float32 was asked for.
    """
    if config.optimizer == "muon":
        dtype = torch.bfloat16 if config.precision == "bf16" else torch.float32
        kind = partial(BatchedMuon, dtype=dtype)
        decay = config.weight_decay
        return muon(model, aside=[output], rate=config.muon_rate, weight_decay=decay, kind=kind, **settings)
    return adamw(model, weight_decay=config.weight_decay, **settings)
