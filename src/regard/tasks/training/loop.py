"""The training loop. It knows batches, a loss and an optimizer, but nothing about attention or text."""

import math
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import regard.call  # noqa: F401 (so that the first exponential is made by one thread)
from regard.errors import ArgumentError, DataError, NonFiniteError
from regard.tasks.training.checkpoints import (
    Checkpoints,
    Position,
    TrainingState,
    fill_model,
    flatten_optimizer,
    get_random_state,
    set_random_state,
    unflatten_optimizer,
)
from regard.tasks.training.distributed import Ranks
from regard.tasks.training.fit_config import FitConfig, Schedule
from regard.tasks.training.interrupts import StopWish, TrainingInterrupted, listening
from regard.tasks.training.losses import Batches, Loss, Validate
from regard.tasks.training.metrics import deciding
from regard.tasks.training.optimizers import RATE, in_place_of, moving_average
from regard.tasks.training.reporting import (
    BadBatches,
    Callback,
    Event,
    Finished,
    Saved,
    Skipped,
    Started,
    Stepped,
    Stop,
    Validated,
    fall_of,
    what_is_wrong,
)
from regard.tensors.torch_private import multiply_each_


def fit(
    model: nn.Module,
    batches: Batches[Any],
    loss: Loss,
    optimizer: torch.optim.Optimizer,
    schedule: Schedule,
    *,
    config: FitConfig,
    fabric: Any,
    validate: Validate | None = None,
    best_by: str = "loss",
    checkpoints: Checkpoints | None = None,
    callbacks: Sequence[Callback] = (),
    bad_batches: BadBatches = Stop(),  # noqa: B008 (it has no state)
) -> Position:
    """Train a model in place, from the last checkpoint if there is one.

    An update uses the gradient of (sum of the losses) / (number of tokens), both over all accumulated batches and all
    ranks. So the division of batches among steps and ranks changes only rounding.

    Args:
        model: trained in place; moved to the device of `fabric`.
        batches: this rank's share of the data.
        loss: computes the summed loss and the count of one batch; it must call the model in its arguments.
        optimizer: over the model's parameters, given as (name, parameter) pairs.
        schedule: the learning rate as a function of the step, counted from 1.
        config: when to stop, validate and save.
        fabric: a launched `lightning_fabric.Fabric`.
        validate: scores the model, in evaluation mode, without gradients, and with any averaged weights.
        best_by: the metric of `validate` that decides the best model: lower is better for "loss", higher for all
            others; a BLEU below 1 tells nothing, and there the loss decides.
        checkpoints: the best and the last checkpoint; training resumes from the last one.
        callbacks: called with every event, on rank 0 only.
        bad_batches: called when the loss or the gradient is NaN or infinite; see `regard.tasks.training.reporting`.

    Returns:
        The position at the end of training.

    Raises:
        NonFiniteError: the loss or the gradient is NaN or infinite; the message names the step and the batches.
        TrainingInterrupted: Ctrl-C or SIGTERM came; the state was saved first.
        RunFolderError: the last checkpoint cannot be read or does not fit.
        OSError: a checkpoint could not be written; the one before is still there.
    """
    wrapped = fabric.setup_module(model)
    average = moving_average(model, config.ema_decay) if config.ema_decay else None
    # Without Fabric's wrapper, which keeps the parameter groups it saw first.
    run = _Run(
        wrapped,
        model,
        batches,
        loss,
        optimizer,
        schedule,
        config,
        fabric,
        validate,
        best_by,
        checkpoints,
        callbacks,
        average,
        bad_batches,
    )
    run.resume()
    with listening() as wish:
        return run.train(wish)


@dataclass(frozen=True, slots=True)
class _Sums:
    loss: float
    count: float
    tokens: float
    places: float
    stop_signal: float


@dataclass
class _Meter:
    """Speed and padding since the last report, and the seconds per step since the start. They are in no checkpoint."""

    started: float = field(default_factory=time.perf_counter)
    window_started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: float = 0.0
    places: float = 0.0

    def add(self, token_count: float, places: float) -> None:
        self.steps += 1
        self.tokens += token_count
        self.places += places

    def pause(self, seconds: float) -> None:
        self.started += seconds
        self.window_started += seconds

    def read(self) -> tuple[float, float, float]:
        """Return tokens per second, padding share and seconds per step, and begin a new window."""
        now = time.perf_counter()
        speed = self.tokens / max(now - self.window_started, 1e-9)
        padding = 1 - self.tokens / max(self.places, 1)
        self.window_started, self.tokens, self.places = now, 0.0, 0.0
        return speed, padding, (now - self.started) / max(self.steps, 1)


