"""Trainings that ranks share: the losses of one rank, checkpoints that any number of ranks goes on from."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.tasks.training.checkpoints import Checkpoints, open_checked
from tests.forked import run_ranks
from tests.training.many_ranks import train


def launch(ranks: int, *jobs: dict[str, Any]) -> None:
    for done in run_ranks(ranks, json.dumps(jobs, default=str), function="tests.training.many_ranks:main"):
        assert done.returncode == 0, done.stderr[-5000:]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs")
    train(folder / "one", steps=8)
    shutil.copytree(folder / "one", folder / "one-8")
    train(folder / "one", steps=12)
    launch(
        4,
        {"folder": folder / "four-8", "steps": 8},
        {"folder": folder / "four", "copy_of": folder / "four-8", "steps": 12},
        {"folder": folder / "four-after-one", "copy_of": folder / "one-8", "steps": 12},
    )
    return folder


@pytest.fixture(scope="module")
def pairs(runs: Path) -> Path:
    launch(
        2,
        {"folder": runs / "two-after-four", "copy_of": runs / "four-8", "steps": 12},
        {"folder": runs / "dropping", "steps": 8, "dropout": 0.3},
        {"folder": runs / "dropping-4", "steps": 4, "dropout": 0.3},
        {"folder": runs / "dropping-4", "steps": 8, "dropout": 0.3},
        {"folder": runs / "full", "copy_of": runs / "four-8", "steps": 12, "act": "full disk"},
    )
    return runs


def records(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def check_same(ours: Path, theirs: Path) -> None:
    for one, other in zip(records(ours), records(theirs), strict=True):
        assert (one["event"], one["step"]) == (other["event"], other["step"])
        assert abs(one["loss"] - other["loss"]) < 1e-5
        assert one.get("gradient_norm", 0) == pytest.approx(other.get("gradient_norm", 0), rel=1e-5)
    mine, other_state = Checkpoints(ours).load_last(), Checkpoints(theirs).load_last()
    assert mine.position.step == other_state.position.step
    for part in ("model", "optimizer", "average"):
        a, b = getattr(mine, part), getattr(other_state, part)
        assert set(a) == set(b)
        assert max(float((a[name] - b[name]).abs().max()) for name in a) < 1e-5
    best = Checkpoints(ours).load_model("best"), Checkpoints(theirs).load_model("best")
    assert max(float((best[0][name] - best[1][name]).abs().max()) for name in best[0]) < 1e-5


@pytest.mark.parametrize("name", ["four", "four-after-one"])
def test_four_ranks_train_as_one(runs: Path, name: str) -> None:
    """In one go with a stop, and from a checkpoint of one rank: clipping, tied weights and the average are right."""
    check_same(runs / name, runs / "one")


def test_two_ranks_go_on_from_four(pairs: Path) -> None:
    check_same(pairs / "two-after-four", pairs / "one")


def test_one_rank_goes_on_from_four(runs: Path, tmp_path: Path) -> None:
    shutil.copytree(runs / "four-8", tmp_path / "run")
    train(tmp_path / "run", steps=12)
    check_same(tmp_path / "run", runs / "one")


def test_the_first_rank_writes_and_tied_weights_once(runs: Path) -> None:
    with open_checked(Checkpoints(runs / "four").path("last")) as file:
        tied = {f"{part}/out.weight": f"{part}/embedding.weight" for part in ("model", "average")}
        assert file.record["aliases"] == tied
    assert not [path.name for path in (runs / "four").glob("*.safetensors") if path.stem not in ("best", "last")]


def test_stopped_and_gone_on_with_by_as_many_ranks_is_the_same_to_the_bit(pairs: Path) -> None:
    """With dropout: every rank has its random state back."""
    ours, theirs = records(pairs / "dropping-4"), records(pairs / "dropping")
    assert [(r["step"], r["loss"]) for r in ours] == [(r["step"], r["loss"]) for r in theirs]
    assert len(ours) == 10
    a, b = (Checkpoints(pairs / name).load_last() for name in ("dropping-4", "dropping"))
    for part in ("model", "optimizer", "average"):
        assert all(torch.equal(getattr(a, part)[name], value) for name, value in getattr(b, part).items())
    assert not torch.equal(a.random["torch"][0], a.random["torch"][1])


def test_a_full_disk_of_the_first_rank_stops_all_and_loses_nothing(pairs: Path) -> None:
    told = [(pairs / "full" / f"told-{rank}.txt").read_text() for rank in range(2)]
    assert all("No space left on device" in one for one in told)
    assert ["on rank 0" in one for one in told] == [False, True]
    state, before = (Checkpoints(pairs / name).load_last() for name in ("full", "four-8"))
    assert state.position.step == 8
    assert all(torch.equal(value, state.model[name]) for name, value in before.model.items())
