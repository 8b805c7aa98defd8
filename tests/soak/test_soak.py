"""Kills of the soak, in processes that have computed nothing: the soak forks."""

import pytest

from tests import forked


def kills_between_events() -> None:
    """Between file events alone: these do not depend on how fast the machine is today."""
    from tests.soak import soak  # it imports what its children would

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(soak, "WAYS", ("event",))
        soak.main()


@pytest.mark.parametrize(
    ("function", "kinds", "kills"),
    [
        ("soak:main", ("transformer",), 2),
        pytest.param("soak:main", ("transformer", "language-model"), 4, marks=pytest.mark.slow),
        pytest.param("test_soak:kills_between_events", ("transformer",), 12, marks=pytest.mark.slow),
    ],
)
def test_kills_lose_nothing(function: str, kinds: tuple[str, ...], kills: int) -> None:
    done = forked.run("--kills", str(kills), "--only", *kinds, function=f"tests.soak.{function}")
    assert done.returncode == 0, done.stderr
    lines = [line.split(" in ")[0] for line in done.stdout.splitlines() if "nothing lost" in line]
    assert lines == [f"{kind}: {kills // len(kinds)} kills" for kind in kinds]
