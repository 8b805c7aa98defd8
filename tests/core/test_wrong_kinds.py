"""Every public callable refuses arguments of a wrong kind in one clear message of ours."""

import contextlib
import inspect
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

import regard
from regard.errors import RegardError

WRONG: dict[str, Any] = {
    "None": None, "text": "x", "a number": 3, "a number below 0": -1, "a fraction": 1.5, "a list": [], "a mapping": {},
    "an object": object(), "a tensor": torch.zeros(2), "a class": dict,
}  # fmt: skip
MODULES: tuple[ModuleType, ...] = (regard, regard.views, regard.nn, regard.watching, regard.edits, regard.models)
BUILT_BY_US = {"EditRun", "Relevance"}
"""Classes whose objects a function of ours returns."""


def public() -> Iterator[Any]:
    """Public functions and classes with required positional parameters; not interfaces, named tuples or errors."""
    for module in MODULES:
        for name in module.__all__:
            one = getattr(module, name)
            is_data = inspect.isclass(one) and (issubclass(one, tuple | BaseException) or inspect.isabstract(one))
            is_protocol = getattr(one, "_is_protocol", False)
            if callable(one) and not (is_data or is_protocol or name in BUILT_BY_US) and required(one):
                yield pytest.param(one, id=f"{module.__name__}.{name}")


def required(one: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        parameters = inspect.signature(one).parameters.values()
    except (TypeError, ValueError):  # an alias of a type
        return []
    return [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]


@pytest.mark.parametrize("one", list(public()))
@pytest.mark.usefixtures("as_installed")
def test_wrong_kinds_are_refused(one: Callable[..., Any]) -> None:
    every = inspect.signature(one).parameters.values()
    keywords = [p.name for p in every if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for wrong in WRONG.values():
        with contextlib.suppress(RegardError):  # any other error fails, and a name such as "x" may be right
            one(*[wrong] * len(required(one)), **dict.fromkeys(keywords, wrong))


def test_most_of_the_public_names_are_walked() -> None:
    assert len(list(public())) > 60
