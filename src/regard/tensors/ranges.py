"""Range checks of settings and of constructors. Each message names the fault; the command line adds the flag."""

from collections.abc import Iterable
from math import inf

from regard.errors import ArgumentError, require_whole

LARGEST = 1e18
"""Largest fraction of a setting: the product of two still fits in float32."""


def require_at_least(least: float, **numbers: float) -> None:
    """Refuse values below a bound, infinities and NaN.

    >>> require_at_least(1, steps=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: steps must be at least 1, got 0
    """
    for name, value in numbers.items():
        if not least <= value < inf:
            raise ArgumentError(f"{name} must be at least {least}, got {value}")
        _require_sane(name, value)


def require_above(bound: float, **numbers: float) -> None:
    for name, value in numbers.items():
        if not bound < value < inf:
            raise ArgumentError(f"{name} must be above {bound}, got {value}")
        _require_sane(name, value)


def require_share(**shares: float) -> None:
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise ArgumentError(f"{name} must be between 0 and 1, got {value}")


def _require_sane(name: str, value: float) -> None:
    if isinstance(value, float) and value > LARGEST:
        raise ArgumentError(f"{name} must be at most {LARGEST:g}, got {value}")


def require_sizes(**sizes: int) -> None:
    """Refuse a size below 1.

    >>> require_sizes(dim=4, hidden_dim=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: hidden_dim must be at least 1, got 0
    """
    require_whole(**sizes)
    for name, size in sizes.items():
        if size < 1:
            raise ArgumentError(f"{name} must be at least 1, got {size}")


def require_dropout(**probabilities: float) -> None:
    for name, probability in probabilities.items():
        if not 0.0 <= probability < 1.0:
            raise ArgumentError(f"{name} must be in [0, 1), got {probability}")


def require_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in (allowed := list(allowed)):
        raise ArgumentError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
