"""Losses as a sum and a count, for the mean over all tokens of a step; and other interfaces of the training loop.

`output_cross_entropy` begins at the input of the output layer: a batch's logits are never in memory all at once.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

import regard.call  # noqa: F401 (so that the first exponential is made by one thread)
from regard.errors import ShapeError
from regard.tasks.training.distributed import Ranks
from regard.tensors.guards import autocast_of, can_look, is_compiling, is_observed, is_recorded
from regard.tensors.ranges import require_share


@dataclass(frozen=True, slots=True)
class LossSum:
    total: Tensor
    count: Tensor


def cross_entropy(
    logits: Float[Tensor, "... V"], targets: Integer[Tensor, "..."], *, ignore_index: int, label_smoothing: float = 0.0
) -> LossSum:
    """Summed cross-entropy with label smoothing, in nats, over all targets except `ignore_index`.

    loss = sum over rows of lse(z) - (1 - e) * z[target] - e * mean(z)

    This is the cross-entropy against the target (1 - e) * onehot(target) + e / V. The sums are taken in float32
    (float64 for float64 logits).

    Args:
        logits: scores before the softmax, V of them for each target.
        targets: indices in 0..V-1, or `ignore_index` for no prediction.
        ignore_index: the padding index, which has no loss and no gradient.
        label_smoothing: the share e in 0..1 of the target's mass spread over all V.

    Source: Szegedy et al. 2016 (arXiv 1512.00567), section 7.

    >>> loss = cross_entropy(torch.zeros(3, 4), torch.tensor([1, 2, 0]), ignore_index=0, label_smoothing=0.1)
    >>> int(loss.count), round(float(loss.total / loss.count), 4)  # log 4
    (2, 1.3863)
    """
    require_share(label_smoothing=label_smoothing)
    if logits.shape[:-1] != targets.shape:
        raise ShapeError(
            f"logits {tuple(logits.shape)} and targets {tuple(targets.shape)}: one target a row of logits needed"
        )
    rows, flat = logits.reshape(-1, logits.shape[-1]), targets.long().reshape(-1)
    total = nn.functional.cross_entropy(
        rows.to(torch.promote_types(rows.dtype, torch.float32)), flat,
        ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="sum",
    )  # fmt: skip
    return LossSum(total, (flat != ignore_index).sum())


B = TypeVar("B")


class BatchSize(NamedTuple):
    tokens: int
    places: int


class Batches(Protocol[B]):
    def epoch(self, epoch: int, start: int) -> Iterator[B]:
        """This rank's batches of one pass over the data, from index `start` on. All ranks have equally many."""

    def size(self, batch: B) -> BatchSize: ...


Loss = Callable[[nn.Module, Any], LossSum]
"""Computes the summed loss of a model on one batch."""

Validate = Callable[[], Mapping[str, float]]
"""Computes the metrics of the model on the validation data, by name."""


def sum_over_ranks(loss: Loss, model: nn.Module, batches: Iterable[Any], fabric: Any) -> tuple[float, float]:
    """The summed loss of all batches, which the ranks share out, and its count, at least 1."""
    ranks, sums = Ranks.of(fabric), torch.zeros(2, dtype=torch.float64)
    for batch in ranks.share_out(batches):
        part = loss(model, fabric.to_device(batch))
        sums += torch.tensor([part.total.item(), part.count.item()], dtype=torch.float64)
    total, count = ranks.sum(sums).tolist()
    return total, max(count, 1.0)


ROWS_AT_A_TIME = 64
"""Rows of logits that are processed at a time: 64 rows of 8,000 numbers in float32 are 2 MB and stay in the cache."""
ROWS_OF_A_PRODUCT = 512
"""Rows whose logits exist at a time: with fewer rows the matrix products are slower, with more they are not faster."""


