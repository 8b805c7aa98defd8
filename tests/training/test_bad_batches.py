"""Batches whose loss or gradient is no number: passed over when that is asked for, told of, counted."""

import io
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.errors import ArgumentError, NonFiniteError
from regard.tasks.training.checkpoints import Checkpoints, seed_everything
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.training.losses import Loss, LossSum
from regard.tasks.training.reporting import (
    BadBatches,
    Event,
    Finished,
    MetricsFile,
    PlainLines,
    Saved,
    Skip,
    Skipped,
    Stepped,
    bad_batches,
)
from tests.forked import run_ranks
from tests.training.toy_training import Poisoned, ToyBatch, ToyBatches, ToyModel, run_in_process, toy_loss

SKIPPING = Skip()
CONFIG = FitConfig(steps=12, save_every=3, validate_every=100, log_every=1)


def run(
    folder: Path,
    loss: Loss,
    config: FitConfig = CONFIG,
    bad: BadBatches = SKIPPING,
    **how: Any,
) -> tuple[ToyModel, list[Event]]:
    """Train without dropout: then a batch that is passed over changes nothing that comes after it."""
    seed_everything(3)
    model = ToyModel(0.0)
    return model, run_in_process(folder, config, loss=loss, model=model, bad_batches=bad, **how)


class Without(ToyBatches):
    def __init__(self, *numbers: int) -> None:
        super().__init__()
        self.numbers = numbers

    def epoch(self, epoch: int, start: int) -> Iterator[ToyBatch]:
        for number, batch in enumerate(super().epoch(epoch, 0)):
            if epoch or number not in self.numbers:
                yield batch


@pytest.mark.parametrize("by", [float("nan"), float("inf")])
def test_it_is_as_if_the_batch_had_not_been_there(tmp_path: Path, by: float) -> None:
    skipping, events = run(tmp_path / "skip", Poisoned(3, 5, by=by))
    without, _ = run(tmp_path / "without", toy_loss, batches=Without(2, 4))
    for name, value in without.state_dict().items():
        assert torch.equal(skipping.state_dict()[name], value), name
    skipped = [event for event in events if isinstance(event, Skipped)]
    assert [(bad.step, bad.epoch, bad.first, bad.in_a_row) for bad in skipped] == [(3, 0, 2, 1), (4, 0, 4, 1)]
    assert skipped[0].reason == f"the loss is {by}"
    steps = [event for event in events if isinstance(event, Stepped)]
    assert [event.step for event in steps] == list(range(1, 13))  # as many updates as were asked for
    assert [event.skipped_batches for event in steps][:5] == [0, 0, 1, 2, 2]
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.step, end.reason, end.skipped_batches) == (12, "steps", 2)
    assert Checkpoints(tmp_path / "skip").position("last").skipped_batches == 2


def test_all_that_was_accumulated_is_passed_over(tmp_path: Path) -> None:
    _, events = run(tmp_path, Poisoned(4), replace(CONFIG, accumulate=3, steps=4))
    (bad,) = (event for event in events if isinstance(event, Skipped))
    assert (bad.step, bad.first, bad.last) == (2, 3, 5)
    end = events[-1]
    assert isinstance(end, Finished)
    assert (end.step, end.reason, end.skipped_batches) == (4, "steps", 3)


def test_an_infinite_gradient_of_a_finite_loss_is_passed_over(tmp_path: Path) -> None:
    model, events = run(tmp_path, Poisoned(2, is_steep=True))
    assert [bad.reason for bad in events if isinstance(bad, Skipped)] == ["the gradient's length is nan"]
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_too_many_in_a_row_end_the_run(tmp_path: Path) -> None:
    message = r"loss is nan at step 5 \(epoch 1, batch 0\), and was not a number for the 3 updates before"
    with pytest.raises(NonFiniteError, match=message):
        run(tmp_path, Poisoned(*range(5, 100)), bad=Skip(most_in_a_row=3))
    assert Checkpoints(tmp_path).position("last").step == 3  # and that checkpoint is whole
    run(tmp_path / "apart", Poisoned(2, 4, 6, 8, 10), bad=Skip(most_in_a_row=1))  # not in a row


def test_a_kill_between_does_not_count_twice(tmp_path: Path) -> None:
    """The count goes with the checkpoint: what is made again is counted again, once."""

    def die(event: Event) -> None:
        if isinstance(event, Stepped) and event.step == 5:
            raise InterruptedError

    class ByContent(Poisoned):
        def __call__(self, model: nn.Module, batch: ToyBatch) -> LossSum:
            loss = toy_loss(model, batch)
            bad = any(torch.equal(batch.source, one.source) for one in self.calls)
            return LossSum(loss.total * (self.by if bad else 1.0), loss.count)

    loss = ByContent(*list(ToyBatches().epoch(0, 0))[1:6:3])
    (tmp_path / "straight").mkdir()
    (tmp_path / "killed").mkdir()
    whole = run(tmp_path / "straight", loss, callbacks=[MetricsFile(tmp_path / "straight" / "m")])
    with pytest.raises(InterruptedError):
        run(tmp_path / "killed", loss, callbacks=[MetricsFile(tmp_path / "killed" / "m"), die])
    again = run(tmp_path / "killed", loss, callbacks=[MetricsFile(tmp_path / "killed" / "m")])
    assert Checkpoints(tmp_path / "killed").position("last") == Checkpoints(tmp_path / "straight").position("last")
    for name, value in whole[0].state_dict().items():
        assert torch.equal(again[0].state_dict()[name], value)
    history = told(tmp_path / "straight" / "m")
    assert told(tmp_path / "killed" / "m") == history
    assert [step for event, step, _ in history if event == "skipped"] == [2, 4]


def told(path: Path) -> list[tuple[Any, ...]]:
    records = map(json.loads, path.read_text().splitlines())
    return [(record["event"], record["step"], record.get("skipped_batches")) for record in records]


def test_it_is_said_where_and_how_many(tmp_path: Path) -> None:
    file = io.StringIO()
    run(tmp_path, Poisoned(3), callbacks=[PlainLines(file)])
    lines = file.getvalue().splitlines()
    assert "step       3  passed over: the loss is nan at step 3 (epoch 0, batch 2)" in lines
    assert "  1 passed over" in lines[-2]
    assert lines[-1].startswith("step      12  done; 1 batch passed over")


def test_checkpoints_are_not_written_between_a_bad_batch_and_the_next_step(tmp_path: Path) -> None:
    _, events = run(tmp_path, Poisoned(4))
    at = next(index for index, event in enumerate(events) if isinstance(event, Skipped))
    assert not isinstance(events[at + 1], Saved)


def test_two_ranks_pass_over_together(tmp_path: Path) -> None:
    """A bad batch of one rank is skipped by all: else their parameters would differ."""
    arguments = (str(tmp_path), "--dropout", "0", "--steps", "12", "--poison-rank", "1")
    ranks = run_ranks(2, *arguments, function="tests.training.toy_training:main")
    assert [rank.returncode for rank in ranks] == [0, 0], ranks
    records = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert [(r["step"], r["epoch"], r["first"]) for r in records if r["event"] == "skipped"] == [(3, 0, 2)]
    assert records[-2]["skipped_batches"] == 1
    sums = [[line for line in rank.stdout.splitlines() if line.startswith("parameters ")] for rank in ranks]
    assert len(sums[0]) == 1
    assert sums[0] == sums[1]


def test_names_and_ranges() -> None:
    assert bad_batches("skip") == Skip()
    with pytest.raises(ArgumentError, match="most_in_a_row must be at least 1, got 0"):
        Skip(0)
