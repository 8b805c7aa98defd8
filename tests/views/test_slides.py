"""Heatmaps for slides: masks and lists as they are typed, large cells, numbers in them, and axes of one's own."""

from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import regard
from regard.errors import ArgumentError, ShapeError
from regard.views import heatmap
from tests.views.written_dates import softmax

WORDS = ["the", "cat", "sat", "on", "the", "mat", "and", "slept"]


def side_of(ax: Any) -> float:
    width = ax.figure.get_size_inches()[0]
    return float(width * ax.get_position().width)


def test_eight_words_fill_the_figure_and_two_thousand_fit_a_screen() -> None:
    ax = heatmap(softmax(8, 8), WORDS, WORDS)
    assert side_of(ax) > 0.6 * ax.figure.get_size_inches()[0]
    assert side_of(ax) / 8 == pytest.approx(0.4)
    large: Any = heatmap(softmax(2000, 2000)).figure
    assert max(large.get_size_inches()) * 96 < 1080


@pytest.mark.parametrize(
    "mask", [regard.causal(), regard.window(2), regard.causal() & regard.predicate(lambda b, h, q, k: k != 1)]
)
def test_a_mask_is_drawn_for_its_words(mask: regard.Mask) -> None:
    image = heatmap(mask, WORDS, WORDS).get_images()[0]
    allowed = mask.to_tensor(8).numpy()
    drawn: Any = image.get_array()
    np.testing.assert_array_equal(np.ma.getmaskarray(drawn), ~allowed)
    assert (drawn.compressed() == 1).all()
    alone = heatmap(mask)
    assert alone.get_images()[0].get_array().shape == (12, 12)
    assert alone.figure.axes == [alone], "a bar of weights stands below a mask"


@pytest.mark.parametrize(
    "given", [[[0.25, 0.75], [1, 0]], ((0.25, 0.75), (1.0, 0.0)), torch.tensor([[[[0.25, 0.75], [1, 0]]]])]
)
def test_lists_and_batches_of_one_are_matrices(given: Any) -> None:
    np.testing.assert_allclose(heatmap(given).get_images()[0].get_array(), [[0.25, 0.75], [1, 0]])  # type: ignore[arg-type]


def test_what_is_no_matrix_is_refused() -> None:
    with pytest.raises(ShapeError, match="one matrix"):
        heatmap([[1, 2], [3]])
    with pytest.raises(ShapeError, match="name the batch and the head"):
        heatmap(torch.ones(2, 3, 3))


def test_numbers_stand_in_cells_where_they_fit() -> None:
    weights = softmax(8, 8)
    weights[0, 1:] = 0
    ax = heatmap(weights, annotate=True, mask=regard.causal())
    numbers = {tuple(map(int, text.get_position())): text.get_text() for text in ax.texts if text.get_visible()}
    assert numbers == {(k, q): f"{weights[q, k]:.2f}" for q in range(8) for k in range(q + 1)}
    small = heatmap(softmax(60, 60), annotate=True)
    assert not any(text.get_visible() for text in small.texts)


def test_axes_of_ones_own_have_room_for_labels_titles_and_bars() -> None:
    figure = Figure(figsize=(8, 4))
    left, right = figure.subplots(1, 2)
    for ax, title in ((left, "left"), (right, "right")):
        heatmap(softmax(8, 8), WORDS, WORDS, ax=ax, title=title)
    FigureCanvasAgg(figure).draw()
    for ax in (left, right):
        title, *labels = [ax.title, ax._left_title, *ax.get_xticklabels(), ax.xaxis.label][1:]
        boxes = [artist.get_window_extent() for artist in labels]
        assert not any(title.get_window_extent().overlaps(box) for box in boxes)
        assert figure.bbox.x0 <= min(box.x0 for box in boxes)
    bar = left.get_images()[0].colorbar.ax
    assert not bar.get_tightbbox().overlaps(right.get_tightbbox())


def test_a_layout_by_hand_stays() -> None:
    figure = Figure()
    figure.subplots_adjust(left=0.3)
    ax = figure.subplots()
    heatmap(softmax(3, 3), ax=ax)
    assert figure.get_layout_engine() is None


def test_the_size_of_the_figure_and_the_titles_of_the_axes() -> None:
    ax = heatmap(softmax(3, 3), figsize=(4, 3), axis_titles=("French", "English"))
    assert ax.figure.get_size_inches().tolist() == [4, 3]
    assert (ax.get_ylabel(), ax.get_xlabel()) == ("French", "English")
    assert (heatmap(softmax(3, 3)).get_ylabel(), heatmap(softmax(3, 3), axis_titles=("", "")).get_ylabel()) == (
        "looks at",
        "",
    )
    for wrong in (3, (0, 1), ("a", 1), (1, 2, 3)):
        with pytest.raises(ArgumentError, match="figsize must be two numbers"):
            heatmap(softmax(3, 3), figsize=wrong)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="figsize= is the size of a new figure"):
        heatmap(softmax(3, 3), ax=ax, figsize=(1, 1))
    assert matplotlib.rcParams["figure.constrained_layout.use"] is False
