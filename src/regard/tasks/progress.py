"""How a long piece of work tells how far it is."""

from collections.abc import Callable

OnProgress = Callable[[str, int, int | None], None]
"""Is called with what is done, how much of it is done, and of how much (None if that is not known)."""


def no_progress(what: str, done: int, total: int | None) -> None:
    """Do nothing with it."""
