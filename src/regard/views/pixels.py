"""Figures as arrays, for TensorBoard, videos and tests."""

from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def pixels(figure: "Figure") -> npt.NDArray[np.uint8]:
    """The picture of a figure, (height, width, 3): red, green and blue from 0 to 255.

    >>> from regard.views import heatmap
    >>> import torch
    >>> picture = pixels(heatmap(torch.eye(3)).figure)
    >>> picture.dtype, picture.shape[2]
    (dtype('uint8'), 3)
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg

    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.array(canvas.buffer_rgba())[..., :3]
