"""The lists of faults fit the code as it is, and planting one tells what the tests see and leaves nothing behind."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests import ROOT
from tests.faults import plant
from tests.faults.plant import Fault

FAULTS = plant.listed()
CODE = "def successor(x):\n    return x + 1\n"


def test_every_fault_fits_the_code() -> None:
    texts = {file: (ROOT / file).read_text(encoding="utf-8") for file in {fault.file for fault in FAULTS}}
    counts = {fault.name: texts[fault.file].count(fault.old) for fault in FAULTS}
    assert {name: count for name, count in counts.items() if count != 1} == {}, "these texts are not there exactly once"
    assert [fault.name for fault in FAULTS if fault.old == fault.new or not fault.why or not fault.tests] == []
    for fault in FAULTS:
        if fault.file.endswith(".py"):
            compile(texts[fault.file].replace(fault.old, fault.new), fault.name, "exec")
    assert len(FAULTS) > 80


def test_the_tests_that_should_see_a_fault_exist() -> None:
    for test in sorted({test for fault in FAULTS for test in fault.tests}):
        file, _, name = test.partition("::")
        text = (ROOT / file).read_text(encoding="utf-8") if (ROOT / file).is_file() else ""
        wanted = rf"^def {re.escape(name.partition('[')[0])}\(" if name else r"^def test_|>>> "
        assert re.search(wanted, text, re.MULTILINE), test


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A project of one function and one test, which leaves out negative numbers."""
    files = {
        "pyproject.toml": "[tool.pytest.ini_options]\naddopts = '-q'\n",
        "conftest.py": "import hypothesis\nhypothesis.settings.register_profile('first failure')\n",
        "src/code.py": CODE,
        "tests/test_code.py": "from src.code import successor\ndef test_successor(): assert successor(1) == 2\n",
    }
    for name, text in files.items():
        (tmp_path / "project" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "project" / name).write_text(text)
    return tmp_path / "project"


def fault(name: str, new: str, old: str = "x + 1") -> Fault:
    return Fault(name, "src/code.py", old, new, ["tests/test_code.py"], "it would be wrong")


def test_each_fault_is_planted_alone_and_only_in_a_copy(
    project: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plant, "LONGEST_S", 20.0)
    faults = [
        fault("of the sign", "x - 1"),
        fault("of negative numbers", "abs(x) + 1"),
        fault("of no text", "x", old="y + 1"),
        fault("of no module", "x + 1\nimport absent"),
        fault("of the size", "x + 2"),  # of as many bytes, and in the same second
    ]
    assert not asyncio.run(plant.plant(project, faults))
    said = capsys.readouterr().out
    verdicts = {name: verdict for verdict, name in re.findall(r"^(\w+) +[\d.]+ s  ([^:]+):", said, re.MULTILINE)}
    assert verdicts == {
        "of the sign": "seen",
        "of negative numbers": "missed",
        "of no text": "broken",
        "of no module": "broken",
        "of the size": "seen",
    }
    assert "tests/test_code.py::test_successor" in said
    assert said.endswith("2 seen, 1 missed, 2 broken\n")
    assert (project / "src/code.py").read_text() == CODE


def test_nothing_is_planted_where_the_tests_fail_anyway(project: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (project / "src/code.py").write_text(CODE.replace("+ 1", "+ 1 + 0 * successor.absent"))
    assert not asyncio.run(plant.plant(project, [fault("of the sign", "x - 1")]))
    said = capsys.readouterr().out
    assert "The tests do not pass as the tree is: no fault was planted." in said
    assert "of the sign" not in said


def test_an_interrupt_leaves_neither_a_copy_nor_a_process(project: Path, tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    waits = f"import os, time; open({str(mark)!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    (project / "src/code.py").write_text(f"{waits}\n{CODE}")
    code = f"""
import asyncio
from pathlib import Path
from tests.faults import plant
faults = [plant.Fault("x", "src/code.py", "x + 1", "x", ["tests/test_code.py"], "")]
asyncio.run(plant.plant(Path({str(project)!r}), faults))
"""
    (tmp_path / "place").mkdir()
    process = subprocess.Popen(
        [sys.executable, "-c", code], cwd=ROOT, env={**os.environ, "TMPDIR": str(tmp_path / "place")},
        stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    deadline = time.monotonic() + 60
    while not (mark.exists() and mark.read_text()):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGINT)
    assert process.wait(timeout=30) != 0
    assert list((tmp_path / "place").iterdir()) == []
    with pytest.raises(ProcessLookupError):
        os.kill(int(mark.read_text()), 0)
