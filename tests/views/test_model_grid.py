"""Pictures and pages of whole models: every value where it belongs, whatever the length."""

import json
import re
from collections.abc import Callable
from typing import Any, cast

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

import regard
from regard import page
from regard.errors import ArgumentError, ShapeError
from regard.views import model_example, model_grid
from regard.views.model import GAP


def maps_of(length: int = 20, layers: int = 2, heads: int = 3, batch: int = 2) -> list[regard.AttentionMap]:
    made = []
    for _ in range(layers):
        q = torch.randn(batch, heads, length, 4)
        made.append(regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights)
    return made


def image_of(figure: Figure) -> np.ndarray:
    FigureCanvasAgg(figure).draw()
    (image,) = figure.axes[0].get_images()
    return np.asarray(image.get_array().filled(np.nan))


@pytest.mark.parametrize(("length", "cells", "times"), [(20, 20, 14), (20, 45, 14), (301, 32, 9), (400, 400, 1)])
@pytest.mark.parametrize("how", ["max", "mean"])
def test_every_head_stands_in_its_place(length: int, cells: int, times: int, how: Any) -> None:
    maps = maps_of(length)
    dots = image_of(model_grid(maps, sequence=1, cells=cells, how=how))
    side = min(length, cells) * times
    assert dots.shape == (2 * side + GAP, 3 * side + 2 * GAP)
    for layer, weights in enumerate(maps):
        for head in range(3):
            top, left = layer * (side + GAP), head * (side + GAP)
            expected = weights[1, head].pooled(cells, cells, how).numpy().repeat(times, 0).repeat(times, 1)
            shown = dots[top : top + side, left : left + side]
            hidden = np.isnan(shown)
            np.testing.assert_allclose(shown[~hidden], expected[~hidden], rtol=0, atol=1e-6)
            # A causal mask hides what is above the diagonal, block by block.
            blocks = hidden[::times, ::times]
            np.testing.assert_array_equal(blocks, np.triu(np.ones_like(blocks), 1))
    assert np.isnan(dots[side : side + GAP]).all()
    assert np.isnan(dots[:, side : side + GAP]).all()


def test_what_is_written_on_it() -> None:
    figure = model_grid(maps_of(300), title="two layers")
    ax = figure.axes[0]
    assert [t.get_text() for t in ax.get_yticklabels()] == ["0", "1"]
    assert [t.get_text() for t in ax.get_xticklabels()] == ["head 0", "head 1", "head 2"]
    assert figure.texts[0].get_text() == "two layers (max of 2.34 × 2.34 weights a dot)"
    assert [text.get_text() for text in model_grid(maps_of(20)).texts] == ["masked"]
    assert figure.axes[1].get_xlabel() == "attention weight, square-root scale; rows look at columns"


def test_layers_of_other_shapes_share_a_picture() -> None:
    q, k = torch.randn(1, 2, 5, 4), torch.randn(1, 2, 9, 4)
    cross = regard.attention(q, k, k, return_weights=True).weights
    dots = image_of(model_grid([cross, maps_of(9, 1, 4, 1)[0]], cells=9))
    side, shorter = 24 * 9, 24 * 5
    assert dots.shape == (side + GAP + side, 4 * side + 3 * GAP)
    assert np.isnan(dots[shorter:side]).all()
    assert np.isnan(dots[:side, 2 * side + GAP :]).all()


def test_a_small_model_fills_the_figure() -> None:
    """Its stripes are seen: the longer side is about six inches, whatever the number of values."""
    for length in (13, 20, 23, 40, 60):
        figure = model_grid(maps_of(length, 2, 4, 1))
        box = figure.axes[0].get_position()
        assert 4.5 <= figure.get_size_inches()[0] * box.width <= 6.05


def test_a_watched_model_as_a_picture_and_as_a_page() -> None:
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(torch.randn(1, 6, 16))
    figure = model_grid(seen)
    assert [t.get_text() for t in figure.axes[0].get_yticklabels()] == ["layer 0", "layer 1"]
    words = list("abcdef")
    example = model_example(seen, words, title="six")
    assert list(example.maps) == [name for name, _ in seen]
    for name, weights in seen.items():
        assert torch.equal(example.maps[name[0]].weights.dense(), weights[0].dense())
        assert example.maps[name[0]].rows == example.maps[name[0]].columns == words
    data = json.loads(re.search(r"<script[^>]*json[^>]*>(.*?)</script>", page([example]).text, re.DOTALL)[1])
    assert [one["texts"] for one in data["examples"][0]["labels"]] == [words]
    assert [one["layer"] for one in data["examples"][0]["maps"]] == ["0", "1"]


def test_labels_go_where_they_fit() -> None:
    q, k = torch.randn(1, 2, 2, 4), torch.randn(1, 2, 3, 4)
    cross = regard.attention(q, k, k, return_weights=True).weights
    one = model_example([cross], ["x", "y"], ["a", "b", "c"]).maps["0"]
    assert (one.rows, one.columns) == (["x", "y"], ["a", "b", "c"])
    assert model_example([cross], ["x", "y"]).maps["0"].columns is None


@pytest.mark.parametrize(
    ("ask", "error", "message"),
    [
        (lambda m: model_grid(m, sequence=2), ShapeError, r"in \[0, 2\), got 2"),
        (lambda m: model_grid([]), ArgumentError, "no maps"),
        (lambda m: model_grid(m, cells=0), ArgumentError, "cells must be at least 1"),
        (lambda m: model_grid(m, scale=cast(Any, "cubic")), ArgumentError, "'cubic'"),
        (lambda m: model_grid(m, limits=(1, 0)), ArgumentError, "1.0 and 0.0"),
        (lambda m: model_grid(m, how=cast(Any, "sum")), ArgumentError, "'sum'"),
        (lambda m: model_example(m, ["a"]), ShapeError, "1 labels came for maps of 20 tokens"),
    ],
)
def test_a_wrong_argument_is_named(ask: Callable[..., Any], error: type[regard.RegardError], message: str) -> None:
    with pytest.raises(error, match=message):
        ask(maps_of())


def test_no_token_is_refused_and_no_key_is_drawn() -> None:
    with pytest.raises(ArgumentError, match="at least 1 bin of queries"):
        model_grid((torch.zeros(1, 2, 0, 0),))
    q = torch.randn(1, 2, 4, 8)
    assert model_grid([regard.map_of(q, q, mask=regard.lengths(torch.tensor([0])))]).axes