def output_cross_entropy(
    hidden: Float[Tensor, "... D"],
    output: nn.Linear,
    *,
    targets: Integer[Tensor, "..."],
    ignore_index: int,
    label_smoothing: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """`cross_entropy(output(hidden), targets, ...)` as the pair (total, count), in less time and memory.

    Only rows with a target are multiplied, 512 at a time. If needed, the gradients of `hidden` and of the layer are
    computed together with the loss, while the logits are still in the cache; the backward pass only scales them. Under
    autocast the products are in its dtype. The softmax and the sum of the weight's gradient are in float32 (float64 for
    float64).

    This function can be passed to a model as its `loss`: the model calls it with the output of its last layer and
    with its output layer.

    Source: the order of operations is from Hsu et al. 2024 (arXiv:2410.10989), section 3.2.

    >>> hidden, output, targets = torch.randn(2, 3, 4), nn.Linear(4, 7), torch.tensor([[3, 4, 1], [5, 0, 0]])
    >>> total, count = output_cross_entropy(hidden, output, targets=targets, ignore_index=0, label_smoothing=0.1)
    >>> plain = cross_entropy(output(hidden), targets, ignore_index=0, label_smoothing=0.1)
    >>> torch.allclose(total, plain.total), int(count)
    (True, 4)
    """
    require_share(label_smoothing=label_smoothing)
    if hidden.shape[:-1] != targets.shape:
        raise ShapeError(
            f"hidden {tuple(hidden.shape)} and targets {tuple(targets.shape)}: one target a row of hidden needed"
        )
    targets = targets.long()
    # In a graph, the number of rows with a target would depend on values. Another layer than a product is run whole.
    if is_compiling() or type(output) is not nn.Linear:
        loss = cross_entropy(output(hidden), targets, ignore_index=ignore_index, label_smoothing=label_smoothing)
        return loss.total, loss.count
    flat, live = hidden.reshape(-1, hidden.shape[-1]), (targets != ignore_index).reshape(-1)
    count = live.sum()
    if int(count) < len(live):
        places = live.nonzero()[:, 0]
        flat, targets = flat.index_select(0, places), targets.reshape(-1).index_select(0, places)
    return loss_of_rows(flat, output, targets.reshape(-1), label_smoothing), count


def loss_of_rows(
    hidden: Float[Tensor, "N D"], output: nn.Linear, targets: Integer[Tensor, " N"], smoothing: float
) -> Tensor:
    """The summed loss of rows through the output layer, with its gradients, 512 rows of logits at a time."""
    weight, bias = output.weight, output.bias
    takes_gradient = hidden.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
    dtype, wanted = autocast_of(hidden.device.type) or weight.dtype, is_recorded() and takes_gradient
    total: Tensor = _LossOfRows.apply(hidden, weight, bias, targets, smoothing, dtype, wanted)
    return total


class _LossOfRows(torch.autograd.Function):
    """The sum over rows. Its forward also computes the gradients, for an upstream gradient of 1."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        targets: Tensor,
        smoothing: float,
        dtype: torch.dtype,
        wanted: bool,
    ) -> Tensor:
        precise = torch.promote_types(dtype, torch.float32)
        total = weight.new_zeros((), dtype=precise)
        factors = hidden.to(dtype), weight.to(dtype)
        of_hidden, of_weight, logits = torch.empty_like(hidden) if wanted else None, None, None
        of_bias = None if bias is None else torch.zeros_like(bias, dtype=precise)
        with torch.autocast(hidden.device.type, enabled=False):
            for rows in _blocks(len(hidden), ROWS_OF_A_PRODUCT):
                given = factors[0][rows]
                logits = _product_in(logits, given, factors[1].mT)
                logits = logits if bias is None else logits.add_(bias.to(dtype))
                total += _to_gradient(logits, targets[rows, None], smoothing, precise, wanted)
                if of_hidden is not None:
                    of_hidden[rows] = logits @ factors[1]
                    of_weight = _with_product(of_weight, logits.mT, given, precise)
                    of_bias = None if of_bias is None else of_bias.add_(logits.sum(0, dtype=precise))
        if of_hidden is not None:
            of_weight = torch.zeros_like(weight) if of_weight is None else of_weight.to(weight.dtype)
            of_bias = None if bias is None or of_bias is None else of_bias.to(bias.dtype)
            ctx.save_for_backward(of_hidden, of_weight, *(() if of_bias is None else (of_bias,)))
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        is_one = can_look(grad) and float(grad) == 1.0  # as after `total.backward()`
        found = ctx.saved_tensors if is_one else [g * grad.to(g.dtype) for g in ctx.saved_tensors]
        hidden, weight, *bias = found
        return hidden, weight, bias[0] if bias else None, None, None, None, None


def _to_gradient(logits: Tensor, targets: Tensor, smoothing: float, precise: torch.dtype, wanted: bool) -> Tensor:
    """The summed loss of rows of logits, overwritten in-place, by the gradient if `wanted`."""
    total = logits.new_zeros((), dtype=precise)
    for rows in _blocks(len(logits), ROWS_AT_A_TIME):
        z = logits[rows].to(precise)
        total += _smoothed(z, targets[rows], smoothing, wanted)
        if wanted and z.dtype != logits.dtype:
            logits[rows] = z
    return total


def _smoothed(z: Tensor, targets: Tensor, smoothing: float, wanted: bool) -> Tensor:
    """The sum over rows; overwrites z, if `wanted` by its gradient softmax(z) - (1 - e) * onehot - e / V."""
    top, hit = z.amax(1), z.gather(1, targets)
    mean = z.mean(1) if smoothing else 0.0
    # The softmax overwrites z. The lse then follows from the largest weight, exp(max - lse) >= 1 / V.
    weights = torch.softmax(z, -1, out=z)
    lse = top - weights.amax(1).log()
    total = (lse - (1 - smoothing) * hit[:, 0] - smoothing * mean).sum()
    if wanted:
        weights = weights.sub_(smoothing / z.shape[1]) if smoothing else weights
        weights.scatter_add_(1, targets, weights.new_full((len(weights), 1), smoothing - 1))
    return total


def _blocks(count: int, size: int) -> list[slice]:
    return [slice(start, start + size) for start in range(0, count, size)]


def _product_in(memory: Tensor | None, x: Tensor, y: Tensor) -> Tensor:
    """The product in the buffer of an earlier one: new pages would take a third of the time of a product."""
    if memory is None or memory.device.type != "cpu" or type(memory) is not Tensor or is_observed():
        return x @ y
    return torch.mm(x, y, out=memory[: len(x)])


def _with_product(total: Tensor | None, x: Tensor, y: Tensor, dtype: torch.dtype) -> Tensor:
    """Add x @ y to the sum so far, in-place. A sum of many products is at least in float32."""
    if total is None:
        return (x @ y).to(dtype)
    if total.dtype != x.dtype:
        return total.add_(x @ y)
    return total.addmm_(x, y)
