"""From a row of scores to a row of weights.

A normalization turns masked scores (excluded keys are -inf) into weights and a *row state*: the few values per row from
which any block of the weights follows from its scores alone. For softmax the state is the log-sum-exp of the row.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.given_scores import masked_scores
from regard.call.masks.base import Mask
from regard.call.named import made
from regard.errors import ArgumentError, ShapeError
from regard.tensors.guards import can_look, has_values, in_forward_mode, in_transform

WORST = 2.0**-15
"""The allowed rounding of a log-sum-exp in nats, and so the relative error of the weights: 3e-5."""


def coarse_rows(state: Tensor) -> Tensor:
    """Whether log-sum-exps are so large that their spacing exceeds `WORST`, bool; beyond 256 in float32.

    >>> coarse_rows(torch.tensor([100.0, -1e9, -torch.inf]))
    tensor([False,  True, False])
    """
    return (state.abs() * torch.finfo(state.dtype).eps > WORST) & state.isfinite()


def any_coarse(state: Tensor) -> bool:
    if not has_values(state) or in_transform("Vmap"):
        return False
    return bool(coarse_rows(state.detach()).any())


class Normalization(ABC):
    """The interface of normalizations: weights with their row state, and weights from a row state."""

    has_base: ClassVar[bool] = False
    """Whether the backends run another normalization, `base`, before `finish`."""

    @property
    def base(self) -> "Normalization":
        """The normalization that the backends run, before `finish`."""
        return self

    def finish(self, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        """Turn the output (B, H, T, E) and the row state (B, H, T) of the base into those of this normalization."""
        return output, state

    def select(self, heads: Tensor) -> "Normalization":
        """The normalization of some heads, each as a batch row of one head."""
        return self

    def __call__(self, scores: Any, mask: Mask | Tensor | None = None) -> Tensor:
        """The weights of given scores (..., T, S) where the mask allows, as in `masked_softmax`.

        Raises:
            ShapeError: as in `regard.call.normalizations.masked_softmax`.

        >>> Sparsemax()([[1.0, 0.5, 9.0]], torch.tensor([[True, True, False]]))
        tensor([[0.7500, 0.2500, 0.0000]])
        """
        flat, shape = masked_scores(scores, mask)
        weights, _ = self.finish(*self.base.normalize(flat))
        return weights.reshape(shape)

    @abstractmethod
    def normalize(
        self, scores: Float[Tensor, "*batch T S"]
    ) -> tuple[Float[Tensor, "*batch T S"], Float[Tensor, "*batch T"]]:
        """Weights of whole rows of scores, and the row state. The score of an excluded key is -inf."""

    @abstractmethod
    def weights(
        self, scores: Float[Tensor, "*batch t s"], state: Float[Tensor, "*batch t"]
    ) -> Float[Tensor, "*batch t s"]:
        """Weights of a block of scores, given the state of its rows."""

    def weights_(self, scores: Tensor, state: Tensor) -> Tensor:
        """`weights` in place: it may overwrite the scores."""
        return self.weights(scores, state)

    @abstractmethod
    def gradient(
        self, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, grad_state: Tensor | None, inner: Tensor
    ) -> Tensor:
        """Gradient of whole rows of scores (..., t, S), from the gradients of the weights and of the row state.

        Args:
            scores: as `weights_` left them.
            state: the row state (..., t).
            weights: P.
            grad: dP, which may be overwritten.
            grad_state: the gradient of the row state (..., t), or None.
            inner: sum_j P_ij dP_ij (..., t), which is dO_i . O_i.
        """


@dataclass(frozen=True, slots=True)
class Softmax(Normalization):
    r"""$P_{ij} = \exp(s_{ij} - \mathrm{lse}_i)$ with $\mathrm{lse}_i = \log \sum_j \exp(s_{ij})$.

    Every row with a key sums to 1. A row without keys is exactly 0, and its state is -inf.

    >>> weights, lse = Softmax().normalize(torch.tensor([[0.0, 0.0], [-torch.inf, -torch.inf]]))
    >>> weights
    tensor([[0.5000, 0.5000],
            [0.0000, 0.0000]])
    """

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        peak = scores.detach().amax(-1, keepdim=True)
        if not scores.requires_grad and not in_forward_mode():
            return self._in_one_pass(scores, peak)
        peak = peak.masked_fill(peak == -torch.inf, 0.0)
        exponentials = torch.exp(scores - peak)
        total = exponentials.sum(-1, keepdim=True)
        dead = total == 0
        weights = exponentials / total.masked_fill(dead, 1.0)
        # log(0) has an infinite gradient, and 0 * inf is NaN. So rows without a key take log(1).
        lse = (torch.log(total.masked_fill(dead, 1.0)) + peak).masked_fill(dead, -torch.inf)
        return weights, lse.squeeze(-1)

    @staticmethod
    def _in_one_pass(scores: Tensor, peak: Tensor) -> tuple[Tensor, Tensor]:
        """The same with torch's own softmax. The largest weight is exp(peak - lse), hence the lse."""
        weights, dead = torch.softmax(scores, -1), peak == -torch.inf
        if can_look(dead) and not bool(dead.any()):
            return weights, (peak - weights.amax(-1, keepdim=True).log_()).squeeze(-1)
        largest = weights.masked_fill_(dead, 0.0).amax(-1, keepdim=True).masked_fill_(dead, 1.0)
        return weights, (peak - largest.log()).squeeze(-1)

    def weights(self, scores: Tensor, state: Tensor) -> Tensor:
        # Where the state is -inf, all scores are -inf too.
        return torch.exp(scores - state.masked_fill(state == -torch.inf, 0.0)[..., None])

    def weights_(self, scores: Tensor, state: Tensor) -> Tensor:
        return scores.sub_(state.masked_fill(state == -torch.inf, 0.0)[..., None]).exp_()

    def gradient(
        self, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, grad_state: Tensor | None, inner: Tensor
    ) -> Tensor:
        return grad.sub_((inner if grad_state is None else inner - grad_state)[..., None]).mul_(weights)

    def __str__(self) -> str:
        return "softmax"


