"""Every public callable refuses arguments of a wrong kind in one clear message of ours."""

import contextlib
import inspect
import pkgutil
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any

import pytest
import torch

import regard
from regard.errors import RegardError

WRONG: dict[str, Any] = {
    "None": None, "text": "x", "a number": 3, "a number below 0": -1, "a fraction": 1.5, "a list": [], "a mapping": {},
    "an object": object(), "a tensor": torch.zeros(2), "a class": dict,
}  # fmt: skip
MODULES = (regard, regard.views, regard.nn, regard.watching, regard.edits, regard.models)
PACKAGES = [
    regard,
    *(import_module(f"regard.{p.name}") for p in pkgutil.iter_modules(regard.__path__) if p.ispkg),
]
BUILT_BY_US = {"EditRun", "Relevance"}
"""Classes whose objects a function of ours returns."""


def public() -> Iterator[Any]:
    """Public functions, and classes of `MODULES`, with required positional parameters; not interfaces or errors."""
    for module in PACKAGES:
        for name in vars(module).get("__all__", ()):
            one = getattr(module, name)
            if module not in MODULES and not inspect.isfunction(one):
                continue
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
        # Any other error fails; a name such as "x" may be right, or that of a file.
        with contextlib.suppress(RegardError, FileNotFoundError):
            one(*[wrong] * len(required(one)), **dict.fromkeys(keywords, wrong))


def test_most_of_the_public_names_are_walked() -> None:
    assert len(list(public())) > 60


X = torch.ones(2, 4, 3, 8)
NUMBER: Any = 8
DARKLY: Any = "dark"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: regard.attention(X, X, X, mask=regard.causal), r"got function; call it, as in regard.causal\(\)"),
        (lambda: regard.attention(X, X, X, mask="causal"), r"got str; make one, as in regard.causal\(\)"),
        (lambda: regard.Additive(NUMBER), r"vector must be a tensor \(A,\)"),
        (lambda: regard.Bilinear(NUMBER), r"weight must be a tensor \(Dq, Dk\), got int: 8"),
        (
            lambda: regard.attention(X, X, X, normalization=regard.SoftmaxWithSink(torch.zeros(3))),
            "one sink, or one for each of 4 heads; got 3",
        ),
        (lambda: regard.models.DecoderOnlyConfig(layers=NUMBER), "their number is num_layers"),
        (lambda: regard.nn.TokenEmbedding(9, 4)(torch.rand(2, 3)), "whole numbers below 9; got torch.float32"),
        (lambda: regard.views.heatmap(X[0, 0], theme=DARKLY), "theme must be LIGHT, DARK or another Theme"),
        (
            lambda: regard.views.heatmap(X[0, 0], colour_map="blue"),
            "one of matplotlib's, such as 'viridis'; got 'blue'",
        ),
        (
            lambda: regard.views.heatmap(X[0, 0], ax=NUMBER),
            r"ax must be axes of matplotlib, .* got int",
        ),
    ],
)
@pytest.mark.usefixtures("as_installed")
def test_parts_of_a_wrong_kind_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        call()
