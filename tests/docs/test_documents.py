"""The examples of the README and the pages run as they stand, from top to bottom."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli.main import run_command
from tests import ROOT

NAMES = "command-line you-asked convert watching kernels editing maps linear parts pictures page losses translate"
PAGES = [
    "README.md",
    *(f"docs/{name}.md" for name in NAMES.split()),
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


def test_the_figures_of_the_readme_are_those_of_the_tables_that_it_names() -> None:
    def figures(text: str) -> set[str]:
        return {one.replace(",", "") for one in re.findall(r"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?![\w-])", text)}

    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    before_a_link = r"([^|()]*(?:\([^()\[]*\)[^|()]*)*)\(\[[^\]]+\]\(([^)#]+)(?:#\w+)?\)"
    said = [(figures(text), page) for text, page in re.findall(before_a_link, readme)]
    assert sum(len(of) for of, _ in said) > 12
    missing = {page: of - figures((ROOT / page).read_text(encoding="utf-8")) for of, page in said if of}
    assert not any(missing.values()), missing


@pytest.mark.parametrize("page", [page for page in PAGES if "/uses/" in page])
def test_a_page_of_a_use_is_one_script_and_is_listed(page: str) -> None:
    text, index = ((ROOT / name).read_text(encoding="utf-8") for name in (page, "docs/uses/README.md"))
    assert text.count("```python\n") == 1
    assert f"({Path(page).name})" in index


def test_the_page_for_newcomers_and_the_names_of_the_readme_run_by_themselves() -> None:
    """In a process of its own: there no other test has imported a module that the pages forget."""
    page, readme = ((ROOT / name).read_text(encoding="utf-8") for name in ("docs/coming-from.md", "README.md"))
    names, code = re.findall(r"\bregard(?:\.\w+)+", readme), re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    subprocess.run([sys.executable, "-c", "\n".join(["import regard", *names, *code])], check=True)


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