@dataclass(frozen=True, slots=True, eq=False)
class SoftmaxWithSink(Softmax):
    r"""$P_{ij} = \exp(s_{ij}) / (\exp(z) + \sum_l \exp(s_{il}))$: softmax with one more key of score z and value 0.

    Rows sum to at most 1. z = 0 is "off by one" (Miller 2023); GPT-OSS learns one z for each head.
    The backends run the plain softmax; its log-sum-exp is then corrected:
    $\mathrm{lse}' = \log(\exp(\mathrm{lse}) + \exp(z))$.

    >>> scores = torch.zeros(1, 3)
    >>> state = SoftmaxWithSink().finish(torch.ones(1, 1), torch.logsumexp(scores, -1))[1]
    >>> SoftmaxWithSink().weights(scores, state)
    tensor([[0.2500, 0.2500, 0.2500]])
    """

    sink: float | Float[Tensor, "..."] = 0.0
    """z: a scalar, perhaps learned, or one for each head (H,)."""

    has_base = True

    @property
    def base(self) -> Normalization:
        return Softmax()

    def finish(self, output: Tensor, state: Tensor) -> tuple[Tensor, Tensor]:
        both = torch.logaddexp(state, self.sink_of_rows(state))
        return output * torch.exp(state - both)[..., None].to(output.dtype), both

    def sink_of_rows(self, state: Tensor) -> Tensor:
        """z, broadcastable to a row state (B, H, T)."""
        sink = torch.as_tensor(self.sink, dtype=state.dtype, device=state.device)
        if sink.dim() == 1 and len(sink) not in (1, state.shape[-2]):
            raise ShapeError(f"expected one sink, or one for each of {state.shape[-2]} heads; got {len(sink)}")
        return sink[:, None] if sink.dim() == 1 else sink

    @property
    def is_of_rows(self) -> bool:
        """Whether rows of one head have sinks of their own."""
        return isinstance(self.sink, Tensor) and self.sink.dim() > 1 and self.sink.shape[-1] > 1

    def select(self, heads: Tensor) -> Normalization:
        if not isinstance(self.sink, Tensor) or self.sink.numel() == 1:
            return self
        return SoftmaxWithSink(self.sink.reshape(-1)[heads][:, None, None])

    def __str__(self) -> str:
        return "softmax with a sink"


@dataclass(frozen=True, slots=True)
class Sigmoid(Normalization):
    r"""$P_{ij} = \sigma(s_{ij} + b)$: each weight is computed alone, in (0, 1). Rows need not sum to 1.

    Source: Ramapuram et al. 2024 (arXiv:2409.04431), whose b is -log S.

    >>> Sigmoid().normalize(torch.tensor([[0.0, -torch.inf]]))[0]
    tensor([[0.5000, 0.0000]])
    """

    shift: float = 0.0
    """b."""

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return torch.sigmoid(scores + self.shift), scores.new_zeros(scores.shape[:-1])

    def weights(self, scores: Tensor, state: Tensor) -> Tensor:
        return torch.sigmoid(scores + self.shift)

    def gradient(
        self, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, grad_state: Tensor | None, inner: Tensor
    ) -> Tensor:
        return weights * (1 - weights) * grad

    def __str__(self) -> str:
        return "sigmoid"


