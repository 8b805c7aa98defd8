"""Which precision "auto" means: the faster one by measurement, the same on all ranks and for the whole of a run."""

from pathlib import Path

import pytest
import torch

from regard.storage.choices import Choices
from regard.tasks import train_translation
from regard.tasks.runs import run
from regard.training.distributed import devices
from regard.training.distributed.devices import agreed_precision, choose_precision
from tests.tasks.small_runs import changed, small_config

CPU = torch.device("cpu")
KIND = "training, 128 x 512 -> 512, threads: 1"


def _processor(monkeypatch: pytest.MonkeyPatch, *, amx: bool, vectors: bool) -> None:
    monkeypatch.setattr(devices, "has_amx", lambda: amx)
    monkeypatch.setattr(devices, "has_avx512_bf16", lambda: vectors)


def _times(monkeypatch: pytest.MonkeyPatch, **times: float) -> None:
    found = Choices(None, budget_s=0.0)
    if times:
        found.known[KIND] = times
    monkeypatch.setattr(devices, "choices", lambda: found)


@pytest.mark.parametrize(
    ("amx", "vectors", "times", "expected"),
    [
        (True, True, {"float32": 1.0, "bf16": 2.0}, "bf16"),  # tiles are not asked
        (False, False, {"float32": 2.0, "bf16": 1.0}, "float32"),  # emulated
        (False, True, {"float32": 2.0, "bf16": 1.0}, "bf16"),
        (False, True, {"float32": 1.0, "bf16": 2.0}, "float32"),
        (False, True, {}, "float32"),  # nothing may be measured
    ],
)
def test_auto_is_what_is_faster(
    monkeypatch: pytest.MonkeyPatch, amx: bool, vectors: bool, times: dict[str, float], expected: str
) -> None:
    _processor(monkeypatch, amx=amx, vectors=vectors)
    _times(monkeypatch, **times)
    assert choose_precision("auto", CPU) == expected


def test_both_are_timed_once_and_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    _processor(monkeypatch, amx=False, vectors=True)
    found = Choices(tmp_path / "products.json")
    monkeypatch.setattr(devices, "choices", lambda: found)
    chosen = choose_precision("auto", CPU)
    times = Choices(tmp_path / "products.json").known[KIND]
    assert set(times) == {"float32", "bf16"}
    assert chosen == min(times, key=lambda name: times[name])


def test_all_ranks_take_the_answer_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    def broadcast(answer: torch.Tensor, source: int) -> None:
        assert source == 0
        answer.fill_(1)

    _processor(monkeypatch, amx=False, vectors=True)
    _times(monkeypatch, float32=1.0, bf16=2.0)
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
