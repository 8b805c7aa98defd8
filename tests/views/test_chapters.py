"""The figures of the textbooks' chapters: curves, one row in numbers, rotations, and the alignment of a translator."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, NonFiniteError, NotSeenError, ShapeError
from regard.models import RNNConfig, RNNSeq2Seq, Transformer, TransformerConfig
from regard.nn import SinusoidalPositions
from regard.views import arithmetic_of_row, curves, model_grid, rotations, row_arithmetic
from regard.views.layer_names import short_names

X = np.linspace(0, 1, 7)


def table_of_the_paper(length: int, dim: int) -> np.ndarray:
    """Vaswani et al. 2017, section 3.5, as it stands there."""
    table = np.zeros((length, dim))
    for position in range(length):
        for i in range(dim // 2):
            angle = position / 10000 ** (2 * i / dim)
            table[position, 2 * i], table[position, 2 * i + 1] = math.sin(angle), math.cos(angle)
    return table


def test_columns_of_positions_are_curves() -> None:
    table = SinusoidalPositions(32)(torch.zeros(60, 32))
    figure = curves(range(60), table[:, 6:10], [f"column {n}" for n in range(6, 10)], axis_titles=("position", ""))
    lines = figure.axes[0].get_lines()
    for line, column in zip(lines, table_of_the_paper(60, 32)[:, 6:10].T, strict=True):
        np.testing.assert_allclose(np.asarray(line.get_ydata(), float), column, atol=1e-5)
    assert len({line.get_linestyle() for line in lines}) == len({line.get_color() for line in lines}) == 4
    assert figure.axes[0].get_xlabel() == "position"


def test_kernel_regression_has_points_a_truth_and_a_band() -> None:
    figure = curves(X, X**2, ["estimate"], points=(X[::2], X[::2]), truth=X, band=0.1 + 0 * X)
    ax = figure.axes[0]
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["estimate", "truth", "data"]
    edges = ax.collections[0].get_paths()[0].vertices
    assert np.asarray(edges)[:, 1].max() == pytest.approx(1.1)
    np.testing.assert_array_equal(ax.get_lines()[2].get_xdata(), X[::2])
    assert curves(X, X).axes[0].get_legend() is None


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"y": X[1:]}, ShapeError), ({"y": np.zeros((2, 2, 2))}, ShapeError), ({"y": "ab"}, ShapeError),
        ({"y": X, "names": ["a", "b"]}, ShapeError), ({"y": X, "truth": [1]}, ShapeError),
        ({"y": X, "points": (X, X[1:])}, ShapeError), ({"y": X, "band": 3}, ShapeError),
        ({"x": X * np.nan, "y": X}, NonFiniteError), ({"x": [], "y": []}, ShapeError),
    ],
)  # fmt: skip
def test_curves_that_do_not_fit(given: dict[str, Any], error: type[Exception]) -> None:
    with pytest.raises(error):
        curves(**{"x": X, **given})


@pytest.mark.parametrize("mask", [None, regard.causal()])
def test_the_numbers_of_a_row_are_those_of_the_formula(mask: regard.Mask | None) -> None:
    query, key, value = torch.randn(4, 3), torch.randn(4, 3), torch.randn(4, 2)
    steps = arithmetic_of_row(query, key, value, 1, mask=mask)
    scores = key.double() @ query[1].double() / math.sqrt(3)
    if mask is not None:
        scores[2:] = -torch.inf
    torch.testing.assert_close(steps.scores, scores)
    torch.testing.assert_close(steps.weights, scores.softmax(0))
    torch.testing.assert_close(steps.output, scores.softmax(0) @ value.double())


def test_the_picture_of_a_row_prints_its_numbers() -> None:
    query, key, value = torch.randn(3, 3, 2)
    figure = row_arithmetic(query, key, value, 1, ["I", "see", "you"], mask=regard.causal())
    steps = arithmetic_of_row(query, key, value, 1, mask=regard.causal())
    printed = [[text.get_text() for text in ax.texts if text.get_visible()] for ax in figure.axes]
    expected = [steps.query, steps.keys, steps.scores[:2], steps.weights[:2], steps.values, steps.output]
    assert printed == [[f"{number:.2f}" for number in part.flatten().tolist()] for part in expected]
    assert [label.get_text() for label in figure.axes[1].get_yticklabels()] == ["I", "see", "you"]
    assert not figure.axes[2].get_yticklabels()


def test_a_row_that_cannot_be_drawn() -> None:
    x = torch.randn(3, 2)
    with pytest.raises(ArgumentError, match="row must be one of 3 queries; got 3"):
        row_arithmetic(x, x, x, 3)
    with pytest.raises(ShapeError, match="must be matrices"):
        row_arithmetic(x[None], x, x)
    with pytest.raises(ArgumentError, match="choose some"):
        row_arithmetic(torch.randn(30, 2), torch.randn(30, 2), torch.randn(30, 2))


@pytest.mark.parametrize("layout", ["Half", "Interleaved"])
def test_rotations_turn_by_their_frequency(layout: str) -> None:
    rotary = regard.Rotary(8, layout=getattr(regard.call.rotary, layout)())
    figure = rotations(rotary, 5, [0, 1])
    for plane, ax in enumerate(figure.axes):
        tips = [note.xy for note in ax.texts if hasattr(note, "xy")]
        angles = [n * 10_000 ** (-2 * plane / 8) for n in range(5)]
        np.testing.assert_allclose(tips, [(math.cos(angle), math.sin(angle)) for angle in angles], atol=1e-6)
    wrong: Any
    for wrong in ({"planes": [4]}, {"planes": []}, {"positions": 0}, {"planes": [-1]}):
        with pytest.raises(ArgumentError, match=r"planes in \[0, 4\)"):
            rotations(rotary, **wrong)


class Bahdanau(nn.Module):
    """A decoder with additive attention, as tutorials write it."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.GRU(4, 8, batch_first=True), nn.GRUCell(12, 8)
        self.w_q, self.w_k, self.v = nn.Linear(8, 6), nn.Linear(8, 6), nn.Linear(6, 1)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        memory, last = self.encoder(source)
        state, outputs = last[0], []
        for step in target.unbind(1):
            scores = self.v(torch.tanh(self.w_q(state)[:, None] + self.w_k(memory))).mT
            context = torch.bmm(scores.softmax(-1), memory)[:, 0]
            state = self.decoder(torch.cat([step, context], -1), state)
            outputs.append(state)
        return torch.stack(outputs, 1)


