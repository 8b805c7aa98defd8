"""Labels chosen when a figure is drawn: a layout changes the size of axes until then."""

from collections.abc import Callable
from typing import Any

from matplotlib.artist import Artist


class Fitting(Artist):
    """Draws nothing. Before the axis of its axes is drawn, it lets the labels be chosen for the size of now."""

    def __init__(self, choose: Callable[[], object]) -> None:
        super().__init__()
        self._choose = choose
        # A hook below all others is called first.
        self.set(zorder=-1_000, in_layout=False)

    def draw(self, renderer: Any) -> None:
        self._choose()
