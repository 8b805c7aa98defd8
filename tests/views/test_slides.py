"""Heatmaps for slides: masks and lists as they are typed, large cells, numbers in them, and axes of one's own."""

from itertools import pairwise
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import regard
from regard.errors import ArgumentError, FileError
from regard.views import heatmap, save_figure
from regard.views.artists import thin_vertices
from regard.views.drawing import Panel
from regard.views.fonts import letter
from regard.views.heatmap import heatmap_grid
from tests.views.test_heatmap import drawn
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


@pytest.mark.parametrize("layout", ["constrained", None])
def test_twice_is_the_same_as_once(layout: Any) -> None:
    def figure(times: int) -> Figure:
        made = Figure(layout=layout, figsize=(4, 3), dpi=60)
        ax = made.subplots()
        for time in range(times):
            # The first one is of another size, script and mask.
            if time < times - 1:
                heatmap(softmax(3, 4), list("abc"), list("אבגד"), ax=ax, title="土", mask=softmax(3, 4) > 0.2)
            else:
                heatmap(softmax(5, 6), list("vwxyz"), list("abcdef"), ax=ax)
        return made

    once, twice = figure(1), figure(2)
    assert len(once.axes) == len(twice.axes) == 2
    assert len(twice.axes[0].get_images()) == 1
    np.testing.assert_array_equal(drawn(once), drawn(twice))


def test_without_a_colour_bar() -> None:
    assert len(heatmap(np.eye(3), colour_bar=False).figure.axes) == 1
    assert len(heatmap_grid([Panel(np.eye(3))], colour_bar=False).axes) == 1
    figure = Figure()
    heatmap(np.eye(3), ax=figure.subplots(), colour_bar=False)
    assert len(figure.axes) == 1


def test_widths_are_those_after_the_layout() -> None:
    """Four maps share a small figure: before the layout each is thought to be larger than it is."""
    figure = Figure(layout="constrained", figsize=(5, 4), dpi=80)
    labels = [f"token{n}" for n in range(40)]
    for ax in figure.subplots(2, 2).flat:
        heatmap(softmax(40, 40), labels, labels, ax=ax)
    drawn(figure)
    for ax in figure.axes[:4]:
        for texts in (ax.get_xticklabels(), ax.get_yticklabels()):
            boxes = [text.get_window_extent() for text in texts]
            assert not any(one.overlaps(other) for one, other in pairwise(boxes))


def test_only_the_glyphs_of_thin_fonts_get_a_stroke() -> None:
    """A title of several scripts is of one weight: its Latin letters are drawn as they are without Han characters."""
    (mixed,), (plain,), (thin,) = letter(["ab א 年"]), letter(["ab"]), letter(["年"])
    flags = thin_vertices(mixed)
    assert 0 < flags.sum() < len(flags)
    assert not thin_vertices(plain).any()
    assert thin_vertices(thin).all()
    assert flags.sum() == len(thin_vertices(thin))


def test_a_file_that_cannot_be_written_stays(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "map.png"
    path.write_bytes(b"before")
    figure: Any = heatmap(np.eye(2)).figure
    monkeypatch.setattr(Figure, "savefig", lambda self, file, **how: file.write(b"half") and 1 / 0)
    with pytest.raises(ZeroDivisionError):
        save_figure(figure, path)
    assert path.read_bytes() == b"before"
    assert list(tmp_path.iterdir()) == [path]
    monkeypatch.undo()
    save_figure(figure, path)
    assert path.read_bytes().startswith(b"\x89PNG")
    with pytest.raises(FileError, match=r"cannot write .*no such folder.*: No such file"):
        save_figure(figure, tmp_path / "no such folder" / "x.png")
    with pytest.raises(ArgumentError, match=r"ends in \.xyz"):
        save_figure(figure, tmp_path / "map.xyz")
