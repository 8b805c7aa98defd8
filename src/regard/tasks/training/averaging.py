"""Averages of weights: the moving average of a training run, and the mean of several models."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RunFolderError
from regard.tensors.torch_private import lerp_each_


class MovingAverage:
    r"""The exponential moving average of a model's parameters.

    After step t it is $a_t = d_t a_{t-1} + (1 - d_t) \theta_t$ with $d_t = \min(d, (1 + t) / (10 + t))$: the
    average forgets the early steps faster, because their weights are still far from good. With a decay of d it
    looks back over about $1 / (1 - d)$ steps.

    Source: Polyak and Juditsky 1992; the warm-up of the decay is TensorFlow's ExponentialMovingAverage's.

    >>> model = nn.Linear(1, 1, bias=False)
    >>> average = MovingAverage(model, 0.5)
    >>> with torch.no_grad():
    ...     _ = model.weight.fill_(3.0)
    >>> average.update(model, 8)
    >>> with average.in_place_of(model):
    ...     inside = model.weight.item()
    >>> model.weight.item(), inside == average.state_dict()["weight"].item()
    (3.0, True)
    """

    def __init__(self, model: nn.Module, decay: float) -> None:
        if not 0.0 < decay < 1.0:
            raise ArgumentError(f"decay must be above 0 and below 1, got {decay}")
        self._decay = decay
        self._values = {name: value.detach().clone() for name, value in model.named_parameters()}
        # Tied weights have one average under all their names in the model.
        first = {id(value): name for name, value in model.named_parameters()}
        named = model.named_parameters(remove_duplicate=False)
        self._owners = {name: first[id(value)] for name, value in named}

    @torch.no_grad()
    def update(self, model: nn.Module, step: int) -> None:
        """Add the weights after step `step` to the average; steps are counted from 1."""
        decay = min(self._decay, (1 + step) / (10 + step))
        lerp_each_(list(self._values.values()), list(model.parameters()), 1.0 - decay)

    @contextmanager
    def in_place_of(self, model: nn.Module) -> Iterator[None]:
        """Give the model the averaged weights while the block runs, and its own weights again afterwards."""
        self._exchange(model)
        try:
            yield
        finally:
            self._exchange(model)

    def state_dict(self) -> dict[str, Tensor]:
        """The averages by the names of the parameters. They are not copied."""
        return {name: self._values[owner] for name, owner in self._owners.items()}

    def load_state_dict(self, state: Mapping[str, Tensor], *, source: Path) -> None:
        """Continue with saved averages; raises RunFolderError, with `source`, if they do not belong to this model."""
        for name, value in self._values.items():
            if name not in state or state[name].shape != value.shape:
                found = tuple(state[name].shape) if name in state else "absent"
                raise RunFolderError(f"{source} holds no average of {name} {tuple(value.shape)}: it is {found}")
            value.copy_(state[name])

    @torch.no_grad()
    def _exchange(self, model: nn.Module) -> None:
        for name, value in model.named_parameters():
            self._values[name], value.data = value.data, self._values[name]


def mean_of(models: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
    """The mean of the weights of several models with equal shapes, in the precision of the first model.

    Source: "checkpoint averaging", Vaswani et al. 2017, section 6.1.

    >>> mean_of([{"w": torch.tensor([1.0])}, {"w": torch.tensor([3.0])}])
    {'w': tensor([2.])}
    """
    if not models:
        raise ArgumentError("expected at least one model to average, got none")
    shapes = [{name: value.shape for name, value in model.items()} for model in models]
    if any(shape != shapes[0] for shape in shapes):
        raise ArgumentError("expected models with the same tensors, got models whose names or shapes differ")
    return {
        name: torch.stack([model[name].double() for model in models]).mean(0).to(value.dtype)
        if value.is_floating_point()
        else value
        for name, value in models[0].items()
    }
