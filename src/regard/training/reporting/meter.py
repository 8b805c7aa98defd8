"""How fast training goes. Nothing here belongs to its result, so nothing here is in a checkpoint."""

import time
from dataclasses import dataclass, field


@dataclass
class Meter:
    """Speed and padding since the last report, and seconds a step since the start."""

    started: float = field(default_factory=time.perf_counter)
    window_started: float = field(default_factory=time.perf_counter)
    steps: int = 0
    tokens: float = 0.0
    places: float = 0.0

    def add(self, tokens: float, places: float) -> None:
        """Count one step."""
        self.steps += 1
        self.tokens += tokens
        self.places += places

    def pause(self, seconds: float) -> None:
        """Leave out time that was not training: validation and checkpoints."""
        self.started += seconds
        self.window_started += seconds

    def read(self) -> tuple[float, float, float]:
        """Tokens a second, padding share, seconds a step; begins a new window."""
        now = time.perf_counter()
        speed = self.tokens / max(now - self.window_started, 1e-9)
        padding = 1 - self.tokens / max(self.places, 1)
        self.window_started, self.tokens, self.places = now, 0.0, 0.0
        return speed, padding, (now - self.started) / max(self.steps, 1)
