"""What an installation has that is no Python: the page, its script and its style, and the mark for type checkers."""

import re
import tomllib

from tests import ROOT, package

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = PYPROJECT["tool"]["setuptools"]["package-data"]["regard"]


def test_all_that_is_no_python_is_packed() -> None:
    home = ROOT / "src" / "regard"
    packed = {path.relative_to(home).as_posix() for pattern in DATA for path in home.glob(pattern)}
    others = {name for name in package.sources() if not name.endswith(".py")}
    assert others - packed == set()
    assert {
        "py.typed",
        "views/html/page.js",
        "views/html/page.css",
        "views/widget/widget.js",
        "serving/live/live.html",
    } <= packed


def test_a_licence_a_command_and_every_package_are_packed() -> None:
    project = PYPROJECT["project"]
    assert [(ROOT / name).is_file() for name in project["license-files"]] == [True]
    assert project["scripts"] == {"regard": "regard.cli.main:program"}
    # setuptools packs folders that have an __init__.py.
    folders = {(ROOT / "src" / "regard" / name).parent for name in package.sources()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_table_of_extras_is_that_of_the_package() -> None:
    extras = PYPROJECT["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = page.partition("| extra |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(extras)
