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


def public(asked: Callable[[Callable[..., Any]], list[inspect.Parameter]]) -> Iterator[Any]:
    for module in PACKAGES:
        for name in vars(module).get("__all__", ()):
            one = getattr(module, name)
            if module not in MODULES and not inspect.isfunction(one):
                continue
            is_data = inspect.isclass(one) and (issubclass(one, tuple | BaseException) or inspect.isabstract(one))
            is_protocol = getattr(one, "_is_protocol", False)
            if callable(one) and not (is_data or is_protocol or name in BUILT_BY_US) and asked(one):
                yield pytest.param(one, id=f"{module.__name__}.{name}")


def parameters(one: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(one).parameters.values())
    except (TypeError, ValueError):  # an alias of a type
        return []


def required(one: Callable[..., Any]) -> list[inspect.Parameter]:
    kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return [p for p in parameters(one) if p.default is p.empty and p.kind in kinds]


def optional(one: Callable[..., Any]) -> list[inspect.Parameter]:
    return [p for p in parameters(one) if p.default is not p.empty]


@pytest.mark.parametrize("one", list(public(required)))
@pytest.mark.usefixtures("as_installed")
def test_wrong_kinds_are_refused(one: Callable[..., Any], tmp_path: Any) -> None:
    every = inspect.signature(one).parameters.values()
    keywords = [p.name for p in every if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    for wrong in WRONG.values():
        # Any other error fails; a name such as "x" may be right, or that of a file.
        with contextlib.suppress(RegardError), contextlib.chdir(tmp_path):
            one(*[wrong] * len(required(one)), **dict.fromkeys(keywords, wrong))


X = torch.ones(1, 4, 5, 8)
MAP = regard.attention(X, X, X, mask=regard.causal(), return_weights=True).weights
MODEL = torch.nn.Sequential(torch.nn.Identity())
RIGHT: dict[str, Any] = {
    "cap": 5.0, "channels": 4, "config": regard.models.DecoderOnlyConfig(num_layers=1, dim=16, num_heads=2), "dim": 8,
    "edits": {"0": regard.edits.ScaleHeads(0, 0.5)}, "factor": 0.5, "function": lambda name, call: None, "grid": (2, 2),
    "head_dim": 4, "heads": 0, "hidden_dim": 8, "image": torch.zeros(3, 8, 8), "indices": torch.zeros(5, 1).long(),
    "key": X, "key_dim": 8, "keys": 0, "label": "a", "latent_dim": 4, "layer": 0, "maps": MAP, "max_length": 9,
    "model": MODEL, "names": "entropy", "norm": torch.nn.LayerNorm(8), "num_heads": 2, "panels": [("a", MAP[0, 0])],
    "patch": (2, 2), "positions": 0, "query": X, "query_dim": 8, "rotary": regard.Rotary(4), "shown": MAP, "size": 2,
    "slopes": torch.ones(2), "source_vocab_size": 9, "table": torch.ones(32, 2), "target_vocab_size": 9,
    "valid": torch.tensor([3]), "value": X, "vector": torch.ones(4), "vocab_size": 9, "weight": torch.ones(8, 8),
    "weights": MAP[0, 0], "one": MAP, "other": MAP, "p": MAP, "q": MAP, "ids": torch.ones(1, 4).long(),
}  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "RNNSeq2Seq": {"config": regard.models.RNNConfig()}, "Transformer": {"config": regard.models.TransformerConfig()},
    "head_panels": {"weights": MAP[0]}, "position_table": {"table": torch.ones(4, 6)}, "AddBias": {"bias": 1.0},
}  # fmt: skip


@pytest.mark.parametrize("one", list(public(optional)))
@pytest.mark.usefixtures("as_installed")
def test_optional_arguments_of_wrong_kinds_are_refused(one: Callable[..., Any], tmp_path: Any) -> None:
    right, positional = RIGHT | OWN.get(one.__name__, {}), [p.name for p in required(one)]
    keywords = {p.name: right[p.name] for p in parameters(one) if p.kind is p.KEYWORD_ONLY and p.default is p.empty}
    for parameter in optional(one):
        # A class is a function, and a wrong one says so itself as it is called.
        wrong = [value for name, value in WRONG.items() if name != "a class" or "norm" not in parameter.name]
        for value in wrong:
            with contextlib.suppress(RegardError), contextlib.chdir(tmp_path):
                one(*(right.get(name) for name in positional), **keywords | {parameter.name: value})


def test_most_of_the_public_names_are_walked() -> None:
    assert len(list(public(required))) > 60


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
            lambda: regard.views.heatmap(X[0, 0], ax=NUMBER),
            r"ax must be axes of matplotlib, .* got int",
        ),
    ],
)
@pytest.mark.usefixtures("as_installed")
def test_parts_of_a_wrong_kind_are_named(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(RegardError, match=message):
        call()
