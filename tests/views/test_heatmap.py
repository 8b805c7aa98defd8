"""Heatmaps: the picture has the given weights, in every script, and nothing else of matplotlib is touched."""

import logging
import subprocess
import sys
from collections.abc import Iterable, Sequence
from typing import Any

import matplotlib
import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.font_manager import fontManager

from regard.errors import ArgumentError, MissingExtraError, ShapeError
from regard.views import fonts
from regard.views.drawing import Panel
from regard.views.fonts import letter
from regard.views.heatmap import head_panels, heatmap, heatmap_grid
from regard.views.layout import FigureSize, flow
from regard.views.model import model_grid
from regard.views.reading_order import visual_order
from tests.views.written_dates import LOCALES, softmax, words, written

# In Unicode, and in no font: the last code points of a plane are never characters.
NO_CHARACTER = "\U0001fffe"
NO_FORMULA = r"$\no$"


def drawn(figure: Any) -> np.ndarray:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    return np.asarray(canvas.buffer_rgba())


def texts(labels: Iterable[Any]) -> list[str]:
    return [label.get_text() for label in labels]


def test_cells_hold_the_weights_and_ticks_the_labels() -> None:
    weights = softmax(3, 5)
    ax = heatmap(torch.from_numpy(weights), ["x", "y", "z"], list("abcde"), title=NO_FORMULA)
    (image,) = ax.get_images()
    np.testing.assert_array_equal(image.get_array(), weights)
    assert image.get_clim() == (0, weights.max())
    assert texts(ax.get_xticklabels()) == list("abcde")
    assert texts(ax.get_yticklabels()) == ["x", "y", "z"]
    assert ax.yaxis_inverted()
    assert not ax.xaxis_inverted()


def test_dollars_are_not_mathematics() -> None:
    """matplotlib raises when it takes a text for a formula that it cannot read."""
    ax = heatmap(np.eye(2), [NO_FORMULA, "a"], [NO_FORMULA, "b"], title=NO_FORMULA)
    drawn(ax.figure)
    drawn(heatmap_grid([Panel(np.eye(2))], title=NO_FORMULA))
    assert ax.get_title(loc="left") == texts(ax.get_xticklabels())[0] == texts(ax.get_yticklabels())[0] == NO_FORMULA


@pytest.mark.parametrize("locale", LOCALES)
def test_every_script_is_drawn_with_its_own_letters(locale: str, logged: list[logging.LogRecord]) -> None:
    """No tofu: matplotlib warns of a missing glyph, and warnings are errors here."""
    text = written(locale)
    panels = [Panel(softmax(2, len(labels)), None, labels, text) for labels in (words(text), list(text))]
    figure = heatmap_grid(panels, title=locale)
    figure.set_dpi(50)
    drawn(figure)
    assert not [record for record in logged if "matplotlib" in record.name]
    assert not any(lettering.missing for lettering in letter(list(text)))


def test_without_font_packages_labels_are_code_points_and_one_warning_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    default = [entry for entry in fontManager.ttflist if entry.name == "DejaVu Sans"]
    monkeypatch.setattr(fontManager, "ttflist", default)
    monkeypatch.setattr(fonts, "PACKAGES", ("no_such_package",))
    fonts._packaged.cache_clear()
    try:
        with pytest.warns(UserWarning, match="no font has 日 年: labelled by code point") as caught:
            ax = heatmap(np.eye(2), ["2日", "x"], ["年", "年"], title="日")
    finally:
        fonts._packaged.cache_clear()
    assert len(caught) == 1
    assert texts(ax.get_yticklabels()) == ["2 U+65E5", "x"]
    assert texts(ax.get_xticklabels()) == ["U+5E74"] * 2
    drawn(ax.figure)


def test_a_character_that_no_font_has_is_spelt() -> None:
    (lettering,) = letter([f"a{NO_CHARACTER}"])
    assert lettering.text == "a U+1FFFE"
    assert lettering.missing == NO_CHARACTER


def test_han_characters_follow_the_language_of_the_axis() -> None:
    assert letter(["曜", "の"])[0].families == ("regard Noto Sans CJK JP",)
    assert letter(["曜"])[0].families == ("regard Noto Sans CJK SC",)


def test_a_right_to_left_axis_starts_at_the_right_and_its_numbers_at_the_left() -> None:
    labels, weights = [*"יום 2046", "<eos>"], softmax(2, 9)
    ax = heatmap(weights, ["a", "b"], labels)
    assert not ax.xaxis_inverted()
    assert "".join(texts(ax.get_xticklabels())) == "<eos>2046␣םוי"
    np.testing.assert_array_equal(ax.get_images()[0].get_array(), weights[:, [8, 4, 5, 6, 7, 3, 2, 1, 0]])


def test_many_labels_are_thinned_and_long_maps_pooled_and_the_title_says_so() -> None:
    labels = [f"token{i}" for i in range(200)]
    ax = heatmap(softmax(200, 200), labels, labels)
    shown = [round(position) for position in ax.get_yticks()]
    assert 40 < len(shown) < 110
    assert texts(ax.get_yticklabels()) == [labels[position] for position in shown]
    pooled = heatmap(softmax(200, 200), max_cells=50, title="head 3")
    assert pooled.get_images()[0].get_array().shape == (50, 50)
    assert pooled.get_title(loc="left") == "head 3 (max of 4 × 4 weights a cell)"


