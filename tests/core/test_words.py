"""A word of the signatures means one thing in the whole house: tokens are strings, ids are numbers; and zero is one.

Where a number may be absent, `is None` asks for it, and no truth value.
"""

import ast
import re
from collections.abc import Iterator
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


def _may_be_absent(annotation: ast.expr | None) -> bool:
    parts = set() if annotation is None else {part.strip() for part in ast.unparse(annotation).split("|")}
    return "None" in parts and bool(parts & {"int", "float"})


def _annotated(tree: ast.AST) -> Iterator[tuple[str, ast.expr | None]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.arg):
            yield node.arg, node.annotation
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id, node.annotation
        elif isinstance(node, ast.FunctionDef) and any(ast.unparse(one) == "property" for one in node.decorator_list):
            yield node.name, node.returns


def asked_for_truth(trees: dict[str, ast.Module]) -> list[str]:
    """The places where `x or y`, `x and y`, `not x` or `if x` asks a number that may be absent for its truth."""
    kinds: dict[str, set[bool]] = {}
    for tree in trees.values():
        for name, annotation in _annotated(tree):
            kinds.setdefault(name, set()).add(_may_be_absent(annotation))
    fields = {name for name, found in kinds.items() if found == {True}}  # a field of that name, of whatever class
    found = []
    for module, tree in trees.items():
        for function in ast.walk(tree):
            if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
                continue
            own = {name for name, annotation in _annotated(function) if _may_be_absent(annotation)}
            for node in ast.walk(function):
                for asked in _asked(node):
                    is_name = isinstance(asked, ast.Name) and asked.id in own
                    if is_name or (isinstance(asked, ast.Attribute) and asked.attr in fields):
                        found.append(f"{module}: {ast.unparse(node).splitlines()[0]}")
    return sorted(set(found))


def _asked(node: ast.AST) -> list[ast.expr]:
    if isinstance(node, ast.BoolOp):
        last = node.values[-1]
        is_zero = isinstance(node.op, ast.Or) and isinstance(last, ast.Constant) and last.value == 0
        return [] if is_zero else node.values[:-1]  # `x or 0` gives 0 for 0
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        return [node.operand]
    return [node.test] if isinstance(node, ast.If | ast.IfExp | ast.While) else []


def test_no_number_that_may_be_absent_is_asked_for_its_truth() -> None:
    assert asked_for_truth(house.files()) == []
