"""AdamW, with weight decay on matrices and none on embeddings, gains and offsets."""

from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn import LearnedPositions, TokenEmbedding

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, TokenEmbedding, LearnedPositions)
"""Modules whose weights are embeddings, so that they do not decay."""
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Devices on which torch has a fused AdamW."""


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters by kind: matrices decay; embeddings, gains and offsets do not.

    A matrix that an embedding and a linear layer share counts as an embedding. Each group is a list of
    (name, parameter) pairs, which optimizers accept, so that a checkpoint can name its tensors.

    Raises:
        ArgumentError: the model has no parameter that can be trained.

    >>> model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 3))
    >>> [[name for name, _ in group["params"]] for group in parameter_groups(model, weight_decay=0.1)]
    [['1.weight'], ['0.weight', '1.bias']]
    """
    embedded = {id(weight) for part in model.modules() for weight in _embedding_weights(part)}
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not named:
        raise ArgumentError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
    matrices = [(name, value) for name, value in named if value.ndim >= 2 and id(value) not in embedded]
    decayed = {id(value) for _, value in matrices}
    others = [(name, value) for name, value in named if id(value) not in decayed]
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    grouped = sum(value.numel() for group in (matrices, others) for _, value in group)
    assert grouped == sum(value.numel() for value in model.parameters() if value.requires_grad)
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module,
    *,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in one fused pass if torch has one for the device.

    The learning rate comes from the schedule: the training loop sets it at every step.

    Raises:
        ArgumentError: the model has no parameter that can be trained.

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); betas and eps of Vaswani et al. 2017, section 5.3.

    >>> adamw(nn.Linear(2, 2)).defaults["betas"]
    (0.9, 0.98)
    """
    groups = parameter_groups(model, weight_decay=weight_decay)
    parameters = [value for group in groups for _, value in group["params"]]
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=fused)


def _embedding_weights(module: nn.Module) -> list[Tensor]:
    return list(module.parameters(recurse=False)) if isinstance(module, EMBEDDINGS) else []
