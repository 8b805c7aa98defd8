"""Heatmaps in axes that a caller gives: a second one takes the place of the first, and labels fit after the layout."""

from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from regard.errors import ArgumentError, FileError
from regard.views import heatmap, save_figure
from regard.views.artists import thin_vertices
from regard.views.drawing import Panel
from regard.views.fonts import letter
from regard.views.heatmap import heatmap_grid
from tests.views.written_dates import softmax


def drawn(figure: Any) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba()).copy()


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
