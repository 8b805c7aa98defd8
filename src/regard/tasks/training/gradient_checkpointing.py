"""Less memory for more time: the backward pass computes the results of each layer again."""

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from regard.errors import ArgumentError


def recompute_layers(model: nn.Module) -> None:
    """Let each layer of a model's stacks keep only its inputs, and run a second time in the backward pass.

    The results stay the same to the bit, also with dropout: the second run begins with the random state of the first.

    Source: Chen et al. 2016 (arXiv:1604.06174), "gradient checkpointing".

    >>> import torch
    >>> model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2)]))
    >>> recompute_layers(model)
    >>> x = model[0][0](torch.ones(1, 2)).sum().backward()
    """
    stacks = [child for child in model.children() if isinstance(child, nn.ModuleList)]
    found = [layer for stack in stacks for layer in stack]
    if not found:
        raise ArgumentError(
            f"gradient checkpointing is by layers, and {type(model).__name__} has no stack of them: leave it out"
        )
    for layer in found:
        layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
