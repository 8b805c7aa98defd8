"""The picture of the head with the largest logit, and the loggers that take pictures by interfaces of their own."""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from io import BytesIO
from typing import TYPE_CHECKING, Any

from torch import Tensor

from regard.lazy import Displayed
from regard.watching.analysis.measured_heads import MeasuredHeads

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_CELLS = 192
"""The most cells on a side of the picture: a longer side is pooled."""
PICTURE = "attention/worst/map"


@dataclass(frozen=True, slots=True, eq=False)
class WorstHead(Displayed):
    """The head with the largest logit of a measurement; a notebook shows its map."""

    layer: str
    head: int
    logit: float
    weights: Tensor
    """The map of its first sequence (t, s), with the largest weight of each block where a side is longer."""
    sizes: tuple[int, int]
    """T and S of the map."""

    def __str__(self) -> str:
        pooled = "" if tuple(self.weights.shape) == self.sizes else f", {self.sizes[0]} x {self.sizes[1]} pooled by max"
        return f"{self.layer or 'the model'}, head {self.head}: largest logit {self.logit:.3g}{pooled}"

    def pixels(self) -> "NDArray[np.uint8] | None":
        """The picture that a notebook shows, (height, width, 3); None without matplotlib."""
        png = self._repr_mimebundle_()[0].get("image/png")
        if png is None:
            return None
        import numpy as np
        from PIL import Image

        return np.asarray(Image.open(BytesIO(png)).convert("RGB"))


def largest_of(measured: Mapping[str, MeasuredHeads]) -> tuple[float, int, int] | None:
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

    A writer is known by what it offers: `add_image` (TensorBoard), `log_image` (Lightning's W&B logger), or a module
    with `Image` and `log` (W&B, trackio).
    """
    taking = [one for one in writers if any(hasattr(one, name) for name in ("add_image", "log_image", "Image"))]
    pixels = worst.pixels() if taking else None
    if pixels is None:
        return 0
    for writer in taking:
        if hasattr(writer, "add_image"):
            writer.add_image(PICTURE, pixels, global_step=step, dataformats="HWC")
        elif hasattr(writer, "log_image"):
            writer.log_image(key=PICTURE, images=[pixels], step=step)
        else:
            writer.log({PICTURE: writer.Image(pixels), "train/global_step": step})
    return len(taking)
