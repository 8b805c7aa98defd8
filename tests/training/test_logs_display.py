import io
import json
from pathlib import Path

import pytest

from regard.tasks.training.fit_config import FitConfig
from regard.tasks.training.reporting import (
    Finished,
    LiveProgress,
    MetricsFile,
    PlainLines,
    Saved,
    Started,
    Stepped,
    TensorBoard,
    Validated,
    describe_milestone,
    watching,
)
from tests.training.toy_training import train_toy

STEPPED = Stepped(
    step=20,
    epoch=1,
    loss=2.5,
    learning_rate=1e-3,
    gradient_norm=0.7,
    tokens_per_second=4321.0,
    padding_share=0.05,
    seconds_left=75.0,
)
VALIDATED = Validated(step=20, metrics={"loss": 2.25}, is_best=True, patience_used=0)
EVENTS = (Started(step=0, total_steps=40), STEPPED, VALIDATED, Saved(step=20, which="last"))


def test_metrics_file_and_what_a_resume_forgets(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write = MetricsFile(path)
    for event in EVENTS:
        write(event)
    with path.open("a") as file:
        file.write('{"event": "train", "step": 27}\n{"event": "train", "st')  # killed while writing
    write(Started(step=20, total_steps=40))
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(record["event"], record["step"], record["loss"]) for record in records] == [
        ("train", 20, 2.5),
        ("valid", 20, 2.25),
    ]


def test_tensorboard_scalars(tmp_path: Path) -> None:
    write = TensorBoard(tmp_path)
    for event in (*EVENTS, Finished(step=20, reason="steps")):
        write(event)
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(tmp_path))
    events.Reload()
    assert {"train/loss", "train/tokens_per_second", "train/learning_rate", "valid/loss"} <= set(
        events.Tags()["scalars"]
    )
    (scalar,) = events.Scalars("valid/loss")
    assert (scalar.step, scalar.value) == (20, 2.25)


def test_plain_lines_without_a_terminal() -> None:
    file = io.StringIO()
    with watching(file) as show:
        for event in (*EVENTS, Finished(step=20, reason="patience")):
            show(event)
    assert file.getvalue().splitlines() == [
        "step      20/40  loss 2.5000  4,321 tokens/s  padding 5.0 %  rate 1.00e-03  01:15 left",
        "step      20  validation: loss 2.2500 (best so far)",
        "step      20  stopped: the validation loss no longer falls",
    ]


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def watch_and_fail(file: Terminal) -> None:
    with watching(file) as show:
        assert isinstance(show, LiveProgress)
        for event in EVENTS:
            show(event)
        raise InterruptedError


def test_a_terminal_gets_a_live_line_and_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    file = Terminal()
    with pytest.raises(InterruptedError):
        watch_and_fail(file)
    shown = file.getvalue()
    assert "20/40" in shown
    assert "01:15 left" in shown
    assert "loss 2.5000  4,321 tokens/s  padding 5.0 %  rate 1.00e-03" in shown  # all of it in 80 columns
    assert "best so far" in shown
    assert "\x1b[?25h" in shown  # the cursor is back


@pytest.mark.parametrize(("steps", "every", "said"), [(8, 1, "still learning"), (8, 50, "too few"), (400, 50, "")])
def test_an_end_while_the_model_still_learns_is_said(tmp_path: Path, steps: int, every: int, said: str) -> None:
    """A training that ends too early says how to go on; one that has learnt all that it can says nothing."""
    file = io.StringIO()
    config = FitConfig(steps=steps, validate_every=steps, save_every=steps, log_every=every)
    train_toy(tmp_path, config=config, dropout=0.0, callbacks=(PlainLines(file),))
    last = file.getvalue().splitlines()[-1]
    assert said in last
    assert ("go on by --resume with more --epochs or --steps" in last) == bool(said)


def test_a_validation_without_gain_is_said() -> None:
    event = Validated(step=20, metrics={"loss": 2.25}, is_best=False, patience_used=3)
    assert describe_milestone(event).endswith("(no gain for 3)")
