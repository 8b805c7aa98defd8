"""Each figure of five tutorials by a call or two: its numbers by the tutorial's own formula, its picture by structure.

The tutorials: Dive into Deep Learning, chapter 11 (d2l.ai); The Annotated Transformer (Harvard NLP); Translation with a
sequence to sequence network (pytorch.org); UvA Deep Learning, tutorial 6; Self-attention from scratch (S. Raschka).
"""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

import regard
from regard.models import NadarayaWatson
from regard.nn import AdditiveAttention, MultiHeadAttention, SinusoidalPositions
from regard.views import (
    Panel,
    arithmetic_of_row,
    curves,
    head_panels,
    heatmap,
    heatmap_grid,
    model_grid,
    position_table,
    row_arithmetic,
)
from tests.views.test_chapters import table_of_the_paper

FRENCH, ENGLISH = ["elle", "est", "trop", "petit", ".", "<EOS>"], ["she", "is", "too", "short", "."]


class Plot(NamedTuple):
    """One plot of a figure with an image."""

    numbers: Any
    title: str
    queries: list[str]
    keys: list[str]
    axes: tuple[str, str]


def plots(drawn: Any) -> list[Plot]:
    """The plots of a figure, or of the figure of axes, whose images are maps."""
    figure: Any = drawn if isinstance(drawn, Figure) else drawn.figure
    return [
        Plot(
            np.ma.filled(ax.get_images()[0].get_array(), 0.0), ax.get_title(loc="left"),
            [label.get_text() for label in ax.get_yticklabels()], [label.get_text() for label in ax.get_xticklabels()],
            (ax.get_ylabel(), ax.get_xlabel()),
        )
        for ax in figure.axes if ax.get_images()
    ]  # fmt: skip


def same(found: Any, expected: Tensor) -> None:
    torch.testing.assert_close(torch.as_tensor(np.asarray(found, float)), expected.double(), atol=2e-5, rtol=1e-4)


# -- Dive into Deep Learning, chapter 11 ---------------------------------------------------------------


def show_heatmaps(weights: Tensor) -> tuple[Tensor, tuple[str, str]]:
    """The data of d2l.show_heatmaps(matrices, xlabel="Keys", ylabel="Queries")."""
    return weights[0, 0], ("Queries", "Keys")


def test_d2l_queries_keys_and_values() -> None:
    weights = torch.eye(10).reshape((1, 1, 10, 10))
    (plot,) = plots(heatmap(weights, axis_titles=("Queries", "Keys")))
    expected, axes = show_heatmaps(weights)
    same(plot.numbers, expected)
    assert plot.axes == axes


KERNELS = {
    "gaussian": (regard.Gaussian, lambda x: torch.exp(-(x**2) / 2)),
    "boxcar": (regard.Boxcar, lambda x: (torch.abs(x) < 1.0).float()),
    "constant": (regard.Constant, lambda x: 1.0 + 0 * x),
    "triangular": (regard.Triangular, lambda x: torch.max(1 - torch.abs(x), torch.zeros_like(x))),
}
"""The kernels of section 11.2; its "Epanechikov" is our triangular one."""


def f(x: Tensor) -> Tensor:
    return 2 * torch.sin(x) + x


@pytest.mark.parametrize("kernel", KERNELS)
def test_d2l_the_shapes_of_kernels(kernel: Any) -> None:
    score, formula = KERNELS[kernel]
    x = torch.arange(-2.5, 2.5, 0.1)
    steps = arithmetic_of_row(torch.zeros(1, 1), x[:, None], x[:, None], 0, score=score(1.0))
    figure = curves(x, steps.scores.exp(), axis_titles=("x", kernel))
    same(figure.axes[0].get_lines()[0].get_ydata(), formula(x))


