"""The examples of the README and the pages run as they stand, from top to bottom."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli.main import run_command
from tests import ROOT
from tests.core import house
from tests.docs.examples import write_modules

PAGES = [
    "README.md",
    "docs/command-line.md",
    "docs/you-asked.md",
    "docs/convert.md",
    "docs/watching.md",
    "docs/kernels.md",
    "docs/editing.md",
    "docs/maps.md",
    "docs/linear.md",
    "docs/parts.md",
    "docs/pictures.md",
    "docs/losses.md",
    "docs/translate.md",
    *(f"docs/uses/{page.name}" for page in sorted((ROOT / "docs/uses").glob("*.md")) if page.name != "README.md"),
]

SHOWN = ("README.md", "docs/uses/audit.md")
NEEDS = {"docs/uses/atoms.md": "rxnmapper"}
"""Pages whose package is in an environment of its own, `make consumers`, where they run."""


# transformers calls what torch has deprecated; nothing of it is ours.
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("page", PAGES)
def test_the_examples_run(
    page: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    if page in NEEDS:
        pytest.importorskip(NEEDS[page], reason=f"make consumers ONLY={NEEDS[page]}")
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(tmp_path))
    monkeypatch.chdir(tmp_path)  # some write pictures where they are run
    text = (ROOT / page).read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", text, flags=re.DOTALL)
    assert code
    names: dict[str, object] = {}
    for block in code:
        exec(compile(block, page, "exec"), names)
    assert not [path.name for path in ROOT.glob("*.png")], "an example writes beside the README"
    if page in SHOWN:
        printed, shown = capsys.readouterr().out, re.findall(r"```text\n(.*?)```", text, flags=re.DOTALL)
        assert len(shown) == 2
        assert all(block in printed for block in shown), printed


@pytest.mark.parametrize("page", [page for page in PAGES if "/uses/" in page])
def test_a_page_of_a_use_is_one_script_and_is_listed(page: str) -> None:
    text, index = ((ROOT / name).read_text(encoding="utf-8") for name in (page, "docs/uses/README.md"))
    assert text.count("```python\n") == 1
    assert f"({Path(page).name})" in index


def test_the_page_for_newcomers_runs_by_itself() -> None:
    """In a process of its own: there no other test has imported what the page forgets to."""
    code = re.findall(
        r"```python\n(.*?)```", (ROOT / "docs/coming-from.md").read_text(encoding="utf-8"), flags=re.DOTALL
    )
    subprocess.run([sys.executable, "-c", "\n".join(code)], check=True)


@pytest.mark.parametrize(("page", "script"), [("kernels", "make_backends"), ("maps", "make_maps")])
def test_the_tables_are_current(page: str, script: str) -> None:
    code = compile((ROOT / f"docs/{script}.py").read_text(encoding="utf-8"), f"{script}.py", "exec")
    names: dict[str, object] = {"__name__": script, "__file__": str(ROOT / f"docs/{script}.py")}
    exec(code, names)
    assert names["page"]() == (ROOT / f"docs/{page}.md").read_text(encoding="utf-8")


def test_the_list_at_the_left_is_short_and_reaches_every_page() -> None:
    """At most 25 entries; design notes and pages of the project are folded under one each."""
    trees = re.compile(r"```\{toctree\}\n(.*?)```", re.DOTALL)

    def entries(page: Path) -> list[Path]:
        found: list[Path] = []
        for tree in trees.findall(page.read_text(encoding="utf-8")):
            names = [line for line in tree.splitlines() if line and not line.startswith(":")]
            found += [one for name in names for one in page.parent.glob(f"{name}.md") if one != page]
        return [one.resolve() for one in found]

    docs = ROOT / "docs"
    first = entries(docs / "index.md")
    assert len(first) <= 25
    reached, waiting = {docs / "index.md"}, first
    while waiting:
        reached |= set(waiting)
        waiting = [one for page in waiting for one in entries(page) if one not in reached]
    assert {page for page in docs.rglob("*.md") if "_extensions" not in page.parts} - reached == set()


def test_each_promise_on_security_names_tests_that_exist() -> None:
    rows = [line for line in (ROOT / "SECURITY.md").read_text().splitlines() if line.startswith("|")][2:]
    assert rows
    for row in rows:
        named = re.findall(r"`(tests/[^`]+\.py)`", row)
        assert named, row
        assert all((ROOT / name).is_file() for name in named), row


def test_the_flags_beside_those_of_other_toolkits_exist(capsys: pytest.CaptureFixture[str]) -> None:
    page = (ROOT / "docs/coming-from.md").read_text(encoding="utf-8").partition("## JoeyNMT")[2]
    ours = "".join(line.split(" | ", 1)[1] for line in page.splitlines() if line.startswith("| ") and " | " in line)
    named = set(re.findall(r"--[a-z][a-z.-]*[a-z]", ours))
    assert len(named) > 25
    known = ""
    for command in (("train", "translation", "--help-all"), ("translate", "--help-all"), ("evaluate", "--help-all")):
        assert run_command(list(command)) == 0
        known += capsys.readouterr().out
    assert {flag for flag in named if not re.search(rf"(?<![\w.-]){re.escape(flag)}(?![\w.-])", known)} == set()


def test_the_reference_groups_the_members_of_a_map() -> None:
    table = (ROOT / "docs/reference/maps.md").read_text(encoding="utf-8").partition("```")[0]
    named = re.findall(r"`(\w+)`", table.partition("| question |")[2])
    assert sorted(named) == [name for name in dir(regard.AttentionMap) if not name.startswith("_")]
    assert len(named) <= 42


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
    files = [path.name for path in folder.glob("*.py")]
    program = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "--cache-dir", "cache", *files]
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
    assert len(write_modules(tmp_path)) > 200
    (tmp_path / "planted.py").write_text(
        "import regard, torch\n"
        "with regard.watch(torch.nn.Identity()) as seen: ...\n"
        "seen.calls_of('').top_keys(5)\n"
        "regard.attention(torch.ones(1, 1), torch.ones(1, 1), torch.ones(1, 1), backend='fusde')\n"
        "seen.maps[0][..., 5, :].top_keys(5)\n"
        "(seen.maps[0] @ torch.ones(1, 1)).top_keys(5)\n"
    )
    errors = by_mypy(tmp_path)
    assert {one.split(":")[1] for one in errors if one.startswith("planted")} == {"3", "4", "5", "6"}
    assert faults([one for one in errors if not one.startswith("planted")]) == []
