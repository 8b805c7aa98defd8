"""Muon as a setting of a run: it changes the weights, and runs resume."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from regard.tasks.language_modelling.train import run_language_model
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.train import run_translation
from tests.tasks.small_runs import changed, small_config
from tests.tasks.test_language_model import small_config as text_config

RUNS: dict[str, tuple[Callable[..., Any], dict[str, Any], Callable[..., str]]] = {
    "transformer": (small_config, {}, run_translation),
    "rnn": (small_config, {"model": "rnn"}, run_translation),
    "model": (text_config, {}, run_language_model),
}
"""By the setting with the sizes of the model."""


def settings(part: str, folder: Path, **changes: Any) -> Any:
    """A run of four steps with dropout in its model."""
    folder.mkdir()
    make, more, _ = RUNS[part]
    config = make(folder, steps=4, validate_every=2, save_every=2, **more)
    return replace(config, **{part: replace(getattr(config, part), dropout=0.2)}, **changes)


def tensors_of(folder: Path) -> dict[str, bytes]:
    """The bits of all tensors of the checkpoints, but for Python's generator: beartype draws from it in tests."""
    paths = (Checkpoints(folder).path(which) for which in ("best", "last"))
    return {
        f"{path.stem}/{name}": tensor.numpy().tobytes()
        for path in paths
        for name, tensor in load_file(path).items()
        if not name.startswith("random/python")
    }


@pytest.mark.parametrize(
    ("part", "options"),
    [
        ("rnn", {"optimizer": "muon"}),
        ("transformer", {"optimizer": "muon", "muon_rate": 2.0}),
        ("model", {"optimizer": "muon"}),
    ],
)
def test_a_run_is_another_and_resumes_bit_for_bit(part: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name in ("plain", "whole", "parted"):
        config = settings(part, tmp_path / name, **{} if name == "plain" else options)
        for steps in (1, 4) if name == "parted" else (4,):
            RUNS[part][2](changed(config, steps=steps), resume=True)
        found.append(tensors_of(config.out))
    plain, whole, parted = found
    assert parted == whole
    weights = [name for name in whole if name.startswith("last/model")]
    assert weights
    assert any(plain[name] != whole[name] for name in weights)
