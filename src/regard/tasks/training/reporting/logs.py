"""The logs of a run: a file with one line of JSON for each event, and the files of TensorBoard."""

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from regard.errors import needs
from regard.files.atomic import write_atomically
from regard.files.untrusted import parse_json
from regard.tasks.training.reporting.events import Event, Saved, Skipped, Started, Stepped, Validated


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
