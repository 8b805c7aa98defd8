"""Scales: a colour tells the weight, the limits are those of the data, and masked cells are no zeros."""

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_rgb

import regard
from regard.errors import ArgumentError
from regard.views import DARK, LIGHT, Theme, heatmap, heatmap_grid, model_grid
from regard.views.colours import hexadecimal, ramp
from regard.views.scales import SCALES, Limits, scale_of
from tests.views.written_dates import softmax

NAMES: list[Any] = list(SCALES)


def luminance(colour: Any) -> float:
    linear = (c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in colour)
    return sum(weight * channel for weight, channel in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


def contrast(one: Any, other: Any) -> float:
    """The contrast of WCAG 2.2, from 1 to 21."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def numbers(ax: Any) -> Any:
    return ax.get_images()[0].get_array()


def cell_colours(ax: Any) -> np.ndarray:
    figure = ax.figure
    figure.set_dpi(72)
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    dots = np.asarray(canvas.buffer_rgba())[..., :3]
    rows, columns = ax.get_images()[0].get_array().shape
    places = np.stack(np.meshgrid(np.arange(columns), np.arange(rows)), -1).reshape(-1, 2)
    x, y = ax.transData.transform(places).T
    return dots[len(dots) - 1 - y.astype(int), x.astype(int)].reshape(rows, columns, 3)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_small_weights_are_seen(theme: Theme) -> None:
    """A map of 200 random tokens: with the square root most weights are no paper, on a linear scale most are."""
    weights = regard.map_of(*torch.randn(2, 200, 16), mask=regard.causal())
    allowed = np.tril(np.ones((200, 200), bool))
    paper, seen = to_rgb(theme.paper), dict[str, float]()
    nothing = theme.colours()[0]
    for scale in ("linear", "sqrt"):
        cells = cell_colours(heatmap(weights, scale=scale, theme=theme, max_cells=200))[allowed] / 255
        colours, counts = np.unique(cells, axis=0, return_counts=True)
        unlike = [min(contrast(c, paper), contrast(c, nothing)) >= 1.1 for c in colours]
        seen[scale] = counts[unlike].sum() / counts.sum()
    assert seen["sqrt"] >= 0.7
    assert seen["linear"] < 0.2


@pytest.mark.parametrize("scale", NAMES)
@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_colours_read_back_are_the_weights(scale: Any, theme: Theme) -> None:
    weights = softmax(12, 12) * np.linspace(0.2, 1, 12)[:, None]
    ax = heatmap(weights, scale=scale, theme=theme)
    ramp = np.rint(np.array(theme.colours()) * 255)
    steps = np.abs(cell_colours(ax)[:, :, None] - ramp).sum(-1)
    assert steps.min(-1).max() <= 3
    read = scale_of(scale).values((steps.argmin(-1) + 0.5) / 256, Limits(*ax.get_images()[0].get_clim()))
    largest = weights.max(1, keepdims=True) if scale == "row" else 1.0
    expected = weights / largest
    low = ax.get_images()[0].get_clim()[0]
    assert np.abs(read - expected)[expected > low].max() < (0.04 if scale == "log" else 0.02) * expected.max()


def test_panels_share_one_scale() -> None:
    together = heatmap_grid([0.1 * np.eye(3), np.eye(3)])
    assert [ax.get_images()[0].get_array().max() for ax in together.axes[:2]] == [pytest.approx(0.1), 1.0]
    assert {ax.get_images()[0].get_clim() for ax in together.axes[:2]} == {(0.0, 1.0)}


@pytest.mark.parametrize("scale", NAMES)
@pytest.mark.parametrize("limits", [Limits(0.001, 0.3), Limits(0.02, 4.0)])
def test_places_and_numbers_are_inverse(scale: Any, limits: Limits) -> None:
    chosen, shares = scale_of(scale), np.linspace(0, 1, 21)
    np.testing.assert_allclose(chosen.shares(chosen.values(shares, limits), limits), shares, atol=1e-9)
    assert chosen.shares([limits.low, limits.high], limits).tolist() == pytest.approx([0, 1])
    assert (np.diff(chosen.values(shares, limits)) > 0).all()


@pytest.mark.parametrize("scale", ["linear", "sqrt", "row"])
def test_signs_have_two_sides(scale: Any) -> None:
    ax = heatmap(np.array([[-0.2, 0.0, 0.1]]), scale=scale)
    colours = cell_colours(ax)[0].astype(int)
    assert ax.get_images()[0].get_clim() == ((-1, 1) if scale == "row" else (-0.2, 0.2))
    assert colours[0, 0] > colours[0, 2]
    assert colours[2, 0] < colours[2, 2]
    assert np.ptp(colours[1]) < 12
    signed = scale_of(scale)
    np.testing.assert_allclose(signed.shares(signed.values([0.0, 0.3, 1.0], Limits(-2, 2)), Limits(-2, 2)), [0, 0.3, 1])


def test_limits_are_those_of_the_data_and_are_printed() -> None:
    weights = softmax(4, 5) * 0.037
    ax = heatmap(weights)
    bar = ax.get_images()[0].colorbar
    assert ax.get_images()[0].get_clim() == (0, weights.max())
    printed = [text.get_text() for text in bar.ax.get_xticklabels()]
    assert printed[0] == "0"
    assert float(printed[-1]) == pytest.approx(weights.max(), rel=0.005)
    assert "square-root" in bar.ax.get_xlabel()
    places = [text.get_position()[0] for text in bar.ax.get_xticklabels()]
    assert places == pytest.approx([float(number) for number in printed], rel=0.005)


@pytest.mark.parametrize(
    ("scale", "limits", "ticks"),
    [
        ("sqrt", (0, 1), [0, 0.25, 0.5, 1]),
        ("linear", (0, 1), [0, 0.25, 0.5, 0.75, 1]),
        ("linear", (-0.2, 0.2), [-0.2, -0.1, 0, 0.1, 0.2]),
        ("log", (0.0001, 1), [0.0001, 0.001, 0.01, 0.1, 1]),
        ("sqrt", (0, 0.0371), [0, 0.01, 0.02, 0.0371]),
    ],
)
def test_ticks_are_round(scale: Any, limits: tuple[float, float], ticks: list[float]) -> None:
    assert scale_of(scale).ticks(Limits(*limits)) == pytest.approx(ticks)


def test_layers_share_the_limits_of_all() -> None:
    q = torch.randn(1, 2, 9, 4)
    lazy = [regard.attention(q * size, q, q, return_weights=True).weights for size in (0.1, 2.0)]
    assert lazy[0].dense().max() < 0.8 * lazy[1].dense().max()
    image = model_grid(lazy).axes[0].get_images()[0]
    assert image.get_clim() == pytest.approx((0, max(float(one.dense().max()) for one in lazy)))


def test_the_sink_is_left_out_of_the_limits_and_said() -> None:
    weights = np.array([[1.0, 0.0, 0.0], [0.97, 0.02, 0.01], [0.95, 0.01, 0.04]])
    ax = heatmap(weights, without_sink=True)
    (image,) = ax.get_images()
    assert image.get_clim() == (0, 0.04)
    assert image.colorbar.extend == "max"
    assert "first key" in image.colorbar.ax.get_xlabel()
    np.testing.assert_array_equal(numbers(ax), weights)
    by_row = numbers(heatmap(weights, scale="row", without_sink=True))
    np.testing.assert_allclose(by_row, np.array([[0.0, 0.0, 0.0], [1.0, 1.0, 0.5], [1.0, 0.25, 1.0]]))
    assert heatmap(weights[:, :1], without_sink=True).get_images()[0].get_clim() == (0, 1)
    # In a script from right to left the first key stands at the right.
    assert heatmap(weights, None, list("אבג"), without_sink=True).get_images()[0].get_clim() == (0, 0.04)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_masked_cells_look_unlike_zeros(theme: Theme) -> None:
    weights = torch.tensor([[1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 0.0, 0.0]])
    ax = heatmap(weights, mask=regard.causal(), theme=theme)
    hidden = np.triu(np.ones((3, 3), bool), 1)
    np.testing.assert_array_equal(np.ma.getmaskarray(numbers(ax)), hidden)
    colours = cell_colours(ax).astype(int)
    zero, masked = colours[1, 0], colours[hidden]
    assert np.abs(masked - zero).sum(-1).min() > 20
    # No colour of the ramp is that warm.
    assert (masked[:, 0] > masked[:, 2]).all()
    assert max(red - blue for red, _, blue in theme.colours()) < 0.02
    assert "masked" in [text.get_text() for text in ax.figure.texts]
    assert not heatmap(weights, theme=theme).figure.texts


def of_heads(q: Any, mask: Any) -> Any:
    return regard.attention(*[q[None]] * 3, mask=mask, return_weights=True).weights[0]


@pytest.mark.parametrize(
    "made",
    [
        lambda q, bias: regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights[0],
        lambda q, bias: regard.attention(q, q, q, bias=bias, return_weights=True).weights[1],
        lambda q, bias: of_heads(q, regard.causal()).average(),
        lambda q, bias: of_heads(q, bias == 0).only(
            heads=0, rows=torch.tensor([6, 3, 5]), columns=torch.tensor([1, 6, 4])
        ),
    ],
)  # fmt: skip
def test_a_map_says_what_its_mask_hides(made: Any) -> None:
    q = torch.randn(2, 7, 4)
    bias = torch.zeros(7, 7).masked_fill(torch.ones(7, 7).triu(1).bool(), -torch.inf)
    weights = made(q, bias)
    hidden = np.ma.getmaskarray(numbers(heatmap(weights)))
    np.testing.assert_array_equal(hidden, weights.dense().numpy() == 0)
    assert hidden.any()
    pooled = np.ma.getmaskarray(numbers(heatmap(weights, max_cells=2)))
    np.testing.assert_array_equal(pooled, weights.pooled(2, 2, "max").numpy() == 0)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_text_is_readable_on_the_paper(theme: Theme) -> None:
    for colour in (theme.ink, *theme.accents):
        assert contrast(to_rgb(colour), to_rgb(theme.paper)) >= 4.5, colour


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"scale": "cubic"}, "'linear', 'sqrt', 'log', 'row'.*'cubic'"),
        ({"limits": (0.3, 0.1)}, "0.3 and 0.1"),
        ({"limits": (0.0, np.nan)}, "nan"),
        ({"limits": 3}, "got 3"),
        ({"limits": (0, 1), "scale": "log"}, "above 0; got 0.0 and 1.0"),
    ],
)
def test_wrong_options_are_refused(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ArgumentError, match=says):
        heatmap(np.eye(2), **options)
    with pytest.raises(ArgumentError, match="from 0 up"):
        heatmap(-np.eye(2), scale="log")


def test_a_map_of_zeros_is_drawn() -> None:
    for scale in NAMES:
        cell_colours(heatmap(np.zeros((2, 2)), scale=scale))
        cell_colours(heatmap(np.full((1, 1), 0.3), scale=scale))


@pytest.mark.parametrize("dark", [False, True])
def test_steps_are_even(dark: bool) -> None:
    colours = ramp(dark=dark)
    assert np.min(colours) >= 0
    assert np.max(colours) <= 1
    steps = np.diff(np.cbrt([luminance(one) for one in colours])) * (1 if dark else -1)  # as the L* of CIE
    assert steps.min() > 0.4 * steps.mean()
    assert steps.max() < 1.8 * steps.mean()


def test_hex_is_the_same_colour() -> None:
    read = [[int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)] for colour in map(hexadecimal, ramp(steps=9))]
    np.testing.assert_allclose(read, ramp(steps=9), atol=0.5 / 255)
