"""Scalings of rotary frequencies for contexts longer than the trained one."""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError
from regard.tensors.memory import widest_dtype


class Scaling(ABC):
    """A scaling of frequencies for contexts longer than the trained one."""

    @abstractmethod
    def frequencies(self, base: float, dim: int, length: Tensor) -> Float[Tensor, " P"]:
        """The angle per position of each plane, for R = dim rotated dimensions and a sequence of this length ()."""

    def magnitude(self) -> float:
        """The factor of cos and sin; scores are multiplied by its square."""
        return 1.0


def plain_frequencies(base: float | Tensor, dim: int, device: torch.device) -> Float[Tensor, " P"]:
    r"""$\theta_i = base^{-2i/R}$ for i = 0, ..., R/2 - 1, in float64 if the device has it.

    >>> plain_frequencies(100.0, 4, torch.device("cpu"))
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    exponents = torch.arange(0, dim, 2, device=device, dtype=widest_dtype(device)) / dim
    return torch.pow(base, -exponents)


@dataclass(frozen=True, slots=True)
class PositionInterpolation(Scaling):
    r"""Position interpolation: $\theta_i / s$, as if positions were s times closer.

    Source: Chen et al. 2023 (arXiv:2306.15595), equation 4: their L'/L is our `factor`.

    >>> from regard import Rotary
    >>> Rotary(4, scaling=PositionInterpolation(2.0)).frequencies(10)
    tensor([0.5000, 0.0050], dtype=torch.float64)
    """

    factor: float | Tensor
    """s, at least 1."""

    def __post_init__(self) -> None:
        require_factor("PositionInterpolation", self.factor)

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        return plain_frequencies(base, dim, length.device) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK(Scaling):
    r"""A base that grows with the sequence: $base \cdot (s \ell / L - (s - 1))^{R/(R-2)}$ for length l > L.

    Up to L tokens nothing changes. The base depends on the current length, so keys rotated at another length do not fit
    (rotate the whole sequence again, or give every call the same `length`).

    Source: "NTK-aware" and "Dynamic NTK" scaling, posts of /u/bloc97 and /u/emozilla in r/LocalLLaMA, 2023;
    Peng et al. 2023 (arXiv:2309.00071), section 3, "Dynamic Scaling"; the factor s is that of transformers' `dynamic`.

    >>> from regard import Rotary
    >>> Rotary(4, scaling=DynamicNTK(factor=2.0, original_length=8)).frequencies(16)
    tensor([1.0000, 0.0033], dtype=torch.float64)
    """

    factor: float
    """s, at least 1."""
    original_length: int
    """L: the length in training."""

    def __post_init__(self) -> None:
        require_factor("DynamicNTK", self.factor)
        require_length("DynamicNTK", self.original_length)

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        if dim <= 2:
            raise ArgumentError(f"DynamicNTK needs more than 2 rotated dimensions, got {dim}: the base has no effect")
        longer = (length.to(widest_dtype(length.device)) / self.original_length).clamp(min=1.0)
        growth = self.factor * longer - (self.factor - 1.0)
        return plain_frequencies(base * growth ** (dim / (dim - 2)), dim, length.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class YaRN(Scaling):
    r"""Fast planes stay, slow planes are divided by s, planes between them are mixed, and scores become sharper.

    $\theta_i \, (1 - \rho_i + \rho_i / s)$, where $\rho_i$ rises from 0 to 1 from the plane with `beta_fast` turns in L
    positions to that with `beta_slow` turns. cos and sin are multiplied by $\sqrt{1/t} = 0.1 \ln s + 1$ unless
    `attention_factor` is given.

    Source: Peng et al. 2023 (arXiv:2309.00071), section 3, "NTK-by-parts" and "YaRN". In the paper the mixture rises
    with the number of turns. In the authors' code, in transformers and here it rises with the index i.

    >>> from regard import Rotary
    >>> Rotary(8, scaling=YaRN(factor=4.0, original_length=64)).frequencies(10) / Rotary(8).frequencies(10)
    tensor([1.0000, 0.6250, 0.2500, 0.2500], dtype=torch.float64)
    """

    factor: float
    """s, at least 1."""
    original_length: int
    """L: the length in training."""
    beta_fast: float = 32.0
    """Planes with at least so many turns in L positions are unchanged."""
    beta_slow: float = 1.0
    """Planes with fewer turns in L positions are slowed by s."""
    truncate: bool = True
    """Whether the two planes are rounded outwards to whole indices."""
    attention_factor: float | None = None
    """The factor of cos and sin; default 0.1 ln s + 1."""

    def __post_init__(self) -> None:
        require_factor("YaRN", self.factor)
        require_length("YaRN", self.original_length)
        if not 0 < self.beta_slow < self.beta_fast:
            got = f"{self.beta_slow} and {self.beta_fast}"
            raise ArgumentError(f"YaRN needs 0 < beta_slow < beta_fast, got {got}")

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        low, high = (self._index(turns, base, dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 1e-3
        plain = plain_frequencies(base, dim, length.device)
        mixture = ((torch.arange(dim // 2, device=plain.device, dtype=plain.dtype) - low) / width).clamp(0.0, 1.0)
        return plain * (1.0 - mixture + mixture / self.factor)

    def _index(self, turns: float, base: float, dim: int) -> float:
        """The (fractional) index of the plane with this number of turns in L positions."""
        return dim * math.log(self.original_length / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    def magnitude(self) -> float:
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Scaling):
    r"""Long waves are divided by s, short waves stay, and waves between them are mixed by their wavelength.

    With $w_i = L \theta_i / 2 \pi$, the number of turns in L positions: $\theta_i$ for $w_i$ above `high_frequency`,
    $\theta_i / s$ for $w_i$ below `low_frequency`, and between them $\theta_i ((1 - \gamma) / s + \gamma)$ with
    $\gamma = (w_i - low) / (high - low)$.

    Source: Llama 3.1's released code, `apply_scaling` in meta-llama/llama-models; Llama team 2024
    (arXiv:2407.21783). Hugging Face's names are `low_freq_factor` and `high_freq_factor`.

    >>> from regard import Rotary
    >>> Rotary(8, scaling=Llama3(factor=8.0, original_length=128)).frequencies(10) / Rotary(8).frequencies(10)
    tensor([1.0000, 0.4275, 0.1250, 0.1250], dtype=torch.float64)
    """

    factor: float = 8.0
    """s, at least 1."""
    low_frequency: float = 1.0
    """Planes with fewer turns in L positions are slowed by s."""
    high_frequency: float = 4.0
    """Planes with more turns in L positions are unchanged."""
    original_length: int = 8192
    """L: the length in training."""

    def __post_init__(self) -> None:
        require_factor("Llama3", self.factor)
        require_length("Llama3", self.original_length)
        if not self.low_frequency < self.high_frequency:
            got = f"{self.low_frequency} and {self.high_frequency}"
            raise ArgumentError(f"Llama3 needs low_frequency < high_frequency, got {got}")

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        plain = plain_frequencies(base, dim, length.device)
        turns = plain * self.original_length / (2.0 * math.pi)
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0.0, 1.0)
        return plain * ((1.0 - kept) / self.factor + kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRoPE(Scaling):
    r"""$\theta_i / \lambda_i$: each plane has its own divisor, found by a search; beyond L a second set is used.

    cos and sin are multiplied by $\sqrt{1 + \ln s / \ln L}$ unless `attention_factor` is given. The current length
    selects the set, so keys rotated with the other set do not fit.

    Source: Ding et al. 2024 (arXiv:2402.13753), section 3; the two sets and the magnitude follow Phi-3's
    released code and transformers' `longrope`.

    >>> from regard import Rotary
    >>> scaling = LongRoPE(short_factor=(1.0, 1.0), long_factor=(1.0, 4.0), factor=4.0, original_length=16)
    >>> Rotary(4, scaling=scaling).frequencies(16), Rotary(4, scaling=scaling).frequencies(17)
    (tensor([1.0000, 0.0100], dtype=torch.float64), tensor([1.0000, 0.0025], dtype=torch.float64))
    """

    short_factor: tuple[float, ...]
    """The R / 2 divisors for lengths up to L."""
    long_factor: tuple[float, ...]
    """The R / 2 divisors for lengths beyond L."""
    factor: float
    """s: the longest length divided by L."""
    original_length: int
    """L: the length in training."""
    attention_factor: float | None = None
    """The factor of cos and sin; default sqrt(1 + ln s / ln L), and 1 for s <= 1."""

    def __post_init__(self) -> None:
        require_length("LongRoPE", self.original_length)
        if self.factor <= 0:
            raise ArgumentError(f"LongRoPE needs a factor above 0, got {self.factor}")
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        plain = plain_frequencies(base, dim, length.device)
        divisors = self.long_factor, self.short_factor
        for factors in divisors:
            if len(factors) != dim // 2:
                raise ArgumentError(
                    f"LongRoPE needs a divisor for each of the {dim // 2} pairs of the {dim} rotated dimensions, "
                    f"got {len(factors)}"
                )
        long, short = (torch.tensor(factors, dtype=plain.dtype, device=plain.device) for factors in divisors)
        return plain / torch.where(length > self.original_length, long, short)

    def magnitude(self) -> float:
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length)) if self.factor > 1 else 1.0


FIXED = (PositionInterpolation, DynamicNTK, YaRN, Llama3, LongRoPE)
"""The scalings of this file, constant unless one of their settings is a tensor."""


def has_fixed_numbers(scaling: Scaling) -> bool:
    """Whether a scaling is constant: one of the above, with Python numbers as settings.

    >>> has_fixed_numbers(PositionInterpolation(2.0)), has_fixed_numbers(PositionInterpolation(torch.tensor(2.0)))
    (True, False)
    """
    # A custom subclass of one of these may change.
    if not isinstance(scaling, FIXED) or type(scaling) not in FIXED:
        return False
    return all(_is_number(getattr(scaling, one.name)) for one in fields(scaling))


def _is_number(setting: object) -> bool:
    if isinstance(setting, tuple):
        return all(map(_is_number, setting))
    return setting is None or isinstance(setting, int | float)


def require_factor(name: str, factor: float | Tensor) -> None:
    """Refuse a factor below 1: it would shorten the context."""
    if factor < 1.0:
        raise ArgumentError(f"{name} stretches the context by a factor of at least 1, got {factor}")


def require_length(name: str, length: int) -> None:
    if length < 2:
        raise ArgumentError(f"{name} needs the length trained on as original_length, at least 2, got {length}")
