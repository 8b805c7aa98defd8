"""Muon as a setting of a run: it changes the weights, and runs resume."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from regard.errors import ArgumentError
from tests.tasks.small_runs import changed, small_config
from tests.training.test_attention_log import RUNS, tensors_of

SOME_DROPOUT: dict[str, Any] = {"translation": "transformer", "recurrent translation": "rnn"}


def settings(task: str, folder: Path, **changes: Any) -> Any:
    """A run of four steps with dropout in its model."""
    folder.mkdir()
    config = RUNS[task][0](folder, steps=4, validate_every=2, save_every=2)
    part = SOME_DROPOUT.get(task, "model")
    return replace(config, **{part: replace(getattr(config, part), dropout=0.2)}, **changes)


@pytest.mark.parametrize(
    ("task", "options"),
    [
        ("recurrent translation", {"optimizer": "muon"}),
        ("translation", {"optimizer": "muon", "muon_rate": 2.0}),
        ("language model", {"optimizer": "muon"}),
    ],
)
def test_a_run_is_another_and_resumes_bit_for_bit(task: str, options: dict[str, Any], tmp_path: Path) -> None:
    found = []
    for name in ("plain", "whole", "parted"):
        config = settings(task, tmp_path / name, **{} if name == "plain" else options)
        for steps in (1, 4) if name == "parted" else (4,):
            RUNS[task][1](changed(config, steps=steps), resume=True)
        found.append(tensors_of(config.out))
    plain, whole, parted = found
    assert parted == whole
    weights = [name for name in whole if name.startswith("last/model")]
    assert weights
    assert any(plain[name] != whole[name] for name in weights)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"muon_rate": 0.0, "optimizer": "muon"}, r"muon_rate must be above 0, got 0\.0"),
        ({"muon_rate": 2.0}, "muon_rate is for --optimizer muon, and this is adamw"),
        ({"muon_rate": 1e300, "optimizer": "muon"}, r"muon_rate must be at most 1e\+18, got 1e\+300"),
    ],
)
def test_what_makes_no_sense_is_refused(changes: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=message):
        small_config(tmp_path, **changes)
