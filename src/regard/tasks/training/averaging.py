"""The exponential moving average of a model's weights."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from regard.errors import ArgumentError
from regard.tensors.torch_private import lerp_each_


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    r"""The exponential moving average of a model's parameters, which begins with its present ones.

    After step t it is $a_t = d_t a_{t-1} + (1 - d_t) \theta_t$ with $d_t = \min(d, (1 + t) / (10 + t))$: the
    average forgets the early steps faster, because their weights are still far from good. With a decay of d it
    looks back over about $1 / (1 - d)$ steps.

    Source: Polyak and Juditsky 1992; the warm-up of the decay is TensorFlow's ExponentialMovingAverage's.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = moving_average(model, 0.5)
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(3.0)
    >>> average.update_parameters(model)
    >>> with in_place_of(average, model):
    ...     inside = model.weight.item()
    >>> model.weight.item(), inside == average.module.weight.item()
    (3.0, True)
    """
    if not 0.0 < decay < 1.0:
        raise ArgumentError(f"decay must be above 0 and below 1, got {decay}")

    @torch.no_grad()
    def lerp(averages: Sequence[Tensor], current: Sequence[Tensor], step: Tensor | int) -> None:
        lerp_each_(list(averages), list(current), 1.0 - min(decay, (1 + int(step)) / (10 + int(step))))

    average = AveragedModel(model, multi_avg_fn=lerp)
    average.n_averaged += 1  # torch would copy the weights after step 1, and count from 0
    return average


@contextmanager
def in_place_of(average: AveragedModel, model: nn.Module) -> Iterator[None]:
    """Give the model the averaged weights while the block runs, and its own weights again afterwards."""
    _exchange(average.module, model)
    try:
        yield
    finally:
        _exchange(average.module, model)


def _exchange(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        ours.data, theirs.data = theirs.data, ours.data
