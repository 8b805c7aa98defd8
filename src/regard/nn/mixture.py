"""Mixtures of experts: a router chooses a few feed-forward networks for each token."""

from collections.abc import Sequence

import torch
from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.errors import ArgumentError, require
from regard.nn.arguments import require_sizes

Routed = tuple[Float[Tensor, "N k"], Integer[Tensor, "N k"]]
"""The weights and the indices of the k experts of N tokens."""


class _Router(nn.Module):
    """The sizes of a router, and its logits."""

    def __init__(
        self, dim: int, num_experts: int, *, most: int, is_normalised: bool = True, scale: float = 1.0,
        groups: int = 1, best_groups: int = 1, bias: bool = False,
    ) -> None:  # fmt: skip
        super().__init__()
        _check(dim, num_experts, most, groups, best_groups)
        self.most, self.is_normalised, self.scale = most, is_normalised, scale
        self.groups, self.best_groups = groups, best_groups
        self.logits = nn.Linear(dim, num_experts, bias=bias)


class SoftmaxRouter(_Router):
    r"""The k experts with the largest $p = \mathrm{softmax}(W x)$, perhaps out of the best groups of experts.

    Args:
        dim: width of the input.
        num_experts: E.
        most: k.
        is_normalised: whether the k weights are divided by their sum.
        scale: multiplies the weights.
        groups: E is divided into so many groups, each with the score of its best expert.
        best_groups: the number of groups from which experts are chosen.
        bias: whether the logits have a bias.

    Raises:
        ArgumentError: a size is below 1, or the experts do not divide into the groups.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), section 2.1, without noise; groups: DeepSeek-AI 2024
    (arXiv:2405.04434), section 2.2.2.

    >>> weights, experts = SoftmaxRouter(4, 8, most=2)(torch.randn(3, 4))
    >>> weights.sum(-1), experts.shape
    (tensor([1., 1., 1.], grad_fn=<SumBackward1>), torch.Size([3, 2]))
    """

    def forward(self, x: Float[Tensor, "N D"]) -> Routed:
        """The weights and the indices of each token's experts."""
        scores = self.logits(x).float().softmax(-1)
        best = scores.unflatten(-1, (self.groups, -1)).amax(-1)
        weights, experts = _within(best, self.best_groups, scores, 0.0).topk(self.most, -1)
        return _scaled(weights, self.is_normalised, self.scale).to(x.dtype), experts


class SigmoidRouter(_Router):
    r"""The k experts with the largest $\sigma(W x) + b$, weighted by $\sigma(W x)$; b balances their load.

    Arguments and errors are those of `SoftmaxRouter`, without `bias`. A group has the sum of its two best scores.

    Source: DeepSeek-AI 2024 (arXiv:2412.19437), section 2.1.2, equations 12 to 16.

    >>> SigmoidRouter(4, 8, most=2, groups=4, best_groups=2)(torch.randn(3, 4))[1].shape
    torch.Size([3, 2])
    """

    offset: Tensor

    def __init__(
        self, dim: int, num_experts: int, *, most: int, is_normalised: bool = True, scale: float = 1.0,
        groups: int = 1, best_groups: int = 1,
    ) -> None:  # fmt: skip
        super().__init__(
            dim, num_experts, most=most, is_normalised=is_normalised, scale=scale, groups=groups,
            best_groups=best_groups,
        )  # fmt: skip
        self.register_buffer("offset", torch.zeros(num_experts))  # b: no gradient reaches it

    def forward(self, x: Float[Tensor, "N D"]) -> Routed:
        """The weights and the indices of each token's experts."""
        scores = self.logits(x).float().sigmoid()
        shifted = scores + self.offset
        grouped = shifted.unflatten(-1, (self.groups, -1))
        best = grouped.topk(min(2, grouped.shape[-1]), -1).values.sum(-1)
        experts = _within(best, self.best_groups, shifted, -torch.inf).topk(self.most, -1).indices
        return _scaled(scores.gather(-1, experts), self.is_normalised, self.scale).to(x.dtype), experts


class MixtureOfExperts(nn.Module):
    r"""$\sum_{e \in \mathrm{chosen}(x)} w_e(x) \, E_e(x)$, plus an expert that every token has, if there is one.

    Args:
        router: from tokens (N, D) to the weights and the indices of their experts, each (N, k).
        experts: modules from (N, D) to (N, D).
        shared: such a module for every token.

    Raises:
        ArgumentError: the router or an expert is no module.

    Source: Shazeer et al. 2017 (arXiv:1701.06538), equation 1; shared experts: Dai et al. 2024 (arXiv:2401.06066),
    section 3.2.

    >>> from regard.nn import GatedFeedForward
    >>> mixture = MixtureOfExperts(SoftmaxRouter(8, 4, most=2), [GatedFeedForward(8, 16) for _ in range(4)])
    >>> mixture(torch.randn(2, 5, 8)).shape
    torch.Size([2, 5, 8])
    """

    def __init__(self, router: nn.Module, experts: Sequence[nn.Module], shared: nn.Module | None = None) -> None:
        super().__init__()
        require(router, nn.Module, "router", "a module")
        require(experts, Sequence, "experts", "a list of modules")
        for expert in experts:
            require(expert, nn.Module, "an expert", "a module")
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens)
        output = torch.zeros_like(tokens) if self.shared is None else self.shared(tokens)
        for number, expert in enumerate(self.experts):
            rows, place = torch.where(chosen == number)
            if len(rows):
                part = expert(tokens[rows]) * weights[rows, place, None]
                output = output.index_add(0, rows, part.to(output.dtype))
        return output.view_as(x)


def _check(dim: int, num_experts: int, most: int, groups: int, best_groups: int) -> None:
    require_sizes(dim=dim, num_experts=num_experts, most=most, groups=groups, best_groups=best_groups)
    if num_experts % groups or best_groups > groups or most > num_experts // groups * best_groups:
        raise ArgumentError(
            f"{num_experts} experts must divide into {groups} groups, and {most} of them come from {best_groups} groups"
        )


def _within(best: Tensor, count: int, scores: Tensor, outside: float) -> Tensor:
    """The scores (N, E) of the best groups; those of other groups are replaced."""
    if count == best.shape[-1]:
        return scores
    is_chosen = torch.zeros_like(best, dtype=torch.bool).scatter(-1, best.topk(count, -1).indices, True)
    return scores.masked_fill(~is_chosen.repeat_interleave(scores.shape[-1] // best.shape[-1], -1), outside)


def _scaled(weights: Tensor, is_normalised: bool, scale: float) -> Tensor:
    return scale * (weights / weights.sum(-1, keepdim=True) if is_normalised else weights)
