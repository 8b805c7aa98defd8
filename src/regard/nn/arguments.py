"""Shared checks of module constructors."""

from collections.abc import Iterable

from regard.errors import ArgumentError, require_whole


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
    """Refuse a probability of dropping outside [0, 1)."""
    for name, probability in probabilities.items():
        if not 0.0 <= probability < 1.0:
            raise ArgumentError(f"{name} must be in [0, 1), got {probability}")


def require_one_of(name: str, value: str, allowed: Iterable[str]) -> None:
    if value not in (allowed := list(allowed)):
        raise ArgumentError(f"{name} must be one of {', '.join(allowed)}, got {value!r}")