@pytest.mark.parametrize("kernel", KERNELS)
def test_d2l_nadaraya_watson_regression_and_its_weights(kernel: Any) -> None:
    x_train, _ = torch.sort(torch.rand(40) * 5)
    y_train, x_val = f(x_train) + torch.randn(40), torch.arange(0, 5, 0.1)
    k = KERNELS[kernel][1](x_train[:, None] - x_val[None])
    attention_w = k / k.sum(0)

    model = NadarayaWatson(kernel=kernel, width=1.0).fit(x_train[:, None], y_train)
    estimate = model.predict(x_val[:, None])
    figure = curves(x_val, estimate, ["y_hat"], points=(x_train, y_train), truth=f(x_val))
    fitted, truth, data = figure.axes[0].get_lines()
    known = ~attention_w.isnan().any(0)
    same(np.asarray(fitted.get_ydata())[known], (y_train @ attention_w)[known])
    same(truth.get_ydata(), f(x_val))
    assert len(np.asarray(data.get_xdata())) == 40
    (plot,) = plots(heatmap(model.attention_map(x_val[:, None]), axis_titles=("validation inputs", "training inputs")))
    same(plot.numbers[known], attention_w.T[known])


def test_d2l_widths_and_the_one_that_leave_one_out_chooses() -> None:
    sigmas = (0.1, 0.2, 0.5, 1.0)
    x_train, _ = torch.sort(torch.rand(40, dtype=torch.float64) * 5)
    y_train, x_val = f(x_train) + torch.randn(40), torch.arange(0, 5, 0.1, dtype=torch.float64)
    models = [NadarayaWatson(width=sigma).fit(x_train[:, None], y_train) for sigma in sigmas]
    figure = heatmap_grid([Panel(m.attention_map(x_val[:, None]), title=f"Sigma {m.width}") for m in models])
    for plot, sigma in zip(plots(figure), sigmas, strict=True):
        k = torch.exp(-((x_train - x_val[:, None]) ** 2) / (2 * sigma**2))
        same(plot.numbers, k / k.sum(1, keepdim=True))
        assert plot.title == f"Sigma {sigma}"

    def error(sigma: float) -> float:
        k = torch.exp(-((x_train - x_train[:, None]) ** 2) / (2 * sigma**2)).fill_diagonal_(0)
        return float(((k @ y_train) / k.sum(1) - y_train).square().sum())

    assert NadarayaWatson(width="loo", widths=sigmas).fit(x_train[:, None], y_train).width_ == min(sigmas, key=error)


def test_d2l_masked_softmax_and_scoring_functions() -> None:
    scores = torch.rand(2, 2, 4)
    weights = regard.masked_softmax(scores, regard.lengths(torch.tensor([2, 3])))
    for sequence, length in enumerate((2, 3)):
        same(weights[sequence, :, :length], scores[sequence, :, :length].softmax(-1))
        assert not weights[sequence, :, length:].any()
    queries, keys, values = (
        torch.normal(0, 1, (2, 1, 20)),
        torch.normal(0, 1, (2, 10, 2)),
        torch.normal(0, 1, (2, 10, 4)),
    )
    attend = AdditiveAttention(query_dim=20, key_dim=2, hidden_dim=8).eval()
    lengths = regard.lengths(torch.tensor([2, 6]))
    with torch.no_grad():
        _, seen = attend(queries, keys, values, mask=lengths, return_weights=True)
    (plot,) = plots(heatmap(seen.dense().reshape(2, 10), axis_titles=("Queries", "Keys")))
    assert plot.numbers.shape == (2, 10)
    np.testing.assert_allclose(plot.numbers.sum(1), 1, atol=1e-5)
    assert not plot.numbers[0, 2:].any()
    assert not plot.numbers[1, 6:].any()


def test_d2l_multi_head_attention() -> None:
    attend = MultiHeadAttention(100, 5).eval()
    x = torch.randn(2, 4, 100)
    with torch.no_grad():
        _, weights = attend(x, mask=regard.lengths(torch.tensor([3, 2])), return_weights=True)
    drawn = plots(heatmap_grid(head_panels(weights[0])))
    assert [plot.title for plot in drawn] == [f"head {n}" for n in range(5)]
    for head, plot in enumerate(drawn):
        same(plot.numbers, weights.dense()[0, head])
        assert not plot.numbers[:, 3:].any()