@dataclass(frozen=True, slots=True)
class Unnormalized(Normalization):
    r"""$P_{ij} = \exp(s_{ij})$: the weights are the values of a kernel, in [0, inf).

    >>> Unnormalized().normalize(torch.tensor([[0.0, -torch.inf]]))[0]
    tensor([[1., 0.]])
    """

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        return torch.exp(scores), scores.new_zeros(scores.shape[:-1])

    def weights(self, scores: Tensor, state: Tensor) -> Tensor:
        return torch.exp(scores)

    def gradient(
        self, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, grad_state: Tensor | None, inner: Tensor
    ) -> Tensor:
        return weights * grad

    def __str__(self) -> str:
        return "unnormalized kernel"


@dataclass(frozen=True, slots=True)
class Softpick(Normalization):
    r"""$P_{ij} = \max(e^{s_{ij}} - 1, 0) / Z_i$ with $Z_i = \sum_l |e^{s_{il}} - 1|$ over the allowed keys.

    Keys of negative scores have the weight 0, and rows sum to at most 1: a head that wants nothing needs no sink.
    The row state is log Z; +inf for rows whose weights are all 0.

    Source: Zuhri et al. 2025 (arXiv:2504.20966), equation 3, without their epsilon.

    >>> Softpick().normalize(torch.tensor([[1.0, 0.5, -1.0]]))[0]
    tensor([[0.5729, 0.2163, 0.0000]])
    """

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        peak = scores.detach().amax(-1, keepdim=True).clamp_min(0.0)
        # |e^s - 1| = (1 - e^-|s|) e^max(s, 0), which neither overflows nor cancels.
        sizes = -torch.expm1(-scores.abs()) * torch.exp(scores.clamp_min(0.0) - peak)
        total = sizes.masked_fill(scores == -torch.inf, 0.0).sum(-1, keepdim=True)
        dead = total == 0
        state = (total.masked_fill(dead, 1.0).log() + peak).masked_fill(dead, torch.inf).squeeze(-1)
        return self.weights(scores, state), state

    def weights(self, scores: Tensor, state: Tensor) -> Tensor:
        picked = scores.relu()  # whose slope at 0 is 0, unlike that of `clamp_min`
        return -torch.expm1(-picked) * torch.exp(picked - state[..., None])

    def gradient(
        self, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, grad_state: Tensor | None, inner: Tensor
    ) -> Tensor:
        of_total = -inner if grad_state is None else grad_state - inner
        pulled = torch.where(scores > 0, grad, 0.0) + torch.sign(scores) * of_total[..., None]
        return torch.exp(scores - state[..., None]) * pulled

    def __str__(self) -> str:
        return "softpick"


