"""A model that is run by a check, and left as it was."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def evaluated(model: nn.Module) -> Iterator[None]:
    """Evaluate without gradients; restore the model's mode, its buffers and the random state."""
    modes = [(module, module.training) for module in model.modules()]
    buffers = [(buffer, buffer.clone()) for buffer in model.buffers()]
    with torch.no_grad(), torch.random.fork_rng():
        model.eval()
        try:
            yield
        finally:
            for module, mode in modes:
                module.training = mode
            for buffer, before in buffers:
                buffer.copy_(before)