def test_d2l_positional_encoding() -> None:
    encoding = SinusoidalPositions(32)(torch.zeros(60, 32))
    expected = torch.from_numpy(table_of_the_paper(60, 32))
    lines = curves(range(60), encoding[:, 6:10], [f"Col {d}" for d in range(6, 10)]).axes[0].get_lines()
    for line, column in zip(lines, expected[:, 6:10].T, strict=True):
        same(line.get_ydata(), column)
    (plot,) = plots(heatmap(encoding, axis_titles=("Row (position)", "Column (encoding dimension)"), scale="linear"))
    same(plot.numbers, expected)
    numbers, _ = plots(position_table(encoding))
    same(numbers.numbers, expected)


# -- The Annotated Transformer -------------------------------------------------------------------------


def test_annotated_transformer_subsequent_mask() -> None:
    def subsequent_mask(size: int) -> Tensor:
        return torch.triu(torch.ones((1, size, size)), diagonal=1).type(torch.uint8) == 0

    assert torch.equal(regard.causal().to_tensor(20), subsequent_mask(20)[0])
    (plot,) = plots(heatmap(regard.causal(), [""] * 20, [""] * 20))
    same(plot.numbers, subsequent_mask(20)[0].float())


def test_annotated_transformer_positional_encoding_of_four_dimensions() -> None:
    div_term = torch.exp(torch.arange(0, 20, 2) * -(math.log(10000.0) / 20))
    position = torch.arange(0, 100).unsqueeze(1)
    pe = torch.zeros(100, 20)
    pe[:, 0::2], pe[:, 1::2] = torch.sin(position * div_term), torch.cos(position * div_term)
    y = SinusoidalPositions(20)(torch.zeros(1, 100, 20))
    figure = curves(range(100), y[0, :, 4:8], [f"dim {p}" for p in (4, 5, 6, 7)], axis_titles=("position", "embedding"))
    for line, column in zip(figure.axes[0].get_lines(), pe[:, 4:8].T, strict=True):
        same(line.get_ydata(), column)
    legend: Any = figure.axes[0].get_legend()
    assert [text.get_text() for text in legend.get_texts()] == ["dim 4", "dim 5", "dim 6", "dim 7"]


def written_out(q: Tensor, k: Tensor, mask: Tensor | None = None) -> Tensor:
    """`attention(query, key, value, mask)` of the tutorial, without the values."""
    scores = torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1))
    return (scores if mask is None else scores.masked_fill(mask == 0, -1e9)).softmax(dim=-1)


def test_annotated_transformer_heads_of_a_layer_over_words() -> None:
    q, k = torch.randn(2, 1, 8, 6, 4)
    weights = regard.map_of(q, k, mask=regard.causal())
    drawn = plots(heatmap_grid(head_panels(weights[0], FRENCH, FRENCH), title="Decoder Self Layer 1", across=4))
    expected = written_out(q, k, torch.ones(6, 6).tril())[0]
    assert len(drawn) == 8
    for head, plot in enumerate(drawn):
        same(plot.numbers, expected[head])
        assert plot.queries == plot.keys == FRENCH


# -- Translation with a sequence to sequence network ---------------------------------------------------


