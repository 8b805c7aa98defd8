"""Margins, distances, positions and training: the drawn numbers are those that other code computes."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg

import regard
from regard.errors import ArgumentError, NonFiniteError, RegardError, RunFolderError, ShapeError
from regard.views import DARK, alignment, head_distances, position_table, training_curves
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


def test_distances_of_heads() -> None:
    q = torch.randn(2, 3, 11, 4)
    maps = [regard.attention(q * n, q, q, return_weights=True).weights for n in (1, 3)]
    ax: Any = head_distances(maps).axes[0]
    apart = (torch.arange(11)[:, None] - torch.arange(11)).abs()
    expected = np.array([(one.dense() * apart).sum(-1).mean((0, 2)).numpy() for one in maps])
    for head in range(3):
        np.testing.assert_allclose(ax.lines[head].get_ydata(), expected[:, head], rtol=1e-4)
    np.testing.assert_allclose(ax.lines[3].get_ydata(), expected.mean(1), rtol=1e-4)


def test_a_table_of_positions() -> None:
    table = torch.randn(10, 6)
    figure = position_table(table)
    numbers, cosines = (np.asarray(ax.get_images()[0].get_array()) for ax in figure.axes[:2])
    np.testing.assert_allclose(numbers, table, rtol=1e-6)
    pairs = torch.nn.functional.cosine_similarity(table[:, None], table[None], dim=-1)
    np.testing.assert_allclose(cosines, pairs, atol=1e-6)


def write(path: Path, events: list[Any]) -> Path:
    path.mkdir()
    (path / "metrics.jsonl").write_text("\n".join(json.dumps(event) for event in events), encoding="utf-8")
    return path


def test_curves_of_runs(tmp_path: Path) -> None:
    events = [{"event": "train", "step": n, "loss": 3.0 / n} for n in (1, 2, 3)]
    valid = [{"event": "valid", "step": n, "loss": loss} for n, loss in ((2, 1.0), (3, 2.0))]
    one = write(tmp_path / "one", [*events, *valid])
    other = write(tmp_path / "$\\no$", [*events[:2], {"event": "other"}])
    ax: Any = training_curves([one, other / "metrics.jsonl"], title="two").axes[0]
    drawn = [(list(line.get_xdata()), list(line.get_ydata())) for line in ax.lines]
    assert drawn[:3] == [([1, 2, 3], [3.0, 1.5, 1.0]), ([2, 3], [1.0, 2.0]), ([2], [1.0])]
    assert drawn[3] == ([1, 2], [3.0, 1.5])
    FigureCanvasAgg(ax.figure).draw()
    half = one / "metrics.jsonl"
    half.write_text(half.read_text() + '\n{"event": "tr')
    assert len(training_curves(one).axes[0].lines) == 3


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda folder: training_curves(folder / "none"), RunFolderError, "is missing"),
        (lambda folder: training_curves([]), ArgumentError, "no runs"),
        (lambda folder: training_curves(write(folder / "a", [{}, {}])), RunFolderError, "line 1: no event"),
        (lambda folder: training_curves(write(folder / "b", [{"event": "x"}])), RunFolderError, "holds no loss"),
        (lambda folder: position_table(torch.ones(3)), ShapeError, r"\(3,\)"),
        (lambda folder: position_table(torch.full((2, 2), torch.nan)), NonFiniteError, "finite"),
        (lambda folder: alignment(-np.eye(2)), ArgumentError, "from 0 up"),
        (lambda folder: alignment(np.eye(300)), ArgumentError, "at most 256"),
    ],
)
def test_what_cannot_be_drawn_is_refused(ask: Any, error: type[RegardError], says: str, tmp_path: Path) -> None:
    with pytest.raises(error, match=says):
        ask(tmp_path)