def overlaps(boxes: Sequence[Any]) -> list[tuple[Any, Any]]:
    return [
        (a, b)
        for i, a in enumerate(boxes)
        for b in boxes[i + 1 :]
        if a.x0 < b.x1 and b.x0 < a.x1 and a.y0 < b.y1 and b.y0 < a.y1
    ]


def test_a_grid_of_sentences_keeps_panels_apart() -> None:
    panels = [
        Panel(softmax(11, len(words(written(x)))), [*"2026-11-21", "⟨/s⟩"], words(written(x)), written(x))
        for x in LOCALES[::2]
    ]
    figure = heatmap_grid(panels, title="Alignments")
    drawn(figure)
    wide = heatmap_grid([np.eye(2)], title="Attention of a model with a long name, mean of 4 heads")
    wider = [heatmap_grid([Panel(np.eye(2), title="x" * n)], title="x" * n).get_size_inches()[0] for n in (60, 300)]
    assert wider[0] == pytest.approx(wider[1], rel=0.05)
    drawn(wide)
    assert wide.texts[0].get_window_extent().x1 < wide.bbox.x1 - 10
    assert len(figure.axes) == 14  # And the colour bar.
    assert not overlaps([ax.get_tightbbox() for ax in figure.axes])
    for ax, panel in zip(figure.axes, panels, strict=False):
        order = visual_order(panel.columns or [])
        np.testing.assert_array_equal(ax.get_images()[0].get_array(), panel.weights[:, order])


@pytest.mark.parametrize("scale", ["sqrt", "linear", "log", "row"])
def test_figures_without_titles_of_axes_say_which_way_they_are_read(scale: Any) -> None:
    weights = torch.from_numpy(softmax(2, 2))
    for figure in (heatmap_grid([weights], scale=scale), model_grid([weights[None, None]], scale=scale)):
        drawn(figure)
        label = figure.axes[-1].xaxis.label
        assert label.get_text().endswith("; rows look at columns")
        assert label.get_window_extent().x1 < figure.bbox.x1
    own = heatmap(weights, scale=scale).figure
    assert "rows" not in own.axes[-1].get_xlabel()


def test_heads_of_a_layer_across_as_asked() -> None:
    weights = torch.from_numpy(softmax(6, 3, 4))
    figure = heatmap_grid(head_panels(weights, list("abc"), list("wxyz")), across=3)
    tops = [round(ax.get_position().y1, 3) for ax in figure.axes[:6]]
    assert len(set(tops[:3])) == len(set(tops[3:])) == 1
    assert tops[0] > tops[3]
    with pytest.raises(ShapeError, match=r"\(3, 4\)"):
        head_panels(weights[0])


@pytest.mark.parametrize(("count", "rows"), [(6, 1), (7, 3), (12, 3)])
def test_panels_stand_side_by_side_while_they_fit_and_then_fill_rows(count: int, rows: int) -> None:
    size = FigureSize(width=1, height=1, left=0, above=0, title=0)
    figure, boxes = flow([size] * count)
    assert len({box.top for box in boxes}) == rows
    assert figure.width >= max(box.left + box.width for box in boxes)


def test_weights_beyond_the_limits_point_the_colour_bar() -> None:
    ax = heatmap(np.array([[0.5, 3.0]]), limits=(0, 1))
    assert ax.get_images()[0].colorbar.extend == "max"
    for limits in (None, (0, 3)):
        assert heatmap(np.array([[0.5, 3.0]]), limits=limits).get_images()[0].colorbar.extend == "neither"


def test_axes_of_the_caller_are_drawn_into_and_nothing_else_changes() -> None:
    before = dict(matplotlib.rcParams)
    figure = Figure(layout="constrained")
    left, right = figure.subplots(1, 2)
    assert heatmap(np.eye(3), ax=left, title="土") is left
    assert not right.get_images()
    drawn(figure)
    assert dict(matplotlib.rcParams) == before
    ours = [entry.name for entry in fontManager.ttflist if "manimgx" in entry.fname]
    assert ours
    assert all(name.startswith("regard ") for name in ours)


def test_empty_grids_and_missing_matplotlib_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ArgumentError, match="got 0"):
        heatmap_grid([])
    with pytest.raises(ArgumentError, match="and 0"):
        heatmap_grid([Panel(np.eye(2))], across=0)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"regard\[view\]"):
        heatmap(np.eye(2))


def test_importing_the_views_imports_no_matplotlib_and_drawing_no_pyplot() -> None:
    program = """
import sys, numpy, regard.views
assert "matplotlib" not in sys.modules
regard.views.heatmap(numpy.eye(2)).figure.savefig("/dev/null", format="png")
assert "matplotlib.pyplot" not in sys.modules
"""
    subprocess.run([sys.executable, "-W", "error", "-c", program], check=True)
