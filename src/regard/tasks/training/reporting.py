"""The reports of a training: events, as plain values, so that no callback changes a result, and callbacks for them.

The screen has live lines in a terminal, and plain lines in any other file; the logs are a line of JSON for each event,
and the files of TensorBoard. A batch whose loss or gradient is NaN or infinite ends the run, or is skipped and counted.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, Literal

import numpy as np
import numpy.typing as npt

from regard.errors import NonFiniteError, needs
from regard.files.atomic import write_atomically
from regard.files.untrusted import parse_json
from regard.tensors.ranges import require_at_least


@dataclass(frozen=True, kw_only=True, slots=True)
class Started:
    """Training begins, or resumes after `step` steps."""

    step: int
    total_steps: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Stepped:
    """Some updates were made. All means are over the steps since the last event of this kind."""

    step: int
    epoch: int
    loss: float
    """The mean training loss, in nats per token, including label smoothing if there is any."""
    learning_rate: float
    gradient_norm: float
    """The length of the gradient of the last step, before clipping."""
    tokens_per_second: float
    """Source and target tokens on all ranks, without padding."""
    padding_share: float
    """The share of padding among all places in the batches, 0..1."""
    seconds_left: float
    """The time until the last step, at the speed so far."""
    skipped_batches: int = 0
    """Batches skipped since the run began, because their loss or gradient was NaN or infinite."""
    device_memory_bytes: int = 0
    """The peak memory of tensors on the GPU so far; 0 without a GPU."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Skipped:
    """An update was not made, because the loss or the gradient of its batches is NaN or infinite."""

    step: int
    """The step of the failed update; the next batches are used for this step."""
    epoch: int
    first: int
    """The index of its first batch in this pass over the data."""
    last: int
    """The index of its last batch."""
    reason: str
    in_a_row: int
    """How many updates in a row were not made, including this one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validated:
    step: int
    metrics: Mapping[str, float]
    is_best: bool
    patience_used: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Saved:
    step: int
    which: Literal["best", "last"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    step: int
    reason: Literal["steps", "patience"]
    skipped_batches: int = 0
    """Batches skipped in the whole run."""
    fall: float = 0.0
    """`fall_of` the training loss, in nats per token, if the last validation is the best; inf before two reports."""


Event = Started | Stepped | Skipped | Validated | Saved | Finished
Callback = Callable[[Event], None]


def fall_of(losses: Sequence[float]) -> float:
    """The mean of the last quarter of losses below that of the quarter before.

    >>> fall_of([8.0, 6.0, 5.0, 4.0]), fall_of([8.0])
    (1.0, 0.0)
    """
    size = max(len(losses) // 4, 1)
    last, before = losses[-size:], losses[-2 * size : -size]
    return (sum(before) - sum(last)) / size if len(before) == size else 0.0


def describe_bad(bad: Skipped) -> str:
    where = f"batch {bad.first}" if bad.first == bad.last else f"batches {bad.first} to {bad.last}"
    return f"{bad.reason} at step {bad.step} (epoch {bad.epoch}, {where})"


BadBatches = Callable[[Skipped], None]
"""Called with each impossible update, before anything changes. It raises an error to end the run."""


@dataclass(frozen=True, slots=True)
class Stop:
    """End the run at the first bad batch.

    >>> Stop()(Skipped(step=6, epoch=1, first=2, last=2, reason="the loss is nan", in_a_row=1))
    Traceback (most recent call last):
    regard.errors.NonFiniteError: the loss is nan at step 6 (epoch 1, batch 2); lower the learning rate, look at that
    batch, or have such batches passed over (--bad-batches skip); the last checkpoint is untouched
    """

    def __call__(self, bad: Skipped) -> None:
        raise NonFiniteError(
            f"{describe_bad(bad)}; lower the learning rate, look at that batch, or have such batches passed over "
            "(--bad-batches skip); the last checkpoint is untouched"
        )


@dataclass(frozen=True, slots=True)
class Skip:
    """Skip bad batches, until too many come one after the other: then the batches are not the cause.

    >>> Skip(most_in_a_row=2)(Skipped(step=6, epoch=1, first=2, last=3, reason="the loss is nan", in_a_row=3))
    Traceback (most recent call last):
    regard.errors.NonFiniteError: the loss is nan at step 6 (epoch 1, batches 2 to 3), and was not a number for the 2
    updates before; lower the learning rate; the last checkpoint is untouched
    """

    most_in_a_row: int = 10
    """The most consecutive skipped updates; one more ends the run."""

    def __post_init__(self) -> None:
        require_at_least(1, most_in_a_row=self.most_in_a_row)

    def __call__(self, bad: Skipped) -> None:
        if bad.in_a_row > self.most_in_a_row:
            raise NonFiniteError(
                f"{describe_bad(bad)}, and was not a number for the {self.most_in_a_row} updates before; "
                "lower the learning rate; the last checkpoint is untouched"
            )


def bad_batches(name: Literal["stop", "skip"]) -> BadBatches:
    return Skip() if name == "skip" else Stop()


def what_is_wrong(loss: float, norm: float) -> str | None:
    """The non-finite one of the two in words; None if both are finite.

    >>> what_is_wrong(2.5, float("inf")), what_is_wrong(2.5, 1.0)
    ("the gradient's length is inf", None)
    """
    if not math.isfinite(loss):
        return f"the loss is {loss}"
    return None if math.isfinite(norm) else f"the gradient's length is {norm}"


LEAST_FALL = 0.05
"""The fall of the loss, in nats per token, at which the end of a training is worth a line: it was too early."""


@contextmanager
def watching(file: IO[str]) -> Iterator[Callback]:
    """A progress callback on `file`: live if it is a terminal, otherwise one line for each event."""
    if not file.isatty():
        yield PlainLines(file)
        return
    live = LiveProgress(file)
    try:
        yield live
    finally:  # the terminal is restored, also when training stops with an error
        live.close()


class PlainLines:
    """A callback that prints one line for each event."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file
        self._total_steps = 0

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._total_steps = event.total_steps
                if event.step:
                    self._print(f"resuming after step {event.step:,} of {event.total_steps:,}")
            case Stepped():
                left = clock(event.seconds_left)
                self._print(f"step {event.step:>7,}/{self._total_steps:,}  {describe_step(event)}  {left} left")
            case _:
                line = describe_milestone(event)
                if line:
                    self._print(line)

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


