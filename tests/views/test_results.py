"""What users get back shows itself in a notebook, or stands here with the reason."""

import inspect
import re
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from typing import Any

import torch

from regard.call.normalizations import Normalization
from regard.call.rotary.rotary import Layout
from regard.call.rotary.scalings import Scaling
from regard.call.scores.base import Score
from regard.edits import Edit
from regard.tasks.text.tokenizers import Tokenizer
from regard.views import ColourScale, Printing
from regard.watching.running.observed_call import Interceptor
from tests.core import house
from tests.core.test_structure import ON_DEMAND, PUBLIC_PACKAGES

KINDS: dict[type, str] = {
    torch.nn.Module: "torch prints its layers",
    Exception: "it is raised",
    Score: "a formula: its repr says all of it", Normalization: "a formula", Layout: "a rule", Scaling: "a rule",
    Edit: "an argument; the report of the run tells of it", ColourScale: "an argument", Printing: "an argument",
    Interceptor: "a handle, whose report or maps show themselves",
    Tokenizer: "a handle, whose repr says its kind",
}  # fmt: skip
NAMES = {
    "a handle, whose answers show themselves": "Enabled LanguageModel Translator TokenStore Reader "
    "Measure Atlas MeasuredFolder AttentionMonitor",
    "an argument, which the caller wrote": "Beam FitConfig AlignmentOf Request Limits Upsampling Theme Summarize Grid "
    "ForcedPrefix Temperature TopK TopP Vocabulary ByteLevelBPE Characters Words "
    "Sizes Dimensions Statistic AcrossHeads",
    "the state of a computation, which goes back into it": "KeyValue Step DecoderOnlyState RNNState TransformerState "
    "Progress Batch Pair Hypothesis RecurrentState Mixed SearchOf",
    "given to a function of the caller, during a call": "EditedCall EditedWeights CallEdits",
    "a line of a report or a table, which shows itself": "Observed Alternative Label Marks AuditQuestion FaultyWeight",
    "its mask shows itself, and `unpack` gives tensors": "Packed",
    "it is a widget": "NotebookView",
}


def reason(one: type) -> str:
    if getattr(one, "_is_protocol", False) and one.__name__ != "NotebookView":
        return "an interface"
    if one.__name__.endswith("Config"):
        return "a configuration: its repr names each field"
    of_kind = next((why for kind, why in KINDS.items() if issubclass(one, kind)), "")
    return of_kind or next((why for why, names in NAMES.items() if one.__name__ in names.split()), "")


def functions(one: Any) -> Iterator[Any]:
    if not inspect.isclass(one):
        yield from [one] if inspect.isfunction(one) else []
        return
    for base in one.__mro__:
        for name, method in vars(base).items() if base.__module__.startswith("regard.") else ():
            plain = method.fget if isinstance(method, property) else getattr(method, "__func__", method)
            if not name.startswith("_") and inspect.isfunction(plain):
                yield plain


@cache
def handed_back() -> frozenset[type]:
    homes = {found.name: found.file for found in house.definitions(house.files())}
    packages = [
        import_module(name) for name in ("regard", *(f"regard.{one}" for one in (*ON_DEMAND, *PUBLIC_PACKAGES)))
    ]
    waiting = [getattr(package, name) for package in packages for name in package.__dict__["__all__"]]
    known: dict[int, Any] = {}
    while waiting:
        one = waiting.pop()
        if id(one) in known:
            continue
        known[id(one)] = one
        for function in functions(one):
            for name in re.findall(r"\w+", str(function.__annotations__.get("return", ""))):
                if (
                    name in homes
                    and name[0].isupper()
                    and inspect.isclass(found := vars(import_module(homes[name]))[name])
                ):
                    waiting.append(found)
    return frozenset(one for one in known.values() if inspect.isclass(one) and one.__module__.startswith("regard."))


def test_every_result_shows_itself_or_has_a_reason() -> None:
    silent = [one for one in handed_back() if not hasattr(one, "_repr_mimebundle_")]
    assert [one.__name__ for one in silent if not reason(one)] == []
    assert len(handed_back()) - len(silent) > 40


def test_no_reason_is_left_over() -> None:
    silent = [one for one in handed_back() if not hasattr(one, "_repr_mimebundle_")]
    assert {name for names in NAMES.values() for name in names.split()} <= {one.__name__ for one in silent}
    assert [kind.__name__ for kind in KINDS if not any(issubclass(one, kind) for one in silent)] == []