@dataclass
class _Run:
    wrapped: nn.Module
    model: nn.Module
    batches: Batches[Any]
    loss: Loss
    optimizer: torch.optim.Optimizer
    schedule: Schedule
    config: FitConfig
    fabric: Any
    validate: Validate | None
    best_by: str
    checkpoints: Checkpoints | None
    callbacks: Sequence[Callback]
    average: AveragedModel | None
    bad_batches: BadBatches
    position: Position = field(default_factory=Position)
    meter: _Meter = field(default_factory=_Meter)
    saved_step: int = -1
    bad_in_a_row: int = 0
    losses: list[float] = field(default_factory=list)
    """Those of the reports since the start or the resumption."""

    # -- the loop ---------------------------------------------------------------------------

    def train(self, wish: StopWish) -> Position:
        self.tell(Started(step=self.position.step, total_steps=self.config.steps))
        self.meter = _Meter()
        self.model.train()
        reason = self.why_finished()
        for group in self.groups() if reason is None else ():
            sums, norm = self.update(group, wish)
            if norm is None:
                continue
            self.advance(group, sums)
            if self.due(self.config.log_every):
                self.report(norm)
            self.validate_and_save()
            reason = self.why_finished()
            if reason is not None:
                break
            if sums.stop_signal:
                self.save_last()
                raise TrainingInterrupted(self.position.step, wish.signal or signal.SIGINT)
        assert reason is not None
        self.close(reason)
        return self.position

    def groups(self) -> Iterator["_Group"]:
        epoch, start = self.position.epoch, self.position.batch
        while True:
            found = False
            for group in _grouped(self.batches.epoch(epoch, start), self.config.accumulate, epoch, start):
                found = True
                yield group
            if not found and start == 0:
                raise DataError("there is no batch to train on: every pair was left out, or there are none")
            epoch, start = epoch + 1, 0

    def update(self, group: "_Group", wish: StopWish) -> tuple[_Sums, float | None]:
        """Sum the gradients of a group of batches over all ranks, and make one step with their mean."""
        sums = self.accumulate(group, wish)
        gradients: list[Tensor] = [p.grad for p in self.model.parameters() if p.grad is not None]
        # Distributed training leaves the mean over ranks. Multiplied by their number it is the sum again.
        scale = self.fabric.world_size / max(sums.count, 1.0)
        norm = float(nn.utils.get_total_norm(gradients)) * scale
        if self.passes_over(group, what_is_wrong(sums.loss, norm)):
            return sums, None
        clip = self.config.clip_norm
        shorten = clip / norm if 0 < clip < norm else 1.0
        multiply_each_(gradients, scale * shorten)
        for parameters_of_a_kind in self.optimizer.param_groups:
            factor = parameters_of_a_kind.get(RATE, 1.0)
            parameters_of_a_kind["lr"] = factor * self.schedule(self.position.step + 1)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        if self.average is not None:
            self.average.update_parameters(self.model)
        return sums, norm

    def accumulate(self, group: "_Group", wish: StopWish) -> _Sums:
        totals = torch.zeros(5, dtype=torch.float64)
        for index, batch in enumerate(group.batches):
            last = index == len(group.batches) - 1
            size = self.batches.size(batch)
            with self.fabric.no_backward_sync(self.wrapped, enabled=not last):
                loss = self.loss(self.wrapped, self.fabric.to_device(batch))
                self.fabric.backward(loss.total)
            totals += torch.tensor([loss.total.item(), loss.count.item(), *size, 0.0], dtype=torch.float64)
        totals[4] = wish.signal
        return _Sums(*Ranks.of(self.fabric).sum(totals).tolist())

    def passes_over(self, group: "_Group", wrong: str | None) -> bool:
        """True if these batches are skipped. All ranks know the same sums, so they agree."""
        if wrong is None:
            self.bad_in_a_row = 0
            return False
        self.bad_in_a_row += 1
        bad = Skipped(
            step=self.position.step + 1,
            epoch=group.epoch,
            first=group.start,
            last=group.start + len(group.batches) - 1,
            reason=wrong,
            in_a_row=self.bad_in_a_row,
        )
        self.bad_batches(bad)
        self.optimizer.zero_grad(set_to_none=True)
        self.position = replace(self.position, skipped_batches=self.position.skipped_batches + len(group.batches))
        self.tell(bad)
        return True

    def advance(self, group: "_Group", sums: _Sums) -> None:
        self.meter.add(sums.tokens, sums.places)
        self.position = replace(
            self.position,
            step=self.position.step + 1,
            epoch=group.epoch,
            batch=group.start + len(group.batches),
            loss_total=self.position.loss_total + sums.loss,
            loss_count=self.position.loss_count + int(sums.count),
        )

    def due(self, every: int) -> bool:
        return self.position.step % every == 0 or self.position.step == self.config.steps

    def why_finished(self) -> Literal["steps", "patience"] | None:
        if self.position.step >= self.config.steps:
            return "steps"
        return "patience" if 0 < self.config.patience <= self.position.patience_used else None

    def close(self, reason: Literal["steps", "patience"]) -> None:
        self.save_last()
        skipped = self.position.skipped_batches
        step, is_best = self.position.step, self.position.best_step in (0, self.position.step)
        has_begun_only = reason == "steps" and step < 2 * self.config.log_every
        fall = math.inf if has_begun_only else fall_of(self.losses) if is_best else 0.0
        self.tell(Finished(step=step, reason=reason, skipped_batches=skipped, fall=fall))

    # -- validation and checkpoints ------------------------------------------------------------

    def validate_and_save(self) -> None:
        began = time.perf_counter()
        if self.validate is not None and self.due(self.config.validate_every):
            self.run_validation(self.validate)
        if self.due(self.config.save_every):
            self.save_last()
        self.meter.pause(time.perf_counter() - began)

    def run_validation(self, validate: Validate) -> None:
        with self.averaged():
            self.model.eval()
            with torch.no_grad():
                metrics = validate()
            self.model.train()
            is_best = self.judge(metrics)
            used = self.position.patience_used
            self.tell(Validated(step=self.position.step, metrics=metrics, is_best=is_best, patience_used=used))
            if is_best:  # before the last checkpoint, which refers to the best one
                self.save_best()

    def judge(self, metrics: Mapping[str, float]) -> bool:
        by = self.best_by
        if by not in metrics:
            raise ArgumentError(f"best_by must be one of the metrics {sorted(metrics)}, got {by!r}")
        for name in ("loss", by):
            if not math.isfinite(metrics[name]):
                raise NonFiniteError(f"the validation {name} is {metrics[name]} at step {self.position.step}")
        value, best = deciding(metrics, by), self.position.best_value
        is_best = best is None or (value < best if by == "loss" else value > best)
        self.position = (
            replace(self.position, best_value=value, best_step=self.position.step, patience_used=0)
            if is_best
            else replace(self.position, patience_used=self.position.patience_used + 1)
        )
        return is_best

    def averaged(self) -> AbstractContextManager[None]:
        return nullcontext() if self.average is None else in_place_of(self.average, self.model)

    def save_best(self) -> None:
        if self.checkpoints is None:
            return
        checkpoints, ranks = self.checkpoints, Ranks.of(self.fabric)
        # The first rank looks and broadcasts: the files change while ranks write.
        if not ranks.gather(lambda: ranks.rank == 0 and checkpoints.has_better(self.position, by=self.best_by))[0]:
            checkpoints.save_model("best", self.model.state_dict(), self.position, ranks)
        self.tell(Saved(step=self.position.step, which="best"))

    def save_last(self) -> None:
        if self.checkpoints is None or self.saved_step == self.position.step:
            return
        states = Ranks.of(self.fabric).gather(lambda: get_random_state(self.fabric.device))
        random = {name: torch.stack([one[name] for one in states]) for name in states[0]}
        optimizer = flatten_optimizer(self.optimizer.state_dict())
        average = None if self.average is None else self.average.module.state_dict()
        state = TrainingState(self.model.state_dict(), optimizer, random, self.position, average)
        self.checkpoints.save_last(state, Ranks.of(self.fabric))
        self.saved_step = self.position.step
        self.tell(Saved(step=self.position.step, which="last"))

    def resume(self) -> None:
        if self.checkpoints is None or not self.checkpoints.has("last"):
            return
        state, source = self.checkpoints.load_last(), self.checkpoints.path("last")
        fill_model(self.model, state.model, source=source)
        self.optimizer.load_state_dict(unflatten_optimizer(state.optimizer, self.optimizer.state_dict(), source=source))
        if self.average is not None:
            fill_model(self.average.module, state.average or {}, source=source)
            self.average.n_averaged.fill_(state.position.step + 1)
        self.position, self.saved_step = state.position, state.position.step
        # A different number of ranks cannot continue the same random state: they keep those of their seed.
        if len(state.random["torch"]) == self.fabric.world_size:
            mine = {name: value[self.fabric.global_rank] for name, value in state.random.items()}
            set_random_state(mine, self.fabric.device)

    # -- telling ---------------------------------------------------------------------------------

    def report(self, norm: float) -> None:
        (speed, padding, seconds), device = self.meter.read(), self.fabric.device
        self.losses.append(self.position.loss_total / max(self.position.loss_count, 1))
        self.tell(
            Stepped(
                step=self.position.step,
                epoch=self.position.epoch,
                loss=self.losses[-1],
                learning_rate=self.schedule(self.position.step),
                gradient_norm=norm,
                tokens_per_second=speed,
                padding_share=padding,
                seconds_left=seconds * (self.config.steps - self.position.step),
                skipped_batches=self.position.skipped_batches,
                device_memory_bytes=torch.cuda.max_memory_allocated(device) if device.type == "cuda" else 0,
            )
        )
        self.position = replace(self.position, loss_total=0.0, loss_count=0)

    def tell(self, event: Event) -> None:
        if self.fabric.is_global_zero:
            for callback in self.callbacks:
                callback(event)


class _Group(NamedTuple):
    epoch: int
    start: int
    batches: list[Any]


def _grouped(batches: Iterator[Any], size: int, epoch: int, start: int) -> Iterator[_Group]:
    group: list[Any] = []
    for batch in batches:
        group.append(batch)
        if len(group) == size:
            yield _Group(epoch, start, group)
            start, group = start + size, []
    if group:
        yield _Group(epoch, start, group)