class LiveProgress:
    def __init__(self, file: IO[str]) -> None:
        with needs("rich", extra="train"):
            from rich.console import Console, Group
            from rich.live import Live
            from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
            from rich.text import Text
        self._bar: Any = Progress(
            TextColumn("step"), MofNCompleteColumn(), BarColumn(), TextColumn("{task.description}")
        )
        self._figures: Any = Text()
        self._live: Any = Live(Group(self._bar, self._figures), console=Console(file=file), refresh_per_second=4)
        self._task: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._live.start()
                self._task = self._bar.add_task("", total=event.total_steps, completed=event.step)
            case Stepped():
                self._bar.update(self._task, completed=event.step, description=f"{clock(event.seconds_left)} left")
                self._figures.plain = describe_step(event)
            case _:
                line = describe_milestone(event)
                if line:
                    self._live.console.print(line, highlight=False)

    def close(self) -> None:
        self._live.stop()


def describe_step(event: Stepped) -> str:
    """One report of the training, in words.

    >>> describe_step(Stepped(step=20, epoch=0, loss=2.5, learning_rate=1e-3, gradient_norm=1.0,
    ...                  tokens_per_second=12345.6, padding_share=0.051, seconds_left=75.4))
    'loss 2.5000  12,346 tokens/s  padding 5.1 %  rate 1.00e-03'
    """
    passed_over = f"  {event.skipped_batches:,} passed over" if event.skipped_batches else ""
    return (
        f"loss {event.loss:.4f}  {event.tokens_per_second:,.0f} tokens/s  padding {event.padding_share:.1%}  "
        f"rate {event.learning_rate:.2e}{passed_over}"
    ).replace("%", " %")


