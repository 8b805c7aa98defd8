import json
import os
import shutil
import zlib
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from regard.errors import ArgumentError, RunFolderError
from regard.files.untrusted import open_tensors
from regard.tasks.training.checkpoints import (
    Checkpoints,
    Position,
    TrainingState,
    flatten_optimizer,
    get_random_state,
    seed_everything,
    set_random_state,
    unflatten_optimizer,
)
from regard.tasks.training.optimizers import adamw

POSITION = Position(step=7, epoch=2, batch=3, best_value=0.1 + 0.2, best_step=5, patience_used=1, loss_total=1 / 3)


def make_state(fill: float, position: Position = POSITION) -> TrainingState:
    return TrainingState(
        {"w": torch.full((30, 7), fill)}, {"w:step": torch.tensor(fill)}, {"torch": torch.ones(1)}, position
    )


@pytest.fixture
def saved(tmp_path: Path) -> Checkpoints:
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(make_state(1.0))
    return checkpoints


def rewrite(path: Path, **changes: Any) -> None:
    with open_tensors(path) as file:
        tensors = {name: file.get_tensor(name).clone() for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        about = json.dumps(json.loads(file.metadata()["regard"]) | changes)
    save_file(tensors, path, {"regard": about, "crc32": f"{zlib.crc32(about.encode()):08x}"})


def test_a_checkpoint_is_one_file_that_keeps_every_bit(saved: Checkpoints) -> None:
    saved.save_last(make_state(2.0))
    assert [path.name for path in saved.folder.iterdir()] == ["last.safetensors"]
    state = saved.load_last()
    assert state.position == POSITION
    assert torch.equal(state.model["w"], torch.full((30, 7), 2.0))
    assert torch.equal(state.optimizer["w:step"], torch.tensor(2.0))
    assert (saved.has("last"), saved.has("best")) == (True, False)
    assert set(load_file(saved.path("last"))) == {"model/w", "optimizer/w:step", "random/torch"}


def test_a_flipped_bit_anywhere(saved: Checkpoints) -> None:
    """Of tensors, their names and kinds, the position and the checksums: an error, or the same state."""
    path, right = saved.path("last"), saved.load_last()
    whole = path.read_bytes()
    right_bits = [{name: value.clone() for name, value in part.items()} for part in right[:3]]
    errors = 0
    for place in [*range(0, len(whole), 3), len(whole) - 5]:
        content = bytearray(whole)
        content[place] ^= 1 << place % 8
        path.write_bytes(content)
        try:
            found = saved.load_last()
        except RunFolderError:
            errors += 1
            continue
        assert found.position == right.position
        for part, expected in zip(found[:3], right_bits, strict=True):
            assert part.keys() == expected.keys()
            assert all(torch.equal(part[name], value) for name, value in expected.items())
    assert errors > len(whole) // 3 - 20  # all but a few blanks of the header


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"format": 99}, "expected format 2, got 99"),
        ({"position": {}}, "position has not the fields"),
        ({"position": [3]}, "position has not the fields"),
        ({"position": asdict(POSITION) | {"colour": 3}}, "position has not the fields"),
        *(({"position": asdict(POSITION) | {name: -1}}, f"{name} must be a number of 0 or more, got -1")
          for name in ("epoch", "batch", "step", "loss_count")),
        ({"crc32": {}}, "the list of tensors has not the checksum"),
        ({"crc32": ["model/w"]}, "the list of tensors"),
        ({"aliases": 3}, "holds something else"),
        ({"aliases": {"model/b": "model/absent"}}, "does not contain tensor model/absent"),
        ({"aliases": {"model/b": ["model/w"]}}, "holds something else"),
    ],
)  # fmt: skip
def test_a_header_of_somebody_else(saved: Checkpoints, changes: dict[str, Any], message: str) -> None:
    rewrite(saved.path("last"), **changes)
    with pytest.raises(RunFolderError, match=message):
        saved.load_last()


def test_files_of_other_programs(saved: Checkpoints) -> None:
    """Tensors without a position; a pickle, which is not opened; a model alone, in the place of a whole state."""
    path = saved.path("last")
    save_file({"model/w": torch.ones(2)}, path)
    with pytest.raises(RunFolderError, match="is no checkpoint of regard's"):
        saved.load_last()
    path.write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/owned'\ntR.")
    with pytest.raises(RunFolderError, match="not a whole safetensors file"):
        saved.load_last()
    saved.save_model("last", {"w": torch.ones(2)}, POSITION)
    with pytest.raises(RunFolderError, match="holds a model and no state of training"):
        saved.load_last()


@pytest.mark.parametrize("fatal", range(3))
def test_death_at_any_write_leaves_a_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fatal: int) -> None:
    """Whichever rename or sync is the last thing that happens, old or new is whole."""
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save_last(make_state(1.0))
    frozen = tmp_path.with_name("frozen")
    shutil.rmtree(frozen, ignore_errors=True)
    calls = 0

    class Killed(BaseException):
        pass

    def count(real: Callable[..., Any]) -> Callable[..., Any]:
        def wrapped(*arguments: Any) -> Any:
            nonlocal calls
            calls += 1
            if calls == fatal + 1:  # what a kill would leave: the folder as it is now
                shutil.copytree(tmp_path, frozen)
                raise Killed
            return real(*arguments)

        return wrapped

    monkeypatch.setattr(os, "fsync", count(os.fsync))
    monkeypatch.setattr(os, "replace", count(os.replace))
    with pytest.raises(Killed):
        checkpoints.save_last(make_state(2.0, Position(step=8)))
    state = Checkpoints(frozen).load_last()
    assert (state.position.step, float(state.model["w"][0, 0])) in [(7, 1.0), (8, 2.0)]


def test_tied_and_viewed_tensors(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path)
    shared, large = torch.arange(6.0), torch.arange(100.0)
    checkpoints.save_model("best", {"a": shared, "b": shared, "c": large[10:20], "d": large[15:25]}, Position())
    loaded = checkpoints.load_model("best")
    assert torch.equal(loaded["b"], shared)
    assert torch.equal(loaded["c"], large[10:20])
    assert torch.equal(loaded["d"], large[15:25])
    with open_tensors(checkpoints.path("best")) as file:
        assert sorted(file.keys()) == ["model/a", "model/c", "model/d"]
    assert checkpoints.path("best").stat().st_size < 1200


def test_optimizer_state_of_other_parameters() -> None:
    optimizer = adamw(nn.Linear(2, 2))
    with pytest.raises(RunFolderError, match="it has state for other"):
        unflatten_optimizer({"other:step": torch.ones(1)}, optimizer.state_dict(), source=Path("here"))
    unnamed = torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=1.0)
    with pytest.raises(ArgumentError, match="need names"):
        flatten_optimizer(unnamed.state_dict())


def test_every_generator_comes_back() -> None:
    import random

    import numpy as np

    def draw() -> list[float]:
        return [float(torch.rand(1)), np.random.rand(), np.random.randn(), random.random(), random.gauss(0, 1)]

    seed_everything(11)
    draw()  # both Gaussian generators now hold a second number back
    device = torch.device("cpu")
    state = get_random_state(device)
    first = draw()
    set_random_state(state, device)
    assert draw() == first
    seed_everything(11, rank=1)
    assert draw() != first