class AttnDecoder(nn.Module):
    """The tutorial's BahdanauAttention within one step a word."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.Wa, self.Ua, self.Va = nn.Linear(hidden, hidden), nn.Linear(hidden, hidden), nn.Linear(hidden, 1)
        self.gru = nn.GRU(2 * hidden, hidden, batch_first=True)

    def forward(self, encoded: Tensor, words: Tensor) -> tuple[Tensor, Tensor]:
        hidden, attentions = encoded[None, :, -1], []
        for word in words.unbind(1):
            query = hidden.permute(1, 0, 2)
            scores = self.Va(torch.tanh(self.Wa(query) + self.Ua(encoded))).squeeze(2).unsqueeze(1)
            weights = torch.softmax(scores, dim=-1)
            context = torch.bmm(weights, encoded)
            _, hidden = self.gru(torch.cat((word[:, None], context), dim=2), hidden)
            attentions.append(weights)
        return hidden, torch.cat(attentions, dim=1)


def test_seq2seq_tutorial_attention_of_a_sentence() -> None:
    model = AttnDecoder(8).eval()
    with torch.no_grad(), regard.watch(model) as seen:
        _, attentions = model(torch.randn(1, 6, 8), torch.randn(1, 5, 8))
    weights = seen.alignment()
    (plot,) = plots(heatmap(weights.dense().reshape(5, 6), ENGLISH, FRENCH))
    same(plot.numbers, attentions[0])
    assert (plot.queries, plot.keys) == (ENGLISH, FRENCH)


# -- UvA Deep Learning, tutorial 6 ---------------------------------------------------------------------


def test_uva_attention_maps_of_all_layers_and_heads() -> None:
    maps = [regard.map_of(*torch.randn(2, 1, 4, 10, 8)) for _ in range(3)]
    (plot,) = plots(model_grid(maps, title="Attention maps"))
    assert plot.queries == ["0", "1", "2"]
    assert plot.keys == [f"head {n}" for n in range(4)]
    gap = 6
    side = (plot.numbers.shape[0] + gap) // 3 - gap
    dot = side // 10
    for layer, one in enumerate(maps):
        for head in range(4):
            top, left = layer * (side + gap), head * (side + gap)
            same(plot.numbers[top : top + side : dot, left : left + side : dot], one.dense()[0, head])


def test_uva_positional_encoding_over_hidden_dimensions_and_positions() -> None:
    encoding = SinusoidalPositions(48)(torch.zeros(96, 48))
    (plot,) = plots(heatmap(encoding.T, axis_titles=("Hidden dimension", "Position in sequence"), scale="linear"))
    same(plot.numbers, torch.from_numpy(table_of_the_paper(96, 48)).T)
    assert plot.axes == ("Hidden dimension", "Position in sequence")
    for dim in range(4):
        line = curves(range(16), encoding[:16, dim], axis_titles=("Position", "Encoding")).axes[0].get_lines()[0]
        wave = math.sin if dim % 2 == 0 else math.cos
        same(line.get_ydata(), torch.tensor([wave(p / 10000 ** (2 * (dim // 2) / 48)) for p in range(16)]))


# -- Self-attention from scratch -----------------------------------------------------------------------


def test_raschka_the_context_vector_of_the_second_word_in_numbers() -> None:
    sentence = ["Life", "is", "short,", "eat", "dessert", "first"]
    x, (u_query, u_key, u_value) = torch.randn(6, 3), torch.rand(3, 2, 3)
    query, keys, values = x @ u_query.T, x @ u_key.T, x @ u_value.T
    omega = query[1].matmul(keys.T)
    attention_weights = torch.softmax(omega / 2**0.5, dim=0)
    context = attention_weights.matmul(values)
    drawn = plots(row_arithmetic(query, keys, values, 1, sentence))
    titles = ["query q", "keys k", "scores s", "weights p", "values v", "output, the sum of p v"]
    assert [plot.title for plot in drawn] == titles
    expected = [query[1:2], keys, omega[:, None] / 2**0.5, attention_weights[:, None], values, context[None]]
    for plot, numbers in zip(drawn, expected, strict=True):
        same(plot.numbers, numbers)
    assert drawn[1].queries == sentence


def test_raschka_causal_attention_over_words() -> None:
    sentence = ["Life", "is", "short,", "eat", "dessert", "first"]
    q, k = torch.randn(2, 6, 4)
    (plot,) = plots(heatmap(regard.map_of(q, k, mask=regard.causal()), sentence, sentence, annotate=True))
    masked = (q @ k.T).masked_fill(torch.triu(torch.ones(6, 6), diagonal=1).bool(), -torch.inf)
    same(plot.numbers, torch.softmax(masked / 4**0.5, dim=1))
