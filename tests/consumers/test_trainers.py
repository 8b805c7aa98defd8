"""An `AttentionMonitor` in the Trainer of transformers and in that of Lightning, with their own loggers."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from regard.errors import ArgumentError
from regard.watching import AttentionMonitor
from regard.watching.hooks.observers import this_thread
from tests.inspection.huggingface_families import GPT2, built

transformers = pytest.importorskip("transformers")
WHY = "{} is in an environment of its own: make consumers ONLY=trainers"
NAMES = {"entropy", "largest_logit", "first_key", "dead", "uniform"}


def model(implementation: str = "sdpa") -> Any:
    return built("GPT2LMHeadModel", GPT2 | {"n_positions": 16}, implementation).train()


def rows(number: int = 32) -> Any:
    torch.manual_seed(1)
    ids = torch.randint(1, 50, (number, 8))
    return [{"input_ids": one, "attention_mask": torch.ones_like(one), "labels": one} for one in ids]


def across_documents(of: Any) -> Any:
    for block in of.transformer.h:
        block.attn.is_causal = False
    return of


def board(folder: Path, kind: str) -> dict[str, list[Any]]:
    accumulator: Any = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    found: dict[str, list[Any]] = {}
    for path in {file.parent for file in folder.rglob("events.out*")}:
        read = accumulator.EventAccumulator(str(path))
        read.Reload()
        found |= {name: getattr(read, kind)(name) for name in read.Tags()[kind.lower()]}
    return found


def folder_scalars(folder: Path) -> dict[str, list[tuple[int, float]]]:
    scalars = board(folder, "Scalars").items()
    return {"/".join(name.split("/")[-2:]): [(one.step, one.value) for one in steps] for name, steps in scalars}


def pictures(folder: Path) -> dict[str, list[int]]:
    return {name: [one.step for one in steps] for name, steps in board(folder, "Images").items()}


def trainer(of: Any, folder: Path, steps: int = 6, **options: Any) -> Any:
    pytest.importorskip("accelerate", reason=WHY.format("accelerate"))
    arguments = transformers.TrainingArguments(
        output_dir=str(folder), max_steps=steps, per_device_train_batch_size=4, logging_steps=2, save_strategy="no",
        use_cpu=True, disable_tqdm=True, **{"report_to": "none", **options},
    )  # fmt: skip
    return transformers.Trainer(model=of, args=arguments, train_dataset=rows())


@pytest.mark.parametrize("accumulated", [1, 2])
def test_trainer_logs_the_first_step_and_every_nth(accumulated: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", str(tmp_path / "board"))
    made = trainer(model(), tmp_path, report_to="tensorboard", gradient_accumulation_steps=accumulated)
    monitor = AttentionMonitor(every=3)
    made.add_callback(monitor.trainer_callback(made))
    made.train()
    logged = [line for line in made.state.log_history if "attention/worst/head" in line]
    assert [line["step"] for line in logged] == [1, 3, 6]
    layers = [f"attention/transformer.h.{n}.attn/{name}" for n in range(2) for name in NAMES]
    assert set(layers) <= set(logged[0])
    assert monitor.audited is not None
    assert not monitor.audited.errors
    read = folder_scalars(tmp_path / "board")
    assert [step for step, _ in read["transformer.h.1.attn/entropy"]] == [1, 3, 6]
    assert pictures(tmp_path / "board") == {"attention/worst/map": [1, 3, 6]}
    by_hand = logged[2]["attention/transformer.h.1.attn/entropy"]
    assert read["transformer.h.1.attn/entropy"][2][1] == pytest.approx(by_hand, rel=1e-5)


def test_trainer_keeps_its_bits(tmp_path: Path) -> None:
    found = []
    for watched in (False, True):
        made = trainer(model(), tmp_path)
        if watched:
            made.add_callback(AttentionMonitor(every=2).trainer_callback(made))
        made.train()
        found.append({name: tensor.clone() for name, tensor in made.model.state_dict().items()})
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_trainer_stops_before_the_first_change_or_warns(tmp_path: Path) -> None:
    wrong = across_documents(model())
    before = {name: tensor.clone() for name, tensor in wrong.state_dict().items()}
    made = trainer(wrong, tmp_path)
    made.add_callback(AttentionMonitor().trainer_callback(made))
    with pytest.raises(AssertionError, match=r"GPT2LMHeadModel: 2 layers.*errors?\nerror: transformer\.h\.0\.attn"):
        made.train()
    assert all(torch.equal(before[name], tensor) for name, tensor in wrong.state_dict().items())
    made = trainer(wrong, tmp_path, steps=2)
    made.add_callback(AttentionMonitor(on_fault="warn").trainer_callback(made))
    with pytest.warns(UserWarning, match="error: transformer.h.0.attn"):
        made.train()
    assert made.state.global_step == 2


def lightning_run(of: Any, folder: Path, monitor: AttentionMonitor | None, **options: Any) -> Any:
    lightning = pytest.importorskip("lightning.pytorch", reason=WHY.format("lightning"))

    class Lit(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = of

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return self.model(**batch).loss

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    torch.manual_seed(2)
    made = lightning.Trainer(
        callbacks=[] if monitor is None else [monitor.lightning_callback()], accelerator="cpu", max_steps=6,
        default_root_dir=folder, enable_progress_bar=False, enable_model_summary=False, enable_checkpointing=False,
        **{"log_every_n_steps": 3, "logger": False, **options},
    )  # fmt: skip
    made.fit(Lit().train(), DataLoader(rows(), batch_size=4))
    return made


@pytest.mark.parametrize("accumulated", [1, 2])
def test_lightning_logs_every_nth_step(accumulated: int, tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason=WHY.format("lightning"))
    monitor, logger = AttentionMonitor(every=3), loggers.TensorBoardLogger(tmp_path)
    made = lightning_run(model(), tmp_path, monitor, logger=logger, accumulate_grad_batches=accumulated)
    assert made.global_step == 6
    read = folder_scalars(tmp_path)
    assert {name for name in read if name.startswith("model.transformer.h.0.attn")} == {
        f"model.transformer.h.0.attn/{name}" for name in NAMES
    }
    assert [step for step, _ in read["model.transformer.h.0.attn/entropy"]] == [2, 5]  # Lightning counts from 0
    assert pictures(tmp_path) == {"attention/worst/map": [0, 2, 5]}
    assert monitor.audited is not None
    assert not monitor.audited.errors


def test_lightning_keeps_its_bits(tmp_path: Path) -> None:
    plain, watched = model(), model()
    lightning_run(plain, tmp_path, None)
    lightning_run(watched, tmp_path, AttentionMonitor(every=2))
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), watched.parameters(), strict=True))


def test_lightning_stops_before_the_first_change(tmp_path: Path) -> None:
    wrong = across_documents(model())
    before = [parameter.clone() for parameter in wrong.parameters()]
    with pytest.raises(AssertionError, match=r"error: model\.transformer\.h\.0\.attn"):
        lightning_run(wrong, tmp_path, AttentionMonitor())
    assert all(torch.equal(a, b) for a, b in zip(before, wrong.parameters(), strict=True))


def test_lightning_refuses_steps_that_no_logger_would_get(tmp_path: Path) -> None:
    loggers = pytest.importorskip("lightning.pytorch.loggers", reason=WHY.format("lightning"))
    with pytest.raises(ArgumentError, match="every=4 is no multiple of log_every_n_steps=3"):
        lightning_run(model(), tmp_path, AttentionMonitor(every=4), logger=loggers.CSVLogger(tmp_path))


def test_an_interrupted_step_leaves_no_watch_open(tmp_path: Path) -> None:
    class Broken(nn.Linear):
        def forward(self, **_: Any) -> Any:  # type: ignore[override]
            raise RuntimeError("interrupted")

    with pytest.raises(RuntimeError, match="interrupted"):
        lightning_run(Broken(1, 1), tmp_path, AttentionMonitor())
    assert not this_thread().watches
