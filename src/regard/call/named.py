"""Scores and normalizations by their name or their class, as people type them."""

import inspect
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from regard.errors import ArgumentError

T = TypeVar("T")


def made(given: Any, kind: Any, makers: Sequence[Callable[..., T]], argument: str) -> T | None:
    """The object that a name, a class or another of the makers means; None if `given` is none of these."""
    if isinstance(given, str):
        known = {_plain(one.__name__): one for one in makers}
        if (found := known.get(_plain(given))) is None:
            names = ", ".join(repr(_words(one.__name__)) for one in makers)
            raise ArgumentError(f"{argument}={given!r} is not known; it takes {names}")
        given = found
    is_class = isinstance(given, type) and issubclass(given, kind)
    if not is_class and not any(given is one for one in makers):
        return None
    needed = [name for name, one in inspect.signature(given).parameters.items() if one.default is one.empty]
    if needed or inspect.isabstract(given):
        raise ArgumentError(f"{argument}={given.__name__} needs arguments: pass {given.__name__}({', '.join(needed)})")
    made_now: T = given()
    return made_now


def _plain(name: str) -> str:
    return "".join(letter for letter in name.lower() if letter.isalnum())


def _words(name: str) -> str:
    return "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in name).strip()
