"""Rotary positions of Hugging Face's configurations."""

import math
from collections.abc import Callable
from dataclasses import dataclass

from regard.call.rotary.layouts import Half, Layout
from regard.call.rotary.rotary import Rotary
from regard.call.rotary.scalings import DynamicNTK, Llama3, LongRoPE, PositionInterpolation, Scaling, YaRN
from regard.errors import RunFolderError
from regard.models.convert.folder import Settings


@dataclass(frozen=True, slots=True)
class Rope:
    """How a family of models rotates queries and keys."""

    layout: Layout = Half()
    base: float = 10_000.0
    """The base of a configuration without one."""
    local_base: float | None = None
    """The base of sliding layers, in a configuration without one."""
    has_parts: bool = False
    """Whether the family rotates a part of each head without a scaling too."""
    scales_sliding: bool = True
    """Whether an old configuration's scaling holds for sliding layers."""

    def of(self, settings: Settings, head_dim: int, kind: str) -> Rotary:
        """The rotation of a layer of this kind, `full_attention` or `sliding_attention`."""
        rope = self._values(settings, kind)
        name = rope.get("rope_type", str, rope.get("type", str, "default"))
        if name not in SCALINGS:
            raise RunFolderError(f"{settings.source}: rope_type is {name!r}, and regard reads {', '.join(SCALINGS)}")
        return Rotary(
            head_dim,
            base=rope.get("rope_theta", float),
            layout=self.layout if settings.get("rope_interleave", bool, True) else Half(),
            scaling=SCALINGS[name](rope, settings.get("max_position_embeddings", int, 2048)),
            fraction=rope.get("partial_rotary_factor", float, 1.0) if name != "default" or self.has_parts else 1.0,
        )

    def _values(self, settings: Settings, kind: str) -> Settings:
        values, scaling = settings.part("rope_parameters"), settings.part("rope_scaling")
        if kind in values:  # today's configurations have one rotation for each kind of layers
            values = Settings(values, settings.source).part(kind)
        elif not values and (self.scales_sliding or kind == "full_attention"):
            values = scaling
        base = settings.get("rope_theta", float, self.base)
        if kind == "sliding_attention" and self.local_base is not None:
            base = settings.get("rope_local_base_freq", float, self.local_base)
        old = {"rope_theta": base, "partial_rotary_factor": settings.values.get("partial_rotary_factor")}
        return Settings({**old, **values}, settings.source)


def latent_scale(settings: Settings) -> float:
    """The factor of DeepSeek's scores beside a rotation by YaRN."""
    rope = Settings(settings.part("rope_parameters") or settings.part("rope_scaling"), settings.source)
    if rope.get("rope_type", str, rope.get("type", str, "default")) == "default":
        return 1.0
    return _magnitude(rope.get("factor", float), rope.get("mscale_all_dim", float, 0.0)) ** 2


def _magnitude(factor: float, weight: float) -> float:
    """DeepSeek-AI 2024 (arXiv:2405.04434), section 3.1.4; 1 for a weight of 0."""
    return 1.0 if factor <= 1 else 0.1 * weight * math.log(factor) + 1.0


def _yarn(rope: Settings, longest: int) -> Scaling:
    original = rope.get("original_max_position_embeddings", int, longest)
    factor = rope.get("factor", float, longest / original)
    attention_factor = rope.optional("attention_factor", float)
    weights = [rope.get(name, float, 0.0) for name in ("mscale", "mscale_all_dim")]
    if attention_factor is None and all(weights):
        above, below = (_magnitude(factor, weight) for weight in weights)
        attention_factor = above / below
    return YaRN(
        factor=factor,
        original_length=original,
        beta_fast=rope.get("beta_fast", float, 32.0),
        beta_slow=rope.get("beta_slow", float, 1.0),
        truncate=rope.get("truncate", bool, True),
        attention_factor=attention_factor,
    )


def _llama3(rope: Settings, longest: int) -> Scaling:
    return Llama3(
        factor=rope.get("factor", float),
        low_frequency=rope.get("low_freq_factor", float),
        high_frequency=rope.get("high_freq_factor", float),
        original_length=rope.get("original_max_position_embeddings", int),
    )


def _longrope(rope: Settings, longest: int) -> Scaling:
    original = rope.get("original_max_position_embeddings", int, longest)
    return LongRoPE(
        short_factor=rope.floats("short_factor"),
        long_factor=rope.floats("long_factor"),
        factor=rope.get("factor", float, longest / original),
        original_length=original,
        attention_factor=rope.optional("attention_factor", float),
    )


Scale = Callable[[Settings, int], Scaling | None]

SCALINGS: dict[str, Scale] = {
    "default": lambda rope, longest: None,
    "linear": lambda rope, longest: PositionInterpolation(rope.get("factor", float)),
    "dynamic": lambda rope, longest: DynamicNTK(factor=rope.get("factor", float), original_length=longest),
    "yarn": _yarn,
    "llama3": _llama3,
    "longrope": _longrope,
}
"""From the `rope_type` of a configuration to a function of its values and the longest sequence."""
