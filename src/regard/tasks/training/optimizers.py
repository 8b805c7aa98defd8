"""AdamW and Muon, with weight decay on matrices and none on embeddings, gains and offsets; averages of weights."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from regard.errors import ArgumentError, TorchVersionError
from regard.nn import LearnedPositions, TokenEmbedding
from regard.tensors.torch_private import lerp_each_

EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag, TokenEmbedding, LearnedPositions)
"""Modules with embedding weights, which do not decay."""
RATE = "rate"
"""The key of a parameter group for the factor of its learning rate, if not 1."""
FUSED_DEVICES = frozenset({"cpu", "cuda", "mps", "xpu"})
"""Devices with torch's fused AdamW."""


def parameter_groups(model: nn.Module, *, weight_decay: float) -> list[dict[str, Any]]:
    """Split the trainable parameters by kind: matrices decay; embeddings, gains and offsets do not.

    A matrix shared by an embedding and a linear layer counts as an embedding. Each group is a list of (name, parameter)
    pairs, which optimizers accept, so that a checkpoint can name its tensors.
    """
    matrices, others = _kinds(model)
    groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    return [group for group in groups if group["params"]]


def adamw(
    model: nn.Module, *, weight_decay: float = 0.01, betas: tuple[float, float] = (0.9, 0.98), eps: float = 1e-9
) -> torch.optim.AdamW:
    """AdamW over `parameter_groups`, in one fused pass if torch has one for the device.

    The learning rate comes from the schedule: the training loop sets it at every step.

    Source: Loshchilov and Hutter 2019 (arXiv 1711.05101); betas and eps of Vaswani et al. 2017, section 5.3.

    >>> adamw(nn.Linear(2, 2)).defaults["betas"]
    (0.9, 0.98)
    """
    return _adamw(parameter_groups(model, weight_decay=weight_decay), betas, eps)


def require_muon() -> None:
    """Raise TorchVersionError if torch is older than 2.9, and so without Muon."""
    if not hasattr(torch.optim, "Muon"):
        raise TorchVersionError(
            f"torch {torch.__version__} has no Muon, and torch 2.9 has it: pip install -U torch, or take "
            "--optimizer adamw"
        )


def muon(
    model: nn.Module,
    *,
    aside: Iterable[nn.Module] = (),
    rate: float = 1.0,
    weight_decay: float = 0.01,
    betas: tuple[float, float] = (0.9, 0.98),
    eps: float = 1e-9,
) -> "JointOptimizer":
    """`torch.optim.Muon` over the matrices of the hidden layers, and AdamW over all else, as one optimizer.

    Muon makes the mean of the gradients of a matrix nearly orthogonal (five steps of Newton and Schulz), and scales it
    by 0.2 sqrt(max(rows, columns)), so that its entries have about the size of AdamW's updates: learning rate and
    weight decay of AdamW fit.

    Args:
        model: its embeddings, and all parameters other than matrices, are for AdamW.
        aside: modules whose matrices are for AdamW too, such as the output layer.
        rate: the learning rate of Muon, as a multiple of AdamW's.
        weight_decay: the decay of all matrices except embeddings.
        betas: as for `adamw`.
        eps: as for `adamw`.

    Source: Jordan et al. 2024, "Muon: An optimizer for hidden layers in neural networks"; the scale is that of Liu et
    al. 2025 (arXiv:2502.16982), section 2.2.

    >>> model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 4), nn.Linear(4, 7))
    >>> optimizer = muon(model, aside=[model[2]], rate=5.0)
    >>> [(group["param_names"], group.get("rate", 1.0)) for group in optimizer.param_groups]
    [(['1.weight'], 5.0), (['2.weight'], 1.0), (['0.weight', '1.bias', '2.bias'], 1.0)]
    """
    require_muon()
    matrices, others = _kinds(model)
    spared = {id(weight) for part in aside for weight in part.parameters()}
    hidden = [(name, value) for name, value in matrices if value.ndim == 2 and id(value) not in spared]
    if not hidden:
        raise ArgumentError(f"{type(model).__name__} has no matrix in a hidden layer: take AdamW for it")
    taken = {id(value) for _, value in hidden}
    rest = [(name, value) for name, value in matrices if id(value) not in taken]
    groups = [{"params": rest, "weight_decay": weight_decay}, {"params": others, "weight_decay": 0.0}]
    orthogonal: list[dict[str, Any]] = [{"params": hidden, "lr": 0.0, "weight_decay": weight_decay, RATE: rate}]
    parts: list[torch.optim.Optimizer] = [
        torch.optim.Muon(orthogonal, adjust_lr_fn="match_rms_adamw"),
        *([_adamw(some, betas, eps)] if (some := [group for group in groups if group["params"]]) else []),
    ]
    return JointOptimizer(parts)


class JointOptimizer(torch.optim.Optimizer):
    """Optimizers of different kinds as one: each updates its own groups of parameters.

    >>> first, second = nn.Linear(2, 2), nn.Linear(2, 2)
    >>> parts = [torch.optim.SGD(first.parameters()), torch.optim.AdamW(second.parameters())]
    >>> [len(group["params"]) for group in JointOptimizer(parts).param_groups]
    [2, 2]
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        super().__init__([group for part in parts for group in part.param_groups], {})
        self._parts = [(part, len(part.param_groups)) for part in parts]

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        first = 0
        for part, count in self._parts:
            # Groups and states are others after a state was loaded, or parameters were replaced.
            part.param_groups, part.state = self.param_groups[first : first + count], self.state
            part.step()
            first += count
        return loss


def _adamw(groups: list[dict[str, Any]], betas: tuple[float, float], eps: float) -> torch.optim.AdamW:
    parameters = [value for group in groups for _, value in group["params"]]
    fused = all(p.device.type in FUSED_DEVICES and p.is_floating_point() for p in parameters)
    return torch.optim.AdamW(groups, lr=0.0, betas=betas, eps=eps, fused=fused)


def _kinds(model: nn.Module) -> tuple[list[tuple[str, nn.Parameter]], list[tuple[str, nn.Parameter]]]:
    embeddings = (part for part in model.modules() if isinstance(part, EMBEDDINGS))
    embedded = {id(weight) for part in embeddings for weight in part.parameters(recurse=False)}
    named = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    if not named:
        raise ArgumentError(f"{type(model).__name__} has no parameter that requires a gradient: nothing to train")
    matrices = [(name, value) for name, value in named if value.ndim >= 2 and id(value) not in embedded]
    decayed = {id(value) for _, value in matrices}
    others = [(name, value) for name, value in named if id(value) not in decayed]
    return matrices, others


def moving_average(model: nn.Module, decay: float) -> AveragedModel:
    r"""The exponential moving average of a model's parameters, which begins with its present ones.

    After step t it is $a_t = d_t a_{t-1} + (1 - d_t) \theta_t$ with $d_t = \min(d, (1 + t) / (10 + t))$: the
    average forgets the early steps faster, because their weights are still far from good. With a decay of d it
    looks back over about $1 / (1 - d)$ steps.

    Source: Polyak and Juditsky 1992; the warm-up of the decay is TensorFlow's ExponentialMovingAverage's.
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
    _exchange(average.module, model)
    try:
        yield
    finally:
        _exchange(average.module, model)


def _exchange(one: nn.Module, other: nn.Module) -> None:
    for ours, theirs in zip(one.parameters(), other.parameters(), strict=True):
        ours.data, theirs.data = theirs.data, ours.data