class _Threshold(Normalization):
    """Weights, exactly 0 below a threshold tau. The row state is tau; +inf for rows without keys."""

    def weights(self, scores: Tensor, state: Tensor) -> Tensor:
        return self._above(scores, state[..., None])

    def normalize(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        dead = (scores == -torch.inf).all(-1, keepdim=True)
        tau = self._tau(scores.masked_fill(dead | scores.isnan(), 0.0)).masked_fill(dead, torch.inf)
        return self._above(scores, tau), tau.squeeze(-1)

    def gradient(
        self, scores: Tensor, state: Tensor, weights: Tensor, grad: Tensor, grad_state: Tensor | None, inner: Tensor
    ) -> Tensor:
        slope = self._slope(weights)
        share = slope / slope.sum(-1, keepdim=True).clamp_min(torch.finfo(slope.dtype).tiny)
        answer = slope * (grad - (share * grad).sum(-1, keepdim=True))
        return answer if grad_state is None else answer + share * (self._tau_slope * grad_state[..., None])

    _tau_slope = 1.0

    @abstractmethod
    def _tau(self, scores: Tensor) -> Tensor: ...

    @abstractmethod
    def _above(self, scores: Tensor, tau: Tensor) -> Tensor: ...

    @abstractmethod
    def _slope(self, weights: Tensor) -> Tensor: ...


@dataclass(frozen=True, slots=True)
class Sparsemax(_Threshold):
    r"""$P_{ij} = \max(s_{ij} - \tau_i, 0)$ with $\tau_i$ such that the row sums to 1.

    Source: Martins & Astudillo 2016 (arXiv:1602.02068), equation 2 and algorithm 1.

    >>> Sparsemax().normalize(torch.tensor([[1.0, 0.5, -1.0]]))[0]
    tensor([[0.7500, 0.2500, 0.0000]])
    """

    def _tau(self, scores: Tensor) -> Tensor:
        ordered, _ = scores.sort(-1, descending=True)
        count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
        finite = ordered.masked_fill(ordered == -torch.inf, 0.0)
        mean = (finite.cumsum(-1) - 1) / count
        size = (ordered > mean).sum(-1, keepdim=True)
        return mean.gather(-1, size - 1)

    def _above(self, scores: Tensor, tau: Tensor) -> Tensor:
        # Not `clamp_min`, whose slope is 1 where a score equals the threshold: the row would not keep its sum.
        return (scores - tau).relu()

    def _slope(self, weights: Tensor) -> Tensor:
        return (weights > 0).to(weights.dtype)

    def __str__(self) -> str:
        return "sparsemax"


@dataclass(frozen=True, slots=True)
class Entmax15(_Threshold):
    r"""$P_{ij} = \max(s_{ij} / 2 - \tau_i, 0)^2$ with $\tau_i$ such that the row sums to 1.

    Source: Peters et al. 2019 (arXiv:1905.05702), algorithm 2.

    >>> Entmax15().normalize(torch.tensor([[1.0, 0.5, -3.0]]))[0]
    tensor([[0.6740, 0.3260, 0.0000]])
    """

    _tau_slope = 0.5

    def _tau(self, scores: Tensor) -> Tensor:
        ordered = (scores / 2).sort(-1, descending=True).values
        count = torch.arange(1, scores.shape[-1] + 1, device=scores.device, dtype=scores.dtype)
        finite = ordered.masked_fill(ordered == -torch.inf, 0.0)
        # Sums are relative to the largest score, because the threshold lies near it. Squares of larger values would
        # cancel.
        peak = finite[..., :1]
        finite = finite - peak
        mean, square = finite.cumsum(-1) / count, finite.square().cumsum(-1) / count
        spread = (1 / count - (square - mean.square())).clamp_min(0.0)
        # The spread of a size not chosen may be 0, where the root has no derivative.
        tau = (mean - spread.sqrt()).detach()
        size = ((ordered - peak) >= tau).sum(-1, keepdim=True)
        mean, spread = (of_each_size.gather(-1, size - 1) for of_each_size in (mean, spread))
        return mean - spread.sqrt() + peak

    def _above(self, scores: Tensor, tau: Tensor) -> Tensor:
        return (scores / 2 - tau).clamp_min(0.0).square()

    def _slope(self, weights: Tensor) -> Tensor:
        return weights.sqrt()

    def __str__(self) -> str:
        return "entmax-1.5"


def as_normalization(normalization: object) -> Normalization:
    if isinstance(normalization, Normalization):
        return normalization
    named = (Softmax, SoftmaxWithSink, Sparsemax, Entmax15, Sigmoid, Unnormalized, Softpick)
    found: Normalization | None = made(normalization, Normalization, named, "normalization")
    if found is None:
        raise ArgumentError(f"normalization= takes a regard normalization or its name, got {normalization!r}")
    return found


def masked_softmax(scores: Any, mask: Mask | Tensor | None = None) -> Float[Tensor, "*leading T S"]:
    r"""$P_{ij} = \exp(s_{ij}) / \sum_{l} \exp(s_{il})$, l and j over the keys that the mask allows; else exactly 0.

    It is `Softmax()(scores, mask)`; the other normalizations are called the same way.

    Args:
        scores: (T, S), (batch, T, S) or (batch..., heads, T, S): a tensor, an array or lists of real numbers.
        mask: a mask (`causal()`, `lengths(n)`) or a bool tensor, True = keep; None for all keys.

    Returns:
        Weights of the same shape. Each row sums to 1; a row without keys is exactly 0.

    Raises:
        ShapeError: the scores are not real numbers of two or more dimensions, or the mask does not fit.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), section 3.2.3.

    >>> from regard.call.masks import lengths
    >>> masked_softmax([[[0.0, 0.0, 5.0]], [[0.0, 0.0, 0.0]]], lengths(torch.tensor([2, 3]))).squeeze(1)
    tensor([[0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    return Softmax()(scores, mask)
