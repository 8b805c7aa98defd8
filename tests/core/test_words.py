"""A word of the signatures means one thing in the whole house: tokens are strings, ids are numbers."""

import ast
import re
from typing import get_args

import torch

import regard
from regard.functional import NormalizationName, ScoreName
from regard.kernels import BACKENDS
from regard.kernels.base import BackendName
from regard.models.kernel_regression import KERNELS, KernelName
from regard.views.scales import SCALES, ScaleName
from tests.core import house

MEANINGS = {
    "tokens": r"\bstr\b|\bTokenTexts\b|^Any$",
    "ids": r"\bint\b|Tensor|Integers|^Any$|Input|NDArray",
    "backend": r"^Backend(Name \| None)?$",
}
"""What the type of a parameter of that name contains. `Any` is for a view, which takes a model's inputs there too."""
ELSEWHERE = {"regard.corpus": "ids", "regard.tasks.text": "backend", "regard.call.masks.patterns": "ids"}
"""Where the word is that of another library, or names documents."""


def strangers(files: dict[str, ast.Module]) -> list[str]:
    """The parameters whose type is not that of their word."""
    found = []
    for module, tree in files.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef):
                continue
            given = function.args
            for one in (*given.posonlyargs, *given.args, *given.kwonlyargs):
                wanted, kind = MEANINGS.get(one.arg), one.annotation and ast.unparse(one.annotation)
                if (
                    wanted
                    and not any(module.startswith(room) and one.arg == word for room, word in ELSEWHERE.items())
                    and not re.search(wanted, kind or "")
                ):
                    found.append(f"{module}.{function.name}: {one.arg} is {kind}")
    return found


def test_a_word_has_one_meaning_in_every_signature() -> None:
    assert strangers(house.files()) == []


def test_the_names_in_signatures_are_those_that_run() -> None:
    assert set(get_args(BackendName)) == set(BACKENDS)
    assert set(get_args(ScaleName)) == set(SCALES)
    assert set(get_args(KernelName)) == set(KERNELS)
    q = torch.randn(1, 3, 4)
    for score in get_args(ScoreName):
        assert regard.attention(q, q, q, score=score).shape == q.shape
    for normalization in get_args(NormalizationName):
        assert regard.attention(q, q, q, normalization=normalization).shape == q.shape
