"""The progress of a training on the screen: live lines in a terminal, plain lines in any other file."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import IO, Any

from regard.errors import needs
from regard.tasks.training.bad_batches import describe_bad
from regard.tasks.training.reporting.events import (
    Callback,
    Event,
    Finished,
    Saved,
    Skipped,
    Started,
    Stepped,
    Validated,
)

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
    """A callback that prints one line for each event.

    >>> import sys
    >>> show = PlainLines(sys.stdout)
    >>> show(Validated(step=500, metrics={"loss": 1.25}, is_best=True, patience_used=0))
    step     500  validation: loss 1.2500 (best so far)
    """

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
    """A callback that keeps two live lines at the foot of a terminal; validations scroll above them."""

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
    return (
        f"; the model was still learning (the loss fell by {event.fall:.2f} in the last quarter): "
        "go on by --resume with more --epochs or --steps"
    )


def clock(seconds: float) -> str:
    """Seconds as minutes and seconds, or hours, minutes and seconds.

    >>> clock(75), clock(3_725)
    ('01:15', '1:02:05')
    """
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes:02}:{rest:02}"
