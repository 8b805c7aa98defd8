"""The colours of weights: one rule for pictures, pages and the terminal.

A scale maps weights to shares from 0 (the lightest colour on white paper) to 1 (the darkest), between two limits of the
data, which are printed beside the bar. Attention over many tokens has many small weights and a few large ones, so that
a linear scale draws most as white: the default is the square root.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from regard.errors import ArgumentError

Numbers = npt.NDArray[np.floating[Any]]


APART = 0.2
"""The least share of a bar between two of its ticks."""


class Limits(NamedTuple):
    """The weights at the two ends of the colours."""

    low: float
    high: float


class ColourScale(ABC):
    """A rule from weights to shares of the colours. It is chosen by its name, or given as an object."""

    name: ClassVar[str]
    title: ClassVar[str]
    """The unit of the values on the bar, and their spacing."""

    def prepared(self, weights: Numbers, counted: npt.NDArray[np.bool_]) -> Numbers:
        """The drawn values of weights; `counted` marks those that set the limits."""
        return weights

    def limits(self, drawn: Numbers) -> Limits:
        """The limits of the counted values: from 0 to the largest, or symmetric about 0."""
        high = float(np.abs(drawn).max(initial=0.0)) or 1.0
        return Limits(-high if drawn.min(initial=0.0) < 0 else 0.0, high)

    @abstractmethod
    def shares(self, drawn: Any, limits: Limits) -> Numbers:
        """The places on the scale, from 0 at the low limit to 1 at the high one."""

    @abstractmethod
    def values(self, shares: Any, limits: Limits) -> Numbers:
        """The values at positions on the scale: the inverse of `shares`."""

    def round_values(self, limits: Limits) -> Numbers:
        """Round values between the limits, for ticks: multiples of 1, 2, 2.5 or 5 times a power of ten."""
        least = (limits.high - limits.low) / 4
        power = 10.0 ** np.floor(np.log10(least))
        step = power * next(m for m in (1, 2, 2.5, 5, 10) if m * power >= least * (1 - 1e-9))
        first, last = np.ceil(limits.low / step - 1e-9), np.floor(limits.high / step + 1e-9)
        return np.arange(first, last + 1) * step

    def ticks(self, limits: Limits) -> list[float]:
        """The two limits, and between them the round values that stand apart on the bar.

        >>> SquareRootScale().ticks(Limits(0.0, 1.0)), LinearScale().ticks(Limits(0.0, 0.941))
        ([0.0, 0.25, 0.5, 1.0], [0.0, 0.25, 0.5, 0.75, 0.941])
        """
        kept = [limits.low, limits.high]
        for value in self.round_values(limits):
            share = self.shares([float(value), *kept], limits)
            if np.abs(share[1:] - share[0]).min() >= APART:
                kept.append(float(value))
        return sorted(kept)


@dataclass(frozen=True, slots=True)
class LinearScale(ColourScale):
    """$(w - low) / (high - low)$.

    >>> LinearScale().shares([0.0, 0.1, 0.4], Limits(0.0, 0.4)).tolist()
    [0.0, 0.25, 1.0]
    """

    name: ClassVar[str] = "linear"
    title: ClassVar[str] = "attention weight"

    def shares(self, drawn: Any, limits: Limits) -> Numbers:
        return np.clip((np.asarray(drawn, float) - limits.low) / (limits.high - limits.low), 0, 1)

    def values(self, shares: Any, limits: Limits) -> Numbers:
        return limits.low + np.asarray(shares, float) * (limits.high - limits.low)


@dataclass(frozen=True, slots=True)
class SquareRootScale(ColourScale):
    r"""$\sqrt{(w - low) / (high - low)}$; with signs $(1 + \mathrm{sign}(w) \sqrt{|w| / high}) / 2$.

    >>> SquareRootScale().shares([0.0, 0.1, 0.4], Limits(0.0, 0.4)).tolist()
    [0.0, 0.5, 1.0]
    >>> SquareRootScale().shares([-0.4, 0.0, 0.1], Limits(-0.4, 0.4)).tolist()
    [0.0, 0.5, 0.75]
    """

    name: ClassVar[str] = "sqrt"
    title: ClassVar[str] = "attention weight, square-root scale"

    def shares(self, drawn: Any, limits: Limits) -> Numbers:
        drawn = np.asarray(drawn, float)
        if limits.low < 0:
            part = np.clip(drawn / np.where(drawn < 0, -limits.low, limits.high), -1, 1)
            return (1 + np.sign(part) * np.sqrt(np.abs(part))) / 2
        return np.sqrt(LinearScale().shares(drawn, limits))

    def values(self, shares: Any, limits: Limits) -> Numbers:
        shares = np.asarray(shares, float)
        if limits.low < 0:
            part = 2 * shares - 1
            return np.where(part < 0, limits.low, limits.high) * part**2
        return LinearScale().values(shares**2, limits)


@dataclass(frozen=True, slots=True)
class LogScale(ColourScale):
    r"""$\ln(w / low) / \ln(high / low)$, and 0 up to `low`.

    The low limit is the smallest positive weight, at most so many decades under the largest.

    >>> LogScale().shares([0.0, 0.001, 0.01, 0.1], Limits(0.001, 0.1)).tolist()
    [0.0, 0.0, 0.5, 1.0]
    """

    decades: float = 4.0
    name: ClassVar[str] = "log"
    title: ClassVar[str] = "attention weight, logarithmic scale"

    def limits(self, drawn: Numbers) -> Limits:
        if drawn.min(initial=0.0) < 0:
            raise ArgumentError(f"scale='log' needs weights from 0 up; got {drawn.min()}: take 'sqrt' or 'linear'")
        high = float(drawn.max(initial=0.0)) or 1.0
        lowest = float(drawn[drawn > 0].min(initial=high))
        return Limits(max(lowest, high * 10**-self.decades) if lowest < high else high / 10, high)

    def round_values(self, limits: Limits) -> Numbers:
        first, last = np.ceil(np.log10(limits.low) - 1e-9), np.floor(np.log10(limits.high) + 1e-9)
        return 10.0 ** np.arange(first, last + 1)

    def shares(self, drawn: Any, limits: Limits) -> Numbers:
        _above_zero(limits)
        kept = np.clip(np.asarray(drawn, float), limits.low, limits.high)
        return np.log(kept / limits.low) / np.log(limits.high / limits.low)

    def values(self, shares: Any, limits: Limits) -> Numbers:
        _above_zero(limits)
        return limits.low * (limits.high / limits.low) ** np.asarray(shares, float)


@dataclass(frozen=True, slots=True)
class RowScale(LinearScale):
    """Each weight as a share of the largest of its query, then in proportion: every query shows its strongest key.

    >>> RowScale().prepared(np.array([[0.1, 0.2], [0.0, 0.0]]), np.ones((2, 2), bool)).tolist()
    [[0.5, 1.0], [0.0, 0.0]]
    """

    name: ClassVar[str] = "row"
    title: ClassVar[str] = "share of the query's largest weight"

    def prepared(self, weights: Numbers, counted: npt.NDArray[np.bool_]) -> Numbers:
        largest = np.abs(np.where(counted, weights, 0)).max(-1, keepdims=True)
        # An uncounted weight may be larger than the counted ones.
        return np.clip(np.divide(weights, largest, out=np.zeros_like(weights), where=largest > 0), -1, 1)

    def limits(self, drawn: Numbers) -> Limits:
        return Limits(-1.0 if drawn.min(initial=0.0) < 0 else 0.0, 1.0)


ScaleName = Literal["linear", "sqrt", "log", "row"]
SCALES: dict[str, ColourScale] = {
    scale.name: scale for scale in (LinearScale(), SquareRootScale(), LogScale(), RowScale())
}


def scale_of(scale: ScaleName | ColourScale) -> ColourScale:
    if isinstance(scale, ColourScale):
        return scale
    if scale not in SCALES:
        raise ArgumentError(f"scale must be one of {', '.join(map(repr, SCALES))}, or a ColourScale; got {scale!r}")
    return SCALES[scale]


def checked_limits(limits: Any, scale: ColourScale) -> Limits:
    try:
        low, high = (float(limit) for limit in limits)
    except (TypeError, ValueError):
        raise ArgumentError(f"limits must be two numbers, low and high; got {limits!r:.80}") from None
    if not (np.isfinite([low, high]).all() and low < high):
        raise ArgumentError(f"limits must be two finite numbers, the first below the second; got {low} and {high}")
    if low < 0 and isinstance(scale, SquareRootScale) and high <= 0:
        raise ArgumentError(
            f"limits on both sides of 0 are needed below 0 on a square root scale; got {low} and {high}"
        )
    if isinstance(scale, LogScale):
        _above_zero(Limits(low, high))
    return Limits(low, high)


def _above_zero(limits: Limits) -> None:
    if limits.low <= 0:
        raise ArgumentError(f"limits of scale='log' must be above 0; got {limits.low} and {limits.high}")


def numeral(value: float) -> str:
    """A value as printed beside a bar: three digits.

    >>> [numeral(value) for value in (0.0, 0.25, 0.0037123, 1.0)]
    ['0', '0.25', '0.00371', '1']
    """
    return f"{value:.3g}"
