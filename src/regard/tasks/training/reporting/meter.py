"""The speed of training. It is no part of the result, so it is in no checkpoint."""

import time
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Speed and padding since the last report, and the seconds per step since the start."""

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
        """Exclude time of validation or of writing checkpoints."""
        self.started += seconds
        self.window_started += seconds

    def read(self) -> tuple[float, float, float]:
        """Return tokens per second, padding share and seconds per step, and begin a new window."""
        now = time.perf_counter()
        speed = self.tokens / max(now - self.window_started, 1e-9)
        padding = 1 - self.tokens / max(self.places, 1)
        self.window_started, self.tokens, self.places = now, 0.0, 0.0
        return speed, padding, (now - self.started) / max(self.steps, 1)
