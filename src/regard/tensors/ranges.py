"""Checks of numbers that settings share. Each message names what was wrong; the command line puts the flag there."""

from math import inf

from regard.errors import ArgumentError

LARGEST = 1e18
"""No setting that is a fraction is larger: the product of two such numbers is still one that float32 can hold."""


def require_at_least(least: float, **numbers: float) -> None:
    """Refuse numbers that are below a bound, not finite, or no numbers.

    Raises:
        ArgumentError: a number is out of the range; the message names the first.

    >>> require_at_least(1, steps=0)
    Traceback (most recent call last):
    regard.errors.ArgumentError: steps must be at least 1, got 0
    """
    for name, value in numbers.items():
        if not least <= value < inf:
            raise ArgumentError(f"{name} must be at least {least}, got {value}")
        _require_sane(name, value)


def require_above(bound: float, **numbers: float) -> None:
    """Refuse numbers that are not above a bound, not finite, or no numbers.

    Raises:
        ArgumentError: a number is out of the range; the message names the first.
    """
    for name, value in numbers.items():
        if not bound < value < inf:
            raise ArgumentError(f"{name} must be above {bound}, got {value}")
        _require_sane(name, value)


def require_share(**shares: float) -> None:
    """Refuse numbers that are not between 0 and 1.

    Raises:
        ArgumentError: a number is out of the range; the message names the first.
    """
    for name, value in shares.items():
        if not 0.0 <= value <= 1.0:
            raise ArgumentError(f"{name} must be between 0 and 1, got {value}")


def _require_sane(name: str, value: float) -> None:
    if isinstance(value, float) and value > LARGEST:
        raise ArgumentError(f"{name} must be at most {LARGEST:g}, got {value}")
