"""The examples have no type errors that regard makes: mypy --strict reads README, pages, docstrings."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests import ROOT
from tests.core import house
from tests.docs.examples import write_modules

MYPY = """[mypy]
strict = True
follow_imports = silent
ignore_missing_imports = True
allow_redefinition_new = True
local_partial_types = True
warn_unused_ignores = False
warn_return_any = False
disable_error_code = no-untyped-def, no-untyped-call, type-arg, misc, import-untyped
"""
"""Strict, but for the annotations that an example leaves out."""
UNAVOIDABLE = {
    "None": "a result that was asked for is there, and its type says that it may not be",
    r"\*\*dict": "settings in a dictionary of numbers",
    r'(expected|parameter "(input|tensors|other)" of type) "?(tuple\[)?Tensor': "a map in torch's own functions",
}


def by_mypy(folder: Path) -> list[str]:
    (folder / "mypy.ini").write_text(MYPY)
    flags = ["-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache"]
    program = [sys.executable, *flags, *(path.name for path in folder.glob("*.py"))]
    found = subprocess.run(program, cwd=folder, capture_output=True, text=True, env={"MYPYPATH": str(ROOT / "src")})
    assert found.returncode < 2, found.stdout[-2000:] + found.stderr[-2000:]
    return [line for line in found.stdout.splitlines() if ": error:" in line]


def faults(errors: list[str]) -> list[str]:
    classes = (one for tree in house.files().values() for one in tree.body if isinstance(one, ast.ClassDef))
    named = re.compile(rf"\b({'|'.join(sorted({one.name for one in classes if one.name[0].isupper()}))})\b")
    left = [one for one in errors if not any(re.search(known, one) for known in UNAVOIDABLE)]
    return [one for one in left if one.startswith("page_readme") or named.search(one.partition(" ")[2])]


@pytest.mark.slow
def test_examples_have_no_type_errors_of_ours(tmp_path: Path) -> None:
    assert len(write_modules(tmp_path)) > 190
    (tmp_path / "planted.py").write_text(
        "import regard, torch\n"
        "with regard.watch(torch.nn.Identity()) as seen: ...\n"
        "seen.calls_of('').top_keys(5)\n"
        "regard.attention(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), backend='fusde')\n"
        "seen.maps[0][..., 5, :].top_keys(5)\n"
        "(seen.maps[0] @ torch.ones(1, 1)).top_keys(5)\n"
        "seen.maps[0][0, 3, 100].top_keys(5)\n"
    )
    errors = by_mypy(tmp_path)
    assert {one.split(":")[1] for one in errors if one.startswith("planted")} == {*"34567"}
    assert faults([one for one in errors if not one.startswith("planted")]) == []
