"""The position of a token as a rotation angle of query and key.

    rotary = Rotary(dim=64)
    query, key = rotary.rotate(query, offset=S - T), rotary.rotate(key)
    attention(query, key, value)

Rotating a query at p and a key at p' changes the angle between them by p - p' times the frequency, so their score
depends on the distance alone. Slower frequencies, from a `Scaling`, reach a longer context than the trained one.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float, Integer
from torch import Tensor

from regard.call.rotary.scalings import Scaling, has_fixed_numbers, plain_frequencies
from regard.call.shapes import counted
from regard.errors import ArgumentError, ShapeError, require_whole
from regard.lazy import Displayed
from regard.tensors.guards import KeptPlace, where_kept
from regard.tensors.kinds import refuse_wrong_kinds


class Layout(ABC):
    """The pairing of the rotated dimensions."""

    @abstractmethod
    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        """The first and the second coordinates of the R / 2 planes, each of shape (..., P) with P = R / 2."""

    @abstractmethod
    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        """Undo `split`."""


@dataclass(frozen=True, slots=True)
class Half(Layout):
    """Pairs dimension i with dimension i + R/2: Llama, GPT-NeoX, Mistral, Qwen and most of Hugging Face's models.

    >>> Half().split(torch.arange(4.0))
    (tensor([0., 1.]), tensor([2., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        first, second = x.chunk(2, dim=-1)
        return first, second

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        return torch.cat([first, second], dim=-1)


@dataclass(frozen=True, slots=True)
class Interleaved(Layout):
    """Pairs dimension 2i with dimension 2i + 1: RoFormer itself, GPT-J, and Llama's own checkpoints from Meta.

    >>> Interleaved().split(torch.arange(4.0))
    (tensor([0., 2.]), tensor([1., 3.]))
    """

    def split(self, x: Float[Tensor, "*shape R"]) -> tuple[Tensor, Tensor]:
        return x[..., ::2], x[..., 1::2]

    def join(self, first: Float[Tensor, "*shape P"], second: Float[Tensor, "*shape P"]) -> Tensor:
        return torch.stack([first, second], dim=-1).flatten(-2)


MOST_KEPT = 4_096
"""The sines and cosines of so many positions are cached: 2 MiB for heads of 128."""


@refuse_wrong_kinds
@dataclass(frozen=True, slots=True)
class Rotary(Displayed):
    r"""Rotate plane i of a vector at position p by the angle $p \, \theta_i$, $\theta_i = base^{-2i/R}$.

    $(x, y) \mapsto (x \cos p\theta_i - y \sin p\theta_i, \; y \cos p\theta_i + x \sin p\theta_i)$, so $q_p \cdot
    k_{p'}$ depends on p - p' alone.

    Source: Su et al. 2021 (arXiv:2104.09864), equations 14, 15 and 34: their d is our R.

    Raises:
        ArgumentError: no dimension or an odd number of them is rotated, or the fraction lies outside (0, 1].

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
    """The dimensions of a plane: `Half()` or `Interleaved()`. A checkpoint fits only one of them."""
    scaling: Scaling | None = None
    """The scaling of the frequencies: `PositionInterpolation`, `DynamicNTK`, `YaRN`, `Llama3`, `LongRoPE`."""
    fraction: float = 1.0
    """The rotated part of the dimensions: the first R = int(fraction D). The others stay unchanged."""

    def __post_init__(self) -> None:
        require_whole(dim=self.dim)
        if not 0.0 < self.fraction <= 1.0:
            raise ArgumentError(f"the rotated fraction must be in (0, 1], got {self.fraction}")
        if self.rotated < 2 or self.rotated % 2:
            raise ArgumentError(
                f"rotary positions turn pairs of dimensions: the rotated part of dim {self.dim} must be even and "
                f"at least 2, got {self.rotated}"
            )

    @property
    def rotated(self) -> int:
        """R: the number of dimensions that are turned."""
        return int(self.dim * self.fraction)

    def frequencies(self, length: int | Tensor, device: torch.device | str = "cpu") -> Float[Tensor, " P"]:
        """The angle per position of each plane, for a sequence of this length; float64 if the device has it."""
        if self.scaling is None:
            return plain_frequencies(self.base, self.rotated, torch.device(device))
        return self.scaling.frequencies(self.base, self.rotated, torch.as_tensor(length, device=device))

    def cos_sin(
        self, positions: Integer[Tensor, "*shape"], length: int | Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Cosine and sine (..., R / 2) of the angles at some positions, multiplied by the scaling's magnitude.

        Args:
            positions: of any shape.
            length: of the sequence; `DynamicNTK` and `LongRoPE` use it. The default is the last position plus 1.

        If many layers use the same positions, compute them once and `turn` the query and key of each layer. The angles
        are float64 if the device has it: in float32 their relative error would be 6e-8.
        """
        positions = positions if positions.is_floating_point() else positions.long()
        if length is None:
            length = positions.max() + 1 if self.scaling is not None and positions.numel() else 1
        angles = positions[..., None] * self.frequencies(length, positions.device)
        magnitude = 1.0 if self.scaling is None else self.scaling.magnitude()
        return angles.cos() * magnitude, angles.sin() * magnitude

    def turn(self, x: Float[Tensor, "*shape D"], cos: Tensor, sin: Tensor) -> Float[Tensor, "*shape D"]:
        """Rotate vectors by angles whose cosine and sine (..., R / 2) broadcast against them.

        The computation is in at least float32; the result has the input's dtype.

        Raises:
            ShapeError: x is not D wide.
        """
        if x.shape[-1] != self.dim:
            raise ShapeError(f"Rotary({self.dim}) turns vectors of width {self.dim}, got {tuple(x.shape)}")
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = cos.to(dtype), sin.to(dtype)
        # (A full slice would cost a copy in the backward pass.)
        first, second = self.layout.split((x if self.rotated == self.dim else x[..., : self.rotated]).to(dtype))
        turned = self.layout.join(first * cos - second * sin, second * cos + first * sin).to(x.dtype)
        return turned if self.rotated == self.dim else torch.cat([turned, x[..., self.rotated :]], dim=-1)

    def rotate(
        self,
        x: Float[Tensor, "*shape T D"],
        offset: int | Integer[Tensor, "*batch"] = 0,
        *,
        positions: Integer[Tensor, "*batch T"] | None = None,
        length: int | Tensor | None = None,
    ) -> Float[Tensor, "*shape T D"]:
        """Rotate queries or keys, each by its position.

        Args:
            x: (batch..., H, T, D), (batch, T, D) or (T, D).
            offset: vector t stands at position offset + t. With a key-value cache, the query needs the offset S - T. A
                tensor of the batch's shape gives each sequence its own offset.
            positions: (T,), or (batch..., T), instead of an offset.
            length: see `cos_sin`. Query and key of one call need the same length.

        Returns:
            the rotated x, in its own shape and dtype.

        Raises:
            ShapeError: x is not D wide, or offset or positions do not fit it.
            ArgumentError: both an offset and positions are given.

        >>> rotary, x = Rotary(4), torch.randn(2, 3, 5, 4)
        >>> torch.equal(rotary.rotate(x, offset=2)[..., 0, :], rotary.rotate(x[..., :1, :], offset=2)[..., 0, :])
        True
        """
        kept = self._cos_sin_of(x, offset, length) if positions is None else None
        if kept is not None:
            return self.turn(x, *kept)
        where = self._where(x, offset, positions)
        if length is None and positions is None and isinstance(offset, int):
            length = offset + x.shape[-2]  # No value is read from the device.
        cos, sin = self.cos_sin(where, length)
        has_heads = x.dim() >= 4 and where.dim() > 1
        return self.turn(x, *(t.unsqueeze(-3) if has_heads else t for t in (cos, sin)))

    def _cos_sin_of(self, x: Tensor, offset: int | Tensor, length: int | Tensor | None) -> tuple[Tensor, Tensor] | None:
        # In a traced graph, comparing a length would fix it.
        if not isinstance(offset, int) or isinstance(length, Tensor) or x.dim() < 2:
            return None
        place = where_kept(x)
        if place is None:
            return None
        if x.shape[-2] > MOST_KEPT or not self._is_fixed():
            return None
        end, dtype = offset + x.shape[-2], torch.promote_types(x.dtype, torch.float32)
        length = end if length is None else length
        return _kept(self.base, self.rotated, self.scaling, offset, end, length, dtype, place)

    def _is_fixed(self) -> bool:
        """Constant angles follow from Python numbers alone: a custom scaling may change, a tensor may be learned."""
        if type(self) is not Rotary or not isinstance(self.base, int | float):
            return False
        return self.scaling is None or has_fixed_numbers(self.scaling)

    def _where(self, x: Tensor, offset: int | Tensor, positions: Tensor | None) -> Tensor:
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
        return counted(offset, x.device)[..., None] + steps_of


@lru_cache(maxsize=8)
def _kept(
    base: float,
    dim: int,
    scaling: Scaling | None,
    start: int,
    stop: int,
    length: int,
    dtype: torch.dtype,
    place: KeptPlace,
) -> tuple[Tensor, Tensor]:
    # An inference tensor could not be used in training later. The default device may be another.
    with torch.inference_mode(False):
        cos, sin = Rotary(dim, base, scaling=scaling).cos_sin(torch.arange(start, stop, device=place.device), length)
        return cos.to(dtype), sin.to(dtype)
