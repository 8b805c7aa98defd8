"""Ten kills of the soak, in a process of its own: it forks, which a process that has computed should not."""

import subprocess
import sys

import pytest

from tests import ROOT


def test_ten_kills_lose_nothing() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.soak.soak", "--kills", "10", "--only", "transformer", "language-model"],
        cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" in ")[0] for line in lines if "nothing lost" in line] == [
        "transformer: 5 kills",
        "language-model: 5 kills",
    ]
    assert sum(int(line.split()[0]) for line in lines if line.startswith("  ")) == 10


# What a careless hand might do to the code; the soak must notice each.
FAULTS = {
    "random state forgotten": "import regard.training.loop as l; l.set_random_state = lambda *a: None",
    "named before it is complete": """
import regard.training.checkpoints as c
real = c.write_part
def early(folder, part, *rest):
    if part == "model" and folder.name == "last":
        for path in folder.glob("*.safetensors"): path.unlink()
    return real(folder, part, *rest)
c.write_part = early
""",
}


@pytest.mark.slow
@pytest.mark.parametrize("fault", FAULTS)
def test_the_soak_notices(fault: str) -> None:
    code = f"from tests.soak import soak\n{FAULTS[fault]}\nsoak.main()"
    done = subprocess.run(
        # As many as it takes: it ends at the first that shows the fault, and some kills are by the clock.
        [sys.executable, "-c", code, "--kills", "100", "--only", "transformer", "--seed", "3"],
        cwd=ROOT,
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode != 0
    assert "Error" in done.stderr
