"""The picture of the head with the largest logit, and the loggers that take pictures by interfaces of their own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, cast

from torch import Tensor

from regard.watching.analysis.measured_heads import MeasuredHeads

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_CELLS = 192
"""The most cells on a side of the picture: a longer side is pooled."""
PICTURE = "attention/worst/map"


@dataclass(frozen=True, slots=True, eq=False)
class WorstHead:
    """The head with the largest logit of a measurement."""

    layer: str
    head: int
    logit: float
    weights: Tensor
    """The map of its first sequence (t, s), with the largest weight of each block where a side is longer."""
    sizes: tuple[int, int]
    """T and S of the map."""

    def figure(self) -> "Figure":
        """Draw it, with `regard.views.heatmap`."""
        from regard.views.heatmap import heatmap

        pooled = "" if tuple(self.weights.shape) == self.sizes else f", {self.sizes[0]} x {self.sizes[1]} pooled by max"
        title = f"{self.layer or 'the model'}, head {self.head}: largest logit {self.logit:.3g}{pooled}"
        axes = heatmap(self.weights, title=title, max_cells=MOST_CELLS)
        return cast("Figure", axes.figure)


def worst_of(measured: Mapping[str, MeasuredHeads]) -> tuple[float, int, int] | None:
    """The largest logit of all heads, with the numbers of its layer and its head; None if no head has one."""
    worst = (-math.inf, 0, 0)
    for number, heads in enumerate(measured.values()):
        largest, head = heads.largest_logit.nan_to_num(nan=-math.inf).max(0)
        worst = max(worst, (float(largest), number, int(head)))
    return worst if worst[0] > -math.inf else None


def writers_of_trainer(trainer: Any) -> Iterator[Any]:
    """The writers behind the callbacks of transformers' `Trainer`: TensorBoard's, and the modules W&B and trackio."""
    for callback in trainer.callback_handler.callbacks:
        for name in ("tb_writer", "_wandb", "_trackio"):
            if (writer := getattr(callback, name, None)) is not None:
                yield writer


def writers_of_lightning(trainer: Any) -> Iterator[Any]:
    """The loggers of Lightning that take pictures, or else the writers behind them."""
    for logger in trainer.loggers if trainer.is_global_zero else ():
        yield logger if hasattr(logger, "log_image") else logger.experiment


def write_picture(worst: WorstHead, writers: Iterator[Any], step: int) -> int:
    """Hand the picture to each writer that takes one, drawn once; gives their number. Without matplotlib there is none.

    A writer is known by what it offers: `add_figure` (TensorBoard), `log_image` (Lightning's W&B logger), or a module
    with `Image` and `log` (W&B, trackio).
    """
    taking = [
        one for one in writers if hasattr(one, "add_figure") or hasattr(one, "log_image") or hasattr(one, "Image")
    ]
    if not taking or find_spec("matplotlib") is None:
        return 0
    import numpy as np
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    figure = worst.figure()
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    pixels = np.asarray(canvas.buffer_rgba())[..., :3].copy()
    for writer in taking:
        if hasattr(writer, "add_figure"):
            writer.add_figure(PICTURE, figure, global_step=step)
        elif hasattr(writer, "log_image"):
            writer.log_image(key=PICTURE, images=[pixels], step=step)
        else:
            writer.log({PICTURE: writer.Image(pixels), "train/global_step": step})
    return len(taking)
