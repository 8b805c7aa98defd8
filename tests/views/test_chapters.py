"""The figures of the textbooks' chapters: one row in numbers, rotary positions, and the alignment of a translator."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, NonFiniteError, NotSeenError, RegardError, ShapeError
from regard.models import RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig
from regard.views import DARK, Panel, alignment, heatmap_grid, model_grid, position_table
from regard.views.display import bundle
from regard.views.model import short_names
from tests.modules import watching
from tests.views.written_dates import softmax


@pytest.mark.parametrize("mask", [None, regard.causal()])
def test_the_picture_of_a_row_prints_its_numbers(mask: regard.Mask | None) -> None:
    query, keys, words = torch.randn(2), torch.randn(3, 2), ["I", "see", "you"]
    scores = keys @ query / math.sqrt(2)
    shown = None if mask is None else mask.to_tensor(3, 3)[1][:, None]
    panels = [Panel(query[None], title="q"), Panel(keys, words, title="k"), Panel(scores[:, None], words, mask=shown)]
    figure = heatmap_grid(panels, scale="linear", annotate=True)
    printed = [[text.get_text() for text in ax.texts if text.get_visible()] for ax in figure.axes[:3]]
    expected = [query, keys, scores if mask is None else scores[:2]]
    assert printed == [[f"{number:.2f}" for number in part.flatten().tolist()] for part in expected]
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == words


@pytest.mark.parametrize("layout", ["Half", "Interleaved"])
def test_a_rotary_shows_each_pair_turned_by_its_frequency(layout: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drawn: list[Tensor] = []
    rotary = regard.Rotary(8, layout=getattr(regard.call.rotary, layout)())
    monkeypatch.setattr(
        "regard.views.display.position_table", lambda table, **_: drawn.append(table) or position_table(table)
    )
    bundle(rotary)
    angles = torch.arange(64)[:, None] * 10_000 ** (-torch.arange(4) / 4)
    first, second = rotary.layout.split(torch.arange(8))
    torch.testing.assert_close(drawn[0][:, first], angles.cos(), atol=1e-5, rtol=0)
    torch.testing.assert_close(drawn[0][:, second], angles.sin(), atol=1e-5, rtol=0)


def test_the_alignment_of_any_translator() -> None:
    tokens = torch.randint(4, 9, (2, 5)), torch.tensor([5, 4]), torch.randint(4, 9, (2, 3))
    sizes: dict[str, Any] = {"source_vocab_size": 9, "target_vocab_size": 9}
    model: nn.Module = Transformer(TransformerConfig(dim=8, num_heads=2), **sizes).eval()
    seen = watching(model)(*tokens)
    assert seen.alignment().shape == (2, 2, 3, 5)
    torch.testing.assert_close(seen.alignment(0).dense(), seen["decoder.0.cross_attention", 0].dense())
    with pytest.raises(ArgumentError, match="layer must be one of 3 layers"):
        seen.alignment(3)
    model = RNNSeq2Seq(RNNConfig(embedding_dim=4, hidden_dim=8, attention_dim=4), **sizes).eval()
    seen = watching(model)(*tokens)
    assert seen.alignment().shape[-2:] == (3, 5)


def test_a_model_without_a_source_has_no_alignment() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    seen = watching(layer)(torch.randn(1, 6, 8))
    with pytest.raises(NotSeenError, match="no call that was read attends from one sequence to another"):
        seen.alignment()


def test_layers_are_named_by_the_parts_that_differ() -> None:
    paths = [f"encoder.layer.{n}.attention.self" for n in range(8)]
    assert short_names(paths) == [f"layer {n}" for n in range(8)]
    maps = {path: regard.map_of(*torch.randn(2, 1, 2, 4, 3)) for path in paths}
    labels = [label.get_text() for label in model_grid(maps).axes[0].get_yticklabels()]
    assert labels == [f"layer {n}" for n in range(8)]
    assert short_names(["a", "a"]) == ["a", "a"]
    assert short_names(["a.0", "a"]) == ["0", "a"]


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