def test_the_alignment_of_any_translator() -> None:
    tokens = torch.randint(4, 9, (2, 5)), torch.tensor([5, 4]), torch.randint(4, 9, (2, 3))
    sizes: dict[str, Any] = {"source_vocab_size": 9, "target_vocab_size": 9}
    model: nn.Module = Transformer(TransformerConfig(dim=8, num_heads=2), **sizes).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(*tokens)
    assert seen.alignment().shape == (2, 2, 3, 5)
    torch.testing.assert_close(seen.alignment(0).dense(), seen["decoder.0.cross_attention", 0].dense())
    with pytest.raises(ArgumentError, match="layer must be one of 3 layers"):
        seen.alignment(3)
    model = RNNSeq2Seq(RNNConfig(embedding_dim=4, hidden_dim=8, attention_dim=4), **sizes).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        model(*tokens)
    assert seen.alignment().shape[-2:] == (3, 5)
    with torch.no_grad(), regard.watch(Bahdanau()) as seen:
        seen.modules[""](torch.randn(2, 5, 4), torch.randn(2, 3, 4))
    assert seen.alignment().shape[-2:] == (3, 5)


def test_a_model_without_a_source_has_no_alignment() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, batch_first=True).eval()
    with torch.no_grad(), regard.watch(layer) as seen:
        layer(torch.randn(1, 6, 8))
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
