"""Where a token stands, as an angle by which query and key are turned.

    rotary = Rotary(dim=64)
    query, key = rotary.rotate(query, offset=S - T), rotary.rotate(key)
    attention(query, key, value)

Turned by p angles, a query at p and a key at p' meet with the angle between them changed by p - p': their
score depends on the distance alone. A longer context than the one trained on is reached by slower
frequencies, which a `Scaling` computes; it is passed in.
"""

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError, ShapeError

# -- which two dimensions make a plane -------------------------------------------------------------------


class Layout(ABC):
    """How the rotated dimensions pair up."""

    @abstractmethod
    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The first and second coordinates of the R / 2 planes, each (..., P) for P = R / 2."""

    @abstractmethod
    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """The inverse of `split`."""


@dataclass(frozen=True, slots=True)
class Half(Layout):
    """Dimension i with dimension i + R/2: Llama, GPT-NeoX, Mistral, Qwen and most of Hugging Face's models.

    >>> Half().split(torch.arange(4.0))
    (tensor([0., 1.]), tensor([2., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The two halves."""
        first, second = x.chunk(2, dim=-1)
        return first, second

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """One after the other."""
        return torch.cat([first, second], dim=-1)


@dataclass(frozen=True, slots=True)
class Interleaved(Layout):
    """Dimension 2i with dimension 2i + 1: RoFormer itself, GPT-J, and Llama's own checkpoints from Meta.

    >>> Interleaved().split(torch.arange(4.0))
    (tensor([0., 2.]), tensor([1., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The even and the odd."""
        return x[..., ::2], x[..., 1::2]

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """In turn."""
        return torch.stack([first, second], dim=-1).flatten(-2)


# -- scalings --------------------------------------------------------------------------------------------


class Scaling(ABC):
    """How the frequencies are slowed for contexts longer than the one trained on."""

    @abstractmethod
    def frequencies(self, base: float, dim: int, length: Tensor) -> Float[Tensor, " P"]:
        """The angle per position of each plane, for R = dim rotated dimensions and the sequence's length ()."""

    def magnitude(self) -> float:
        """What cos and sin are multiplied by, so that scores are multiplied by its square."""
        return 1.0


def plain_frequencies(base: float | Tensor, dim: int, device: torch.device) -> Float[Tensor, " P"]:
    r"""$\theta_i = base^{-2i/R}$ for i = 0, ..., R/2 - 1, in float64 where the device has it.

    >>> plain_frequencies(100.0, 4, torch.device("cpu"))
    tensor([1.0000, 0.1000], dtype=torch.float64)
    """
    exponents = torch.arange(0, dim, 2, device=device, dtype=_wide(device)) / dim
    return torch.pow(base, -exponents)


@dataclass(frozen=True, slots=True)
class Linear(Scaling):
    r"""Position interpolation: $\theta_i / s$, as if positions were s times closer.

    Source: Chen et al. 2023 (arXiv:2306.15595), equation 4: their L'/L is our `factor`.

    >>> Rotary(4, scaling=Linear(2.0)).frequencies(10)
    tensor([0.5000, 0.0050], dtype=torch.float64)
    """

    factor: float
    """s, at least 1."""

    def __post_init__(self) -> None:
        _require_factor("Linear", self.factor)

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        """All divided by s."""
        return plain_frequencies(base, dim, length.device) / self.factor


@dataclass(frozen=True, slots=True, kw_only=True)
class DynamicNTK(Scaling):
    r"""A base that grows with the sequence: $base \cdot (s \ell / L - (s - 1))^{R/(R-2)}$ for length l > L.

    Up to L tokens nothing changes. The base is that of the length at hand: keys that were turned at another
    length do not fit (turn the whole sequence again, or give every call the same `length`).

    Source: "NTK-aware" and "Dynamic NTK" scaling, posts of /u/bloc97 and /u/emozilla in r/LocalLLaMA, 2023;
    Peng et al. 2023 (arXiv:2309.00071), section 3, "Dynamic Scaling"; with s as in transformers' `dynamic`.

    >>> Rotary(4, scaling=DynamicNTK(factor=2.0, original_length=8)).frequencies(16)
    tensor([1.0000, 0.0033], dtype=torch.float64)
    """

    factor: float
    """s, at least 1."""
    original_length: int
    """L: the length trained on."""

    def __post_init__(self) -> None:
        _require_factor("DynamicNTK", self.factor)
        _require_length("DynamicNTK", self.original_length)

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        """The plain frequencies of a larger base."""
        if dim <= 2:
            raise ArgumentError(f"DynamicNTK needs more than 2 rotated dimensions, got {dim}: the base has no effect")
        longer = (length.to(_wide(length.device)) / self.original_length).clamp(min=1.0)
        growth = self.factor * longer - (self.factor - 1.0)
        return plain_frequencies(base * growth ** (dim / (dim - 2)), dim, length.device)


@dataclass(frozen=True, slots=True, kw_only=True)
class YaRN(Scaling):
    r"""Fast planes as they are, slow ones divided by s, those between mixed; and sharper scores.

    $\theta_i \, (1 - \rho_i + \rho_i / s)$, where $\rho_i$ rises from 0 to 1 between the plane that turns
    `beta_fast` times in L positions and the one that turns `beta_slow` times. cos and sin are multiplied by
    $\sqrt{1/t} = 0.1 \ln s + 1$ unless `attention_factor` says otherwise.

    Source: Peng et al. 2023 (arXiv:2309.00071), section 3, "NTK-by-parts" and "YaRN". The paper lets the mixture
    rise with the number of turns; the authors' code, transformers and this let it rise with the index i.

    >>> Rotary(8, scaling=YaRN(factor=4.0, original_length=64)).frequencies(10) / Rotary(8).frequencies(10)
    tensor([1.0000, 0.6250, 0.2500, 0.2500], dtype=torch.float64)
    """

    factor: float
    """s, at least 1."""
    original_length: int
    """L: the length trained on."""
    beta_fast: float = 32.0
    """Turns in L positions from which on a plane is left as it is."""
    beta_slow: float = 1.0
    """Turns in L positions below which a plane is slowed by s."""
    truncate: bool = True
    """Whether the two planes are rounded outwards to whole indices."""
    attention_factor: float | None = None
    """What cos and sin are multiplied by; None is 0.1 ln s + 1."""

    def __post_init__(self) -> None:
        _require_factor("YaRN", self.factor)
        _require_length("YaRN", self.original_length)
        if not 0 < self.beta_slow < self.beta_fast:
            got = f"{self.beta_slow} and {self.beta_fast}"
            raise ArgumentError(f"YaRN needs 0 < beta_slow < beta_fast, got {got}")

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        """A mixture of theta and theta / s."""
        low, high = (self._index(turns, base, dim) for turns in (self.beta_fast, self.beta_slow))
        if self.truncate:
            low, high = math.floor(low), math.ceil(high)
        low, high = max(low, 0), min(high, dim - 1)
        width = high - low if high != low else 1e-3
        plain = plain_frequencies(base, dim, length.device)
        mixture = ((torch.arange(dim // 2, device=plain.device, dtype=plain.dtype) - low) / width).clamp(0.0, 1.0)
        return plain * (1.0 - mixture + mixture / self.factor)

    def _index(self, turns: float, base: float, dim: int) -> float:
        """The (fractional) plane that turns so many times in L positions."""
        return dim * math.log(self.original_length / (turns * 2.0 * math.pi)) / (2.0 * math.log(base))

    def magnitude(self) -> float:
        """The attention factor."""
        return 0.1 * math.log(self.factor) + 1.0 if self.attention_factor is None else self.attention_factor


@dataclass(frozen=True, slots=True, kw_only=True)
class Llama3(Scaling):
    r"""Long waves divided by s, short ones as they are, those between mixed by their wavelength.

    With $w_i = L \theta_i / 2 \pi$, the turns in L positions: $\theta_i$ for $w_i$ above `high_frequency`,
    $\theta_i / s$ below `low_frequency`, and between $\theta_i ((1 - \gamma) / s + \gamma)$ with
    $\gamma = (w_i - low) / (high - low)$.

    Source: Llama 3.1's released code, `apply_scaling` in meta-llama/llama-models; Llama team 2024
    (arXiv:2407.21783). Hugging Face's names are `low_freq_factor` and `high_freq_factor`.

    >>> Rotary(8, scaling=Llama3(factor=8.0, original_length=128)).frequencies(10) / Rotary(8).frequencies(10)
    tensor([1.0000, 0.4275, 0.1250, 0.1250], dtype=torch.float64)
    """

    factor: float = 8.0
    """s, at least 1."""
    low_frequency: float = 1.0
    """Turns in L positions below which a plane is slowed by s."""
    high_frequency: float = 4.0
    """Turns in L positions above which a plane is left as it is."""
    original_length: int = 8192
    """L: the length trained on."""

    def __post_init__(self) -> None:
        _require_factor("Llama3", self.factor)
        _require_length("Llama3", self.original_length)
        if not self.low_frequency < self.high_frequency:
            got = f"{self.low_frequency} and {self.high_frequency}"
            raise ArgumentError(f"Llama3 needs low_frequency < high_frequency, got {got}")

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        """A mixture of theta / s and theta."""
        plain = plain_frequencies(base, dim, length.device)
        turns = plain * self.original_length / (2.0 * math.pi)
        kept = ((turns - self.low_frequency) / (self.high_frequency - self.low_frequency)).clamp(0.0, 1.0)
        return plain * ((1.0 - kept) / self.factor + kept)


@dataclass(frozen=True, slots=True, kw_only=True)
class LongRoPE(Scaling):
    r"""A searched divisor for each plane: $\theta_i / \lambda_i$, one set up to L positions, another beyond.

    cos and sin are multiplied by $\sqrt{1 + \ln s / \ln L}$ unless `attention_factor` says otherwise. The set
    is that of the length at hand: keys that were turned under the other set do not fit.

    Source: Ding et al. 2024 (arXiv:2402.13753), section 3; the two sets and the magnitude as in Phi-3's
    released code and transformers' `longrope`.

    >>> scaling = LongRoPE(short_factor=(1.0, 1.0), long_factor=(1.0, 4.0), factor=4.0, original_length=16)
    >>> Rotary(4, scaling=scaling).frequencies(16), Rotary(4, scaling=scaling).frequencies(17)
    (tensor([1.0000, 0.0100], dtype=torch.float64), tensor([1.0000, 0.0025], dtype=torch.float64))
    """

    short_factor: tuple[float, ...]
    """The divisors up to L positions, R / 2 of them."""
    long_factor: tuple[float, ...]
    """The divisors beyond."""
    factor: float
    """s: the longest length over L."""
    original_length: int
    """L: the length trained on."""
    attention_factor: float | None = None
    """What cos and sin are multiplied by; None is sqrt(1 + ln s / ln L), and 1 for s <= 1."""

    def __post_init__(self) -> None:
        _require_length("LongRoPE", self.original_length)
        if self.factor <= 0:
            raise ArgumentError(f"LongRoPE needs a factor above 0, got {self.factor}")
        for name in ("short_factor", "long_factor"):
            object.__setattr__(self, name, tuple(getattr(self, name)))

    def frequencies(self, base: float, dim: int, length: Tensor) -> Tensor:
        """Each divided by its own."""
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
        """The attention factor."""
        if self.attention_factor is not None:
            return self.attention_factor
        return math.sqrt(1.0 + math.log(self.factor) / math.log(self.original_length)) if self.factor > 1 else 1.0


# -- the rotation ----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Rotary:
    r"""Turn plane i of a vector at position p by the angle $p \, \theta_i$, $\theta_i = base^{-2i/R}$.

    $(x, y) \mapsto (x \cos p\theta_i - y \sin p\theta_i, \; y \cos p\theta_i + x \sin p\theta_i)$, so that
    $q_p \cdot k_{p'}$ depends on p - p' alone.

    Source: Su et al. 2021 (arXiv:2104.09864), equations 14, 15 and 34: their d is our R.

    Raises:
        ArgumentError: the rotated dimensions are none or odd, or a fraction outside (0, 1].

    >>> rotary = Rotary(2)
    >>> rotary.rotate(torch.tensor([[1.0, 0.0]] * 3))
    tensor([[ 1.0000,  0.0000],
            [ 0.5403,  0.8415],
            [-0.4161,  0.9093]])
    """

    dim: int
    """D: the width of a head."""
    base: float = 10_000.0
    """The slowest plane turns once in about 2 pi base positions."""
    layout: Layout = Half()
    """Which dimensions make a plane: `Half()` or `Interleaved()`. A checkpoint fits one of them only."""
    scaling: Scaling | None = None
    """How the frequencies are slowed: `Linear`, `DynamicNTK`, `YaRN`, `Llama3`, `LongRoPE`."""
    fraction: float = 1.0
    """The part of the dimensions that is turned: the first R = int(fraction D). The others stay."""

    def __post_init__(self) -> None:
        if not 0.0 < self.fraction <= 1.0:
            raise ArgumentError(f"the rotated fraction must be in (0, 1], got {self.fraction}")
        if self.rotated < 2 or self.rotated % 2:
            raise ArgumentError(
                f"rotary positions turn pairs of dimensions: the rotated part of dim {self.dim} must be even and "
                f"at least 2, got {self.rotated}"
            )

    @property
    def rotated(self) -> int:
        """R: how many dimensions are turned."""
        return int(self.dim * self.fraction)

    def frequencies(self, length: int | Tensor, device: torch.device | str = "cpu") -> Float[Tensor, " P"]:
        """The angle per position of each plane, for a sequence of this length; float64 where the device has it."""
        if self.scaling is None:
            return plain_frequencies(self.base, self.rotated, torch.device(device))
        return self.scaling.frequencies(self.base, self.rotated, torch.as_tensor(length, device=device))

    def cos_sin(self, positions: Int[Tensor, "*shape"], length: int | Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Cosine and sine (..., R / 2) of the angles at some positions, times the scaling's magnitude.

        Args:
            positions: of any shape.
            length: the sequence's, which `DynamicNTK` and `LongRoPE` look at; None is the last position plus 1.

        For the same positions in many layers, compute them once and `turn` each layer's query and key. Angles
        are made in float64 where the device has it: in float32 they would err by 6e-8 of themselves.
        """
        if length is None:
            length = positions.max() + 1 if self.scaling is not None and positions.numel() else 1
        angles = positions[..., None] * self.frequencies(length, positions.device)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        return angles.cos() * magnitude, angles.sin() * magnitude

    def turn(self, x: Float[Tensor, "*shape D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "*shape D"]:
        """Turn vectors by angles whose cosine and sine (..., R / 2) broadcast against them.

        Computed in at least float32, returned in the input's dtype.

        Raises:
            ShapeError: x is not D wide.
        """
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Rotary({self.dim}) turns vectors of width {self.dim}, got {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
        first, second = self.layout.split(x[..., : self.rotated].to(dtype))
        turned = self.layout.join(first * cos - second * sin, second * cos + first * sin).to(x.dtype)
        return turned if self.rotated == self.dim else torch.cat([turned, x[..., self.rotated :]], dim=-1)

    def rotate(
        self,
        x: Float[Tensor, "*shape T D"],
        offset: int | Int[Tensor, "*batch"] = 0,
        *,
        positions: Int[Tensor, "*batch T"] | None = None,
        length: int | Tensor | None = None,
    ) -> Float[Tensor, "*shape T D"]:
        """Turn queries or keys, each by its position.

        Args:
            x: (batch..., H, T, D), (batch, T, D) or (T, D).
            offset: vector t stands at position offset + t. The query of a key-value cache gives S - T. A tensor
                of the batch's shape gives each sequence its own.
            positions: (T,), or (batch..., T), in place of an offset.
            length: see `cos_sin`. Query and key of one call must be given the same.

        Returns:
            x turned, in its own shape and dtype.

        Raises:
            ShapeError: x is not D wide; offset or positions do not fit it.
            ArgumentError: both an offset and positions.

        >>> rotary, x = Rotary(4), torch.randn(2, 3, 5, 4)
        >>> torch.equal(rotary.rotate(x, offset=2)[..., 0, :], rotary.rotate(x[..., :1, :], offset=2)[..., 0, :])
        True
        """
        where = self._where(x, offset, positions)
        if length is None and positions is None and isinstance(offset, int):
            length = offset + x.shape[-2]  # known without asking the device
        cos, sin = self.cos_sin(where, length)
        has_heads = x.dim() >= 4 and where.dim() > 1
        return self.turn(x, *(t.unsqueeze(-3) if has_heads else t for t in (cos, sin)))

    def _where(self, x: Tensor, offset: int | Tensor, positions: Tensor | None) -> Tensor:
        """The positions, (T,) or (batch..., T)."""
        if x.dim() < 2:
            raise ShapeError(f"rotate() takes (..., T, D) with D = {self.dim}, got {tuple(x.shape)}")
        batch, steps = x.shape[: -3 if x.dim() >= 4 else -2], x.shape[-2]
        if positions is not None:
            if not (isinstance(offset, int) and offset == 0):
                raise ArgumentError("rotate() takes an offset or positions, not both: add the offset to the positions")
            if tuple(positions.shape) not in ((steps,), (*batch, steps)):
                expected = f"({steps},) or {(*batch, steps)}"
                raise ShapeError(f"positions must have shape {expected}, got {tuple(positions.shape)}")
            return positions
        steps_of = torch.arange(steps, device=x.device)
        if isinstance(offset, int):
            return steps_of + offset
        if offset.dim() and offset.shape != batch:
            raise ShapeError(
                f"offset must be a number or have the batch's shape {tuple(batch)}, got {tuple(offset.shape)}"
            )
        return offset.to(x.device)[..., None] + steps_of


# -- checks ------------------------------------------------------------------------------------------------


def _wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64  # Apple's GPUs have no float64


def _require_factor(name: str, factor: float) -> None:
    if factor < 1.0:
        raise ArgumentError(f"{name} stretches the context by a factor of at least 1, got {factor}")


def _require_length(name: str, length: int) -> None:
    if length < 2:
        raise ArgumentError(f"{name} needs the length trained on as original_length, at least 2, got {length}")
