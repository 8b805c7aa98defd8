"""The page's script under node's own test runner and eslint: `make browser` installs eslint."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NODE = shutil.which("node") or ""
ESLINT = ROOT / "node_modules/eslint/bin/eslint.js"

pytestmark = pytest.mark.skipif(not NODE, reason="node is not installed: the page's script is not tested by itself")


def ran(*command: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([NODE, *map(str, command)], cwd=ROOT, capture_output=True, text=True)


def test_the_script_passes_its_own_tests() -> None:
    files = sorted((ROOT / "tests/views/script").glob("*.test.js"))
    assert files
    done = ran("--test", *files)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
    assert "# pass 0" not in done.stdout


@pytest.mark.skipif(not ESLINT.is_file(), reason="eslint is not installed: `make browser` installs it")
def test_eslint_finds_nothing(tmp_path: Path) -> None:
    # Only the folders that hold scripts: in the others, tests that run beside this one make and remove folders, and
    # eslint fails where one is gone before it is read.
    done = ran(ESLINT, "eslint.config.js", "src/regard/views", "tests/views/script")
    assert done.returncode == 0, done.stdout + done.stderr
    # It does read these files: a variable that nothing uses is found in a copy of one.
    copy = tmp_path / "src/regard/views/html/page_numbers.js"
    copy.parent.mkdir(parents=True)
    source = ROOT / "src/regard/views/html/page_numbers.js"
    copy.write_text(f"{source.read_text(encoding='utf-8')}\nconst unused = 1;\n", encoding="utf-8")
    planted = subprocess.run(
        [NODE, str(ESLINT), "--config", str(ROOT / "eslint.config.js"), str(copy)],
        cwd=tmp_path, capture_output=True, text=True,
    )  # fmt: skip
    assert "no-unused-vars" in planted.stdout, planted.stdout + planted.stderr