def describe_milestone(event: Event) -> str:
    """A validation, a skipped batch or the end of the training, in words; empty for all other events."""
    match event:
        case Validated():
            figures = ", ".join(f"{name} {value:.4f}" for name, value in event.metrics.items())
            verdict = "best so far" if event.is_best else f"no gain for {event.patience_used}"
            return f"step {event.step:>7,}  validation: {figures} ({verdict})"
        case Skipped():
            return f"step {event.step:>7,}  passed over: {describe_bad(event)}"
        case Finished(reason="patience"):
            return f"step {event.step:>7,}  stopped: the validation loss no longer falls{_skipped(event)}"
        case Finished() if event.skipped_batches or event.fall >= LEAST_FALL:
            return f"step {event.step:>7,}  done{_skipped(event)}{_longer(event)}"
        case Finished() | Saved() | Started() | Stepped():
            return ""


def _skipped(event: Finished) -> str:
    count = event.skipped_batches
    return f"; {count:,} {'batch' if count == 1 else 'batches'} passed over" if count else ""


def _longer(event: Finished) -> str:
    if event.fall < LEAST_FALL:
        return ""
    learning = f"the model was still learning (the loss fell by {event.fall:.2f} in the last quarter)"
    known = "too few steps to tell whether the loss still falls" if event.fall == math.inf else learning
    return f"; {known}: go on by --resume with more --epochs or --steps"


def clock(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"


class MetricsFile:
    """A callback that appends one line of JSON for each report, skipped update and validation. A run resumed from step
    n removes the lines after step n, because they will be written again."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                self._forget_after(event.step)
            case Stepped():
                self._append({"event": "train", **asdict(event)})
            case Skipped():
                self._append({"event": "skipped", **asdict(event)})
            case Validated():
                scores = {"step": event.step, "is_best": event.is_best, "patience_used": event.patience_used}
                self._append({"event": "valid", **scores, **event.metrics})
            case _:
                pass

    def _append(self, record: Mapping[str, Any]) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")

    def _forget_after(self, step: int) -> None:
        if not self.path.exists():
            return
        lines = self.path.read_bytes().splitlines(keepends=True)
        kept = [line for line in lines if _step_of(line) <= step]
        if kept != lines:
            write_atomically(self.path, b"".join(kept))


def _finite(value: Any) -> Any:
    """None for NaN and infinity, which JSON lacks; a perplexity may overflow."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _step_of(line: bytes) -> float:
    """The step of a line; infinity for a damaged or incomplete line."""
    try:
        return float(parse_json(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")


Pictures = Callable[[], Mapping[str, npt.NDArray[np.uint8]]]
"""Draws pictures (height, width, 3) of a model in its present state, by name."""


class TensorBoard:
    def __init__(self, folder: Path, pictures: Pictures | None = None) -> None:
        with needs("tensorboard", extra="train"):
            from torch.utils.tensorboard import SummaryWriter
        self._make_writer = SummaryWriter
        self._folder = folder
        self._pictures = pictures
        self._writer: Any = None

    def __call__(self, event: Event) -> None:
        match event:
            case Started():
                # purge_step hides scalars after the step from which a run resumes.
                self._writer = self._make_writer(str(self._folder), purge_step=event.step + 1)
            case Stepped():
                self._add("train", asdict(event), event.step)
            case Validated():
                self._add("valid", event.metrics, event.step)
                for name, picture in (self._pictures() if self._pictures else {}).items():
                    self._writer.add_image(name, picture, event.step, dataformats="HWC")
            case Saved():
                self._writer.flush()
            case Skipped():
                pass
            case _:
                self.close()

    def close(self) -> None:
        if self._writer is not None:
            self._writer.close()

    def _add(self, group: str, figures: Mapping[str, float], step: int) -> None:
        for name, value in figures.items():
            if name not in ("step", "seconds_left"):
                self._writer.add_scalar(f"{group}/{name}", value, step)
