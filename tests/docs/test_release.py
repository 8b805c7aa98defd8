"""A release can be trusted: its workflows are pinned, its metadata agree, and a wrong tag is refused."""

import os
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from regard import __version__
from tests import ROOT, package

WORKFLOWS = sorted((ROOT / ".github/workflows").glob("*.yml"))
RELEASE = runpy.run_path(str(ROOT / ".github/release.py"))
PYPROJECT = (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def test_every_job_has_an_end() -> None:
    jobs = [job for path in WORKFLOWS for job in yaml.safe_load(path.read_text())["jobs"].values()]
    assert [job for job in jobs if job["timeout-minutes"] > 120] == []


@pytest.mark.slow
def test_the_action_fails_the_job_for_a_wrong_mask(tmp_path: Path) -> None:
    action = yaml.safe_load((ROOT / "action.yml").read_text())
    step = action["runs"]["steps"][-1]
    assert {f"${{{{ inputs.{name} }}}}" for name in action["inputs"]} == set(step["env"].values())
    (tmp_path / "theirs.py").write_text(
        "import torch\n"
        "class Model(torch.nn.Module):\n"
        "    def forward(self, x):\n"
        "        return torch.nn.functional.scaled_dot_product_attention(x, x, x)\n"
        "def small():\n"
        "    return Model(), torch.randn(2, 6, 4)\n"
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    for causal, status, said in (("", 2, "tell causal="), ("false", 0, "nothing found"), ("true", 1, "error")):
        done = subprocess.run(
            ("bash", "-eo", "pipefail", "-c", step["run"]), cwd=tmp_path, capture_output=True, text=True,
            env=os.environ | {"PATH": path, "MODEL": "theirs:small", "CAUSAL": causal},
        )  # fmt: skip
        assert (done.returncode, said in done.stdout) == (status, True), done.stdout + done.stderr


def test_a_release_needs_its_own_tag_and_a_date(tmp_path: Path) -> None:
    (tmp_path / "src/regard").mkdir(parents=True)
    (tmp_path / "src/regard/version.py").write_text('__version__ = "1.2.3"\n')
    changes = tmp_path / "CHANGELOG.md"
    changes.write_text("# Changelog\n\n## 1.2.3 - unreleased\n")
    assert "expected the tag v1.2.3" in RELEASE["refusal"]("v1.2.4", tmp_path)
    assert "write the day of the release" in RELEASE["refusal"]("v1.2.3", tmp_path)
    changes.write_text("# Changelog\n\n## 1.2.3 - 2027-01-31\n")
    assert RELEASE["refusal"]("v1.2.3", tmp_path) is None


def test_the_addresses_of_a_release_are_those_of_its_repository() -> None:
    project = tomllib.loads(PYPROJECT + RELEASE["urls"]("https://host/owner/name"))["project"]
    assert project["urls"]["Issues"] == "https://host/owner/name/issues"
    assert all(url.startswith("https://host/owner/name") for url in project["urls"].values())


def test_the_recipe_and_the_citation_say_what_the_package_says() -> None:
    project = tomllib.loads(PYPROJECT)["project"]
    recipe = yaml.safe_load((ROOT / "recipe/recipe.yaml").read_text())
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert recipe["context"]["version"] == citation["version"] == __version__
    run = [line.replace("pytorch", "torch").replace(" ", "") for line in recipe["requirements"]["run"]]
    assert run == [f"python{project['requires-python']}", *project["dependencies"]]
    assert recipe["about"]["summary"] == project["description"]
    assert recipe["about"]["license"] == project["license"] == citation["license"]


def test_classifiers_name_the_pythons_that_the_workflow_tests() -> None:
    classifiers = tomllib.loads(PYPROJECT)["project"]["classifiers"]
    named = [line.rpartition(" ")[2] for line in classifiers if re.search(r":: 3\.\d+$", line)]
    jobs = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())["jobs"]
    assert named == jobs["test"]["strategy"]["matrix"]["python-version"] == ["3.11", "3.12", "3.13", "3.14"]


PROJECT_FILE = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
DATA = PROJECT_FILE["tool"]["setuptools"]["package-data"]["regard"]


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
    project = PROJECT_FILE["project"]
    assert [(ROOT / name).is_file() for name in project["license-files"]] == [True]
    assert project["scripts"] == {"regard": "regard.cli.main:program"}
    # setuptools packs folders that have an __init__.py.
    folders = {(ROOT / "src" / "regard" / name).parent for name in package.sources()}
    assert [str(folder) for folder in folders if not (folder / "__init__.py").is_file()] == []


def test_the_table_of_extras_is_that_of_the_package() -> None:
    extras = PROJECT_FILE["project"]["optional-dependencies"]
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = page.partition("| extra |")[2].partition("\n\n")[0]
    assert re.findall(r"^\| `(\w+)` \|", table, re.M) == list(extras)
