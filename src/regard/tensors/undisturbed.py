"""Contexts in which a map is read, exact wherever it happens; and in which a check runs a model, left as it was."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext

import torch
from torch import Tensor, nn

from regard.tensors.guards import autocasts, is_inference, is_recorded


def undisturbed() -> AbstractContextManager[object]:
    """A context without gradients, autocast and inference tensors, so a read is exact wherever it happens."""
    casting = autocasts()
    return _exactly(torch.no_grad(), casting) if casting or is_recorded() or is_inference() else nullcontext()


def with_graph() -> AbstractContextManager[object]:
    return _exactly(recorded(), autocasts())


@contextmanager
def recorded() -> Iterator[None]:
    """A context with gradients, under the autocast of the call that is read in it. Saved-tensor hooks of others
    (torch.utils.checkpoint counts the tensors of a block) see nothing of a read."""
    keeps = torch.autograd.graph.saved_tensors_hooks(_as_it_is, _as_it_is)
    with torch.inference_mode(False), torch.enable_grad(), keeps:
        yield


def _exactly(gradients: AbstractContextManager[object], casting: tuple[str, ...]) -> ExitStack:
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(gradients)
    for kind in casting:
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack


def _as_it_is(tensor: Tensor) -> Tensor:
    return tensor


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
