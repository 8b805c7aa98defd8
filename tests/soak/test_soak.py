"""Four kills of the soak, and faults that it must notice, in processes that have computed nothing: the soak forks."""

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests import forked


def test_kills_lose_nothing() -> None:
    done = forked.run("--kills", "4", "--only", "transformer", "language-model", function="tests.soak.soak:main")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split(" in ")[0] for line in lines if "nothing lost" in line] == [
        "transformer: 2 kills",
        "language-model: 2 kills",
    ]
    assert sum(int(line.split()[0]) for line in lines if line.startswith("  ")) == 4


# -- what a careless hand might do to the code ------------------------------------------------------------------


def the_random_state_is_forgotten() -> None:
    with patch("regard.tasks.training.loop.set_random_state"):
        _soak_by_events()


def the_old_checkpoint_goes_before_the_new_one() -> None:
    from regard.tasks.training import checkpoints

    real = vars(checkpoints)["write_tensors"]

    def early(path: Path, *rest: Any) -> Any:
        path.unlink(missing_ok=True)
        return real(path, *rest)

    with patch.object(checkpoints, "write_tensors", early):
        _soak_by_events()


def _soak_by_events() -> None:
    """Kills between file events alone: these do not depend on how fast the machine is today."""
    from tests.soak import soak

    with patch.object(soak, "WAYS", ("event",)):
        soak.main()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "seed", "said"),
    [
        ("the_random_state_is_forgotten", 0, "differ from the undisturbed run's"),
        ("the_old_checkpoint_goes_before_the_new_one", 0, ": had Seen("),
    ],
)
def test_the_soak_notices(fault: str, seed: int, said: str) -> None:
    kills = ("--kills", "3", "--only", "transformer", "--seed", str(seed))
    done = forked.run(*kills, function=f"tests.soak.test_soak:{fault}")
    assert done.returncode != 0
    assert said in done.stderr
