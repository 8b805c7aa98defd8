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
    ("make", "part", "train", "more"),
    [
        (small_config, "transformer", run_translation, {"muon_rate": 2.0}),
        (small_config, "rnn", run_translation, {"model": "rnn"}),
        (text_config, "model", run_language_model, {}),
    ],
)
def test_a_run_is_another_and_resumes_bit_for_bit(
    make: Callable[..., Any], part: str, train: Callable[..., Any], more: dict[str, Any], tmp_path: Path
) -> None:
    """Runs of four steps with dropout in their model."""
    found = []
    for name in ("plain", "whole", "parted"):
        (tmp_path / name).mkdir()
        options = {name: value for name, value in more.items() if name == "model"} if name == "plain" else more
        config = make(
            tmp_path / name, steps=4, validate_every=2, save_every=2, optimizer="adamw" if name == "plain" else "muon",
            **options,
        )  # fmt: skip
        config = replace(config, **{part: replace(getattr(config, part), dropout=0.2)})
        for steps in (1, 4) if name == "parted" else (4,):
            train(changed(config, steps=steps), resume=True)
        found.append(tensors_of(config.out))
    plain, whole, parted = found
    assert parted == whole
    weights = [name for name in whole if name.startswith("last/model")]
    assert weights
    assert any(plain[name] != whole[name] for name in weights)
