"""Draw, at every validation, the attention of a model in training to a few fixed sentences."""

from collections.abc import Callable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from regard.tasks.pictures.save import panel
from regard.tasks.pictures.token_maps import TextMaps
from regard.views.heatmap import heatmap_grid
from regard.views.pixels import pixels

Look = Callable[[], Sequence[tuple[str, TextMaps]]]
"""Sentences, and the model's present attention to them."""


class Snapshots:
    """Draws, for each sentence, the mean over the heads of the map that is shown first."""

    def __init__(self, look: Look, say: Callable[[str], None]) -> None:
        self._look: Look | None = look
        self._say = say

    def __call__(self) -> Mapping[str, npt.NDArray[np.uint8]]:
        """The name and pixels (height, width, 3) of the picture of now; empty if it cannot be drawn."""
        if self._look is None:
            return {}
        try:
            panels = [panel(sentence, seen) for sentence, seen in self._look()]
            return {"attention": pixels(heatmap_grid(panels, across=1))}
        except Exception as error:  # of any kind: training must go on
            self._look = None
            self._say(f"no heatmaps for TensorBoard: {' '.join(str(error).split()) or type(error).__name__}")
            return {}
