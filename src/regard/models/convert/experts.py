"""The feed-forward networks of Hugging Face's decoders: one for all tokens, or experts with a router."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.models.convert.activations import ACTIVATIONS
from regard.models.convert.folder import Settings
from regard.models.convert.weights import Weights
from regard.models.parts import Maker
from regard.nn import GatedFeedForward, MixtureOfExperts, SigmoidRouter, SoftmaxRouter

GATED = ("gate_proj", "up_proj", "down_proj")


@dataclass(frozen=True, slots=True)
class Dense:
    """A gated network for all tokens."""

    activation: str = "hidden_act"
    """The name of the setting."""
    names: tuple[str, str, str] = GATED

    def read(self, settings: Settings, weights: Weights, layer: str) -> Maker:
        """Move the weights of a layer, and return the maker of its network."""
        return self.of(settings, weights, f"{layer}.mlp", f"{layer}.feed_forward", "intermediate_size")

    def of(self, settings: Settings, weights: Weights, theirs: str, ours: str, size: str | int) -> Maker:
        """Move one network, whose width is a setting or a number."""
        gate, up, down = self.names
        if f"{theirs}.gate_up_proj.weight" in weights:
            weights.move(f"{theirs}.gate_up_proj", f"{ours}.gate_and_up")
        else:
            both = (f"{theirs}.{gate}", f"{theirs}.{up}")
            weights.join(both, f"{ours}.gate_and_up.weight", f"{ours}.gate_and_up.bias")
        weights.move(f"{theirs}.{down}", f"{ours}.down")
        return partial(
            GatedFeedForward,
            settings.get("hidden_size", int),
            settings.get(size, int) if isinstance(size, str) else size,
            activation=settings.one_of(self.activation, ACTIVATIONS, "silu"),
            bias=f"{ours}.down.bias" in weights.ours,
        )


@dataclass(frozen=True, slots=True)
class Experts:
    """Experts with a router in some layers, and a dense network in the others."""

    router: Callable[[Settings, int], Maker]
    count: tuple[str, ...]
    """The names of the setting with the number of experts: today's, and older ones."""
    size: str = "moe_intermediate_size"
    mixture: str = "mlp"
    dense: Dense = Dense()
    expert: Dense = Dense()
    is_mixture: Callable[[Settings, int], bool] = lambda settings, number: True

    def read(self, settings: Settings, weights: Weights, layer: str) -> Maker:
        """Move the weights of a layer, and return the maker of its network."""
        if not self.is_mixture(settings, int(layer.rsplit(".", 1)[1])):
            return self.dense.read(settings, weights, layer)
        theirs, ours, count = f"{layer}.{self.mixture}", f"{layer}.feed_forward", _count(settings, self.count)
        weights.move(f"{theirs}.gate", f"{ours}.router.logits")
        if f"{theirs}.gate.e_score_correction_bias" in weights:
            weights.ours[f"{ours}.router.offset"] = weights.take(f"{theirs}.gate.e_score_correction_bias")
        experts = [
            self.expert.of(settings, weights, f"{theirs}.experts.{number}", f"{ours}.experts.{number}", self.size)
            for number in range(count)
        ]
        shared, several = None, settings.get("n_shared_experts", int, 0)
        if several:
            width = several * settings.get(self.size, int)
            shared = self.dense.of(settings, weights, f"{theirs}.shared_experts", f"{ours}.shared", width)
        return partial(_mixture, self.router(settings, count), experts, shared)


def _count(settings: Settings, names: tuple[str, ...]) -> int:
    return settings.get(next((name for name in names if settings.values.get(name) is not None), names[0]), int)


def _mixture(router: Maker, experts: list[Maker], shared: Maker | None) -> MixtureOfExperts:
    return MixtureOfExperts(router(), [expert() for expert in experts], None if shared is None else shared())


class ClampedExpert(GatedFeedForward):
    r"""$W_2 ((u + 1) \odot g \, \sigma(\alpha g))$, g at most and |u| at most a limit (GPT-OSS, arXiv:2508.10925)."""

    def __init__(self, dim: int, hidden_dim: int, *, alpha: float, limit: float) -> None:
        super().__init__(dim, hidden_dim, bias=True)
        self.alpha, self.limit = alpha, limit

    def forward(self, x: Float[Tensor, "*batch D"]) -> Float[Tensor, "*batch D"]:
        gate, up = self.gate_and_up(x).chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        answer: Tensor = self.down((up + 1) * gate * torch.sigmoid(self.alpha * gate))
        return answer


@dataclass(frozen=True, slots=True)
class StackedExperts:
    """GPT-OSS's experts: all in one tensor, the rows of gate and up in turn."""

    def read(self, settings: Settings, weights: Weights, layer: str) -> Maker:
        """Move the weights of a layer, and return the maker of its network."""
        theirs, ours, count = f"{layer}.mlp", f"{layer}.feed_forward", settings.get("num_local_experts", int)
        weights.move(f"{theirs}.router", f"{ours}.router.logits")
        parts: dict[str, Any] = {
            "gate_and_up.weight": weights.take(f"{theirs}.experts.gate_up_proj").mT,
            "gate_and_up.bias": weights.take(f"{theirs}.experts.gate_up_proj_bias"),
            "down.weight": weights.take(f"{theirs}.experts.down_proj").mT,
            "down.bias": weights.take(f"{theirs}.experts.down_proj_bias"),
        }
        for name, stacked in parts.items():
            for number, one in enumerate(stacked):
                apart = torch.cat([one[0::2], one[1::2]]) if name.startswith("gate") else one
                weights.ours[f"{ours}.experts.{number}.{name}"] = apart
        dim = settings.get("hidden_size", int)
        expert = partial(
            ClampedExpert,
            dim,
            settings.get("intermediate_size", int),
            alpha=settings.get("swiglu_alpha", float, 1.702),
            limit=settings.get("swiglu_limit", float, 7.0),
        )
        router = partial(SoftmaxRouter, dim, count, most=settings.get("num_experts_per_tok", int), bias=True)
        return partial(_mixture, router, [expert] * len(parts["down.bias"]), None)


def softmax_router(normalised: bool) -> Callable[[Settings, int], Maker]:
    """A router whose weights are divided by their sum, unless `norm_topk_prob` says otherwise."""
    return lambda settings, count: partial(
        SoftmaxRouter,
        settings.get("hidden_size", int),
        count,
        most=settings.get("num_experts_per_tok", int),
        is_normalised=normalised or settings.get("norm_topk_prob", bool, False),
    )


def softmax_groups(settings: Settings, count: int) -> Maker:
    """DeepSeek-V2's router; its weights are not divided by their sum."""
    is_grouped = settings.get("topk_method", str, "greedy") != "greedy"
    groups = _groups(settings) if is_grouped else {}
    return partial(_router_of(SoftmaxRouter, settings, count), is_normalised=False, **groups)


def sigmoid_groups(settings: Settings, count: int) -> Maker:
    """DeepSeek-V3's router."""
    is_normalised = settings.get("norm_topk_prob", bool, True)
    return partial(_router_of(SigmoidRouter, settings, count), is_normalised=is_normalised, **_groups(settings))


def _router_of(kind: type[nn.Module], settings: Settings, count: int) -> Callable[..., nn.Module]:
    return partial(
        kind,
        settings.get("hidden_size", int),
        count,
        most=settings.get("num_experts_per_tok", int),
        scale=settings.get("routed_scaling_factor", float, 1.0),
    )


def _groups(settings: Settings) -> dict[str, int]:
    return {"groups": settings.get("n_group", int, 1), "best_groups": settings.get("topk_group", int, 1)}
