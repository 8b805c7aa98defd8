"""Margins and positions: the drawn numbers are those that other code computes."""

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

from regard.errors import ArgumentError, NonFiniteError, RegardError, ShapeError
from regard.views import DARK, alignment, position_table
from tests.views.written_dates import softmax


def test_margins_stand_at_their_cells() -> None:
    weights = softmax(4, 6)
    # Arabic keys stand from right to left, and their margin with them.
    figure: Any = alignment(weights, list("wxyz"), list("ابتثجح"), title="alignment", theme=DARK)
    FigureCanvasAgg(figure).draw()
    main, below, beside = figure.axes[:3]
    np.testing.assert_array_equal(main.get_images()[0].get_array(), weights[:, ::-1])
    np.testing.assert_allclose([bar.get_height() for bar in below.patches], weights.sum(0)[::-1])
    entropy = torch.distributions.Categorical(torch.from_numpy(weights)).entropy()
    np.testing.assert_allclose([bar.get_width() for bar in beside.patches], entropy, rtol=1e-6)
    for place in range(6):
        x, _ = main.transData.transform((place, 0))
        assert below.transData.transform((place, 0))[0] == pytest.approx(x, abs=0.5)
    for place in range(4):
        _, y = main.transData.transform((0, place))
        assert beside.transData.transform((0, place))[1] == pytest.approx(y, abs=0.5)


def test_a_table_of_positions() -> None:
    table = torch.randn(10, 6)
    figure = position_table(table)
    numbers, cosines = (np.asarray(ax.get_images()[0].get_array()) for ax in figure.axes[:2])
    np.testing.assert_allclose(numbers, table, rtol=1e-6)
    pairs = torch.nn.functional.cosine_similarity(table[:, None], table[None], dim=-1)
    np.testing.assert_allclose(cosines, pairs, atol=1e-6)


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda: position_table(torch.ones(3)), ShapeError, r"\(3,\)"),
        (lambda: position_table(torch.full((2, 2), torch.nan)), NonFiniteError, "finite"),
        (lambda: alignment(-np.eye(2)), ArgumentError, "from 0 up"),
        (lambda: alignment(np.eye(300)), ArgumentError, "at most 256"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ask: Any, error: type[RegardError], says: str) -> None:
    with pytest.raises(error, match=says):
        ask()
