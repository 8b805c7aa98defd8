"""Which precision "auto" means: the same on all ranks and for the whole of a run."""

from pathlib import Path

import pytest
import torch

from regard.tasks import train_translation
from regard.tasks.runs import run
from regard.tasks.training import distributed as devices
from regard.tasks.training.distributed import agreed_precision, choose_precision
from tests.tasks.small_runs import changed, small_config

CPU = torch.device("cpu")


@pytest.mark.parametrize(("amx", "expected"), [(True, "bf16"), (False, "float32")])
def test_auto_takes_bf16_by_tiles_alone(monkeypatch: pytest.MonkeyPatch, amx: bool, expected: str) -> None:
    monkeypatch.setattr(devices, "has_amx", lambda: amx)
    assert choose_precision("auto", CPU) == expected


def test_all_ranks_take_the_answer_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(answer: torch.Tensor, source: int) -> None:
        assert source == 0
        answer.fill_(1)

    monkeypatch.setattr(devices, "has_amx", lambda: False)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert agreed_precision("auto", CPU) == "float32"  # they cannot speak yet
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    monkeypatch.setattr(torch.distributed, "broadcast", broadcast)
    assert agreed_precision("auto", CPU) == "bf16"
    assert choose_precision("auto", CPU) == "float32"  # a translator on one rank waits for no other


def test_a_run_keeps_its_precision(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A run that goes on asks neither the processor nor the file of the machine again."""
    config = small_config(tmp_path, precision="auto", steps=3)
    monkeypatch.setattr(run, "agreed_precision", lambda *_: "bf16")
    train_translation(config)
    assert 'precision = "bf16"' in (config.out / "run.toml").read_text()
    monkeypatch.setattr(run, "agreed_precision", lambda *_: "float32")
    train_translation(changed(config, steps=4), resume=True)
    assert 'precision = "bf16"' in (config.out / "run.toml").read_text()
