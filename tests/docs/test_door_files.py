"""What strangers meet first: the files by which they cite, report and contribute."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
FORMS = sorted((ROOT / ".github/ISSUE_TEMPLATE").glob("*.yml"))


def test_the_command_of_the_bug_form_prints_the_versions() -> None:
    form = (ROOT / ".github/ISSUE_TEMPLATE/bug.yml").read_text(encoding="utf-8")
    command = re.search(r'python -c "(.*)"', form)
    assert command is not None
    told = subprocess.run([sys.executable, "-c", command[1]], capture_output=True, text=True, check=True).stdout
    assert re.search(r"^regard \d", told)
    assert "PyTorch version: " in told


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.name)
def test_every_question_of_a_form_has_a_name_of_its_own(form: Path) -> None:
    content = yaml.safe_load(form.read_text(encoding="utf-8"))
    if form.name == "config.yml":
        return
    assert {"name", "description", "body"} <= set(content)
    ids = [question["id"] for question in content["body"]]
    assert len(ids) == len(set(ids))
    assert all(question["attributes"]["label"] for question in content["body"])


def test_the_workflow_and_the_hook_run_targets_that_the_makefile_has() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    targets = set(re.findall(r"^([a-z]+):", makefile, flags=re.MULTILINE))
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    commands = [step["run"] for job in workflow["jobs"].values() for step in job["steps"] if "run" in step]
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    commands += [hook["entry"] for repository in hooks["repos"] for hook in repository["hooks"]]
    made = [command for command in commands if command.startswith("make ")]
    assert sorted(made) == [
        'make compat ONLY="py3.11-$ROW"', "make light", "make lint", "make lint", "make package", "make test",
    ]  # fmt: skip
    assert {command.split()[1] for command in made} <= targets
    # Windows has no make: there the tests are named one by one, and the folders must be there.
    folders = [word for command in commands for word in command.split() if word.startswith("tests/")]
    assert folders
    assert all((ROOT / folder).is_dir() for folder in folders)


def test_the_workflow_runs_every_python_that_the_package_names() -> None:
    workflow = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text(encoding="utf-8"))
    named = re.findall(r'"Programming Language :: Python :: (3\.\d+)"', (ROOT / "pyproject.toml").read_text("utf-8"))
    assert set(named) <= set(workflow["jobs"]["test"]["strategy"]["matrix"]["python-version"])
