"""Range checks of settings. Each message names the fault; the command line adds the flag."""

from math import inf

from regard.errors import ArgumentError

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
    """Refuse values outside 0 to 1."""
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise ArgumentError(f"{name} must be between 0 and 1, got {value}")


def _require_sane(name: str, value: float) -> None:
    if isinstance(value, float) and value > LARGEST:
        raise ArgumentError(f"{name} must be at most {LARGEST:g}, got {value}")
