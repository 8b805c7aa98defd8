"""Attention over images: each patch has its own weight, class and register tokens are known and counted."""

from typing import Any

import numpy as np
import pytest
import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel, ViTConfig, ViTModel

import regard
from regard.errors import ArgumentError, NonFiniteError, RegardError, ShapeError
from regard.views import SMOOTH, WHOLE_PATCHES, PatchGrid, Upsampling, overlay, overlay_grid, patch_grid

TINY: dict[str, Any] = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 16}


def models() -> list[tuple[Any, tuple[int, int], int, int]]:
    dino = Dinov2WithRegistersConfig(**TINY, image_size=56, patch_size=14, num_register_tokens=4, mlp_ratio=1)
    vit = ViTConfig(**TINY, image_size=(32, 48), patch_size=8)
    return [(Dinov2WithRegistersModel(dino).eval(), (56, 84), 14, 5), (ViTModel(vit).eval(), (32, 48), 8, 1)]


def patches(ax: Any) -> np.ndarray:
    return np.asarray(ax.get_images()[-1].get_array())


@pytest.mark.parametrize("number", [0, 1])
def test_a_watched_image_model(number: int) -> None:
    """An image that is not square: the patches of the picture are those of the eager weights."""
    model, (height, width), patch, extra = models()[number]
    image = torch.rand(3, height, width)
    with torch.no_grad(), regard.watch(model) as seen:
        model(image[None])
    model.set_attn_implementation("eager")
    with torch.no_grad():
        eager = model(image[None], output_attentions=True).attentions[1][0]
    weights = [one for _, one in seen.items()][1][0]
    rows, columns = height // patch, width // patch
    assert patch_grid(weights.shape[-1], (height, width)) == PatchGrid(rows, columns, extra)
    for token, expected in (
        ("class", eager.mean(0)[0]),
        ("mean", eager.mean(0)[extra:].mean(0)),
        (columns + 1, eager.mean(0)[extra + columns + 1]),
    ):
        ax = overlay(image, weights.average(), token=token)
        np.testing.assert_allclose(patches(ax), expected[extra:].reshape(rows, columns), atol=1e-5)
        assert f"{float(expected[:extra].sum()):.0%} on {extra} other token" in ax.get_title(loc="left")
        dense = overlay(image.permute(1, 2, 0).numpy(), eager.mean(0).numpy(), token=token)
        np.testing.assert_allclose(patches(dense), patches(ax), atol=1e-5)


def test_each_frame_lies_under_its_panel_and_one_scale_is_that_of_all() -> None:
    frames = [torch.full((8, 8), shade) for shade in (0.2, 0.4, 0.6)]
    heads = torch.rand(3, 4) / 4
    figure = overlay_grid(frames, [(f"frame {n}", one) for n, one in enumerate(heads)])
    shown = [ax.get_images() for ax in figure.axes if len(ax.get_images()) == 2]
    assert [float(under.get_array().mean()) for under, _ in shown] == pytest.approx([0.2, 0.4, 0.6])
    assert len({over.get_clim() for _, over in shown}) == 1
    np.testing.assert_allclose([over.get_array().ravel() for _, over in shown], heads)
    given = overlay_grid(frames, [("", one) for one in heads], limits=(0.0, 0.7))
    assert {ax.get_images()[-1].get_clim() for ax in given.axes if len(ax.get_images()) == 2} == {(0.0, 0.7)}


def test_pixels_lie_under_their_patches() -> None:
    image = np.zeros((20, 30), np.uint8)
    weights = np.array([0.0, 0.1, 0.2, 0.3, 0.15, 0.15, 0.1])
    ax = overlay(image, weights, extra=1, colour_bar=False)
    under, over = ax.get_images()
    assert list(under.get_extent()) == list(over.get_extent()) == [-0.5, 2.5, 1.5, -0.5]
    np.testing.assert_array_equal(patches(ax), weights[1:].reshape(2, 3))
    width, height = ax.get_window_extent().size
    assert width / height == pytest.approx(1.5)


@pytest.mark.parametrize(
    ("tokens", "image", "options", "grid"),
    [
        (197, (224, 224), {}, (14, 14, 1)),
        (257, (224, 224), {}, (16, 16, 1)),
        (261, (224, 224), {}, (16, 16, 5)),
        (196, (224, 224), {}, (14, 14, 0)),
        (50, (224, 224), {}, (7, 7, 1)),
        (1 + 4 + 37 * 52, (518, 728), {}, (37, 52, 5)),
        (25, (57, 85), {"patch": 14}, (4, 6, 1)),
        (26, (56, 84), {"extra": 2}, (4, 6, 2)),
    ],
)
def test_grids(tokens: int, image: tuple[int, int], options: Any, grid: tuple[int, int, int]) -> None:
    assert patch_grid(tokens, image, **options) == grid


@pytest.mark.parametrize(
    ("ask", "error", "says"),
    [
        (lambda: patch_grid(198, (224, 225)), ShapeError, "198 tokens are no patches of an image of 224 x 225"),
        (lambda: patch_grid(7, (20, 30), extra=2), ShapeError, "2 other tokens"),
        (lambda: patch_grid(0, (20, 30)), ArgumentError, "at least 1"),
        (lambda: overlay(np.zeros((4, 4)), np.zeros((2, 5, 5))), ShapeError, r"\(2, 5, 5\)"),
        (lambda: overlay(np.zeros((4, 4, 4)), np.zeros(5)), ShapeError, "three colours"),
        (lambda: overlay(np.full((4, 4), -1.0), np.zeros(5)), ArgumentError, "-1 to -1"),
        (lambda: overlay(np.zeros((4, 4)), np.array([0, 1, np.nan, 0, 0])), NonFiniteError, "nan"),
        (lambda: overlay(np.zeros((4, 4)), np.eye(5), token=4, extra=1), ArgumentError, r"0\.\.3; got 4"),
        (lambda: overlay(np.zeros((4, 4)), np.eye(4), extra=0), ArgumentError, "no class token"),
        (
            lambda: overlay_grid([np.zeros((4, 4))] * 2, [("", np.zeros(4))] * 3),
            ArgumentError,
            "3 panels; got 2 images",
        ),
        (
            lambda: overlay_grid([np.zeros((4, 4)), np.zeros((4, 6))], [("", np.zeros(4))] * 2),
            ArgumentError,
            "same size",
        ),
    ],
)
def test_what_does_not_fit_is_refused(ask: Any, error: type[RegardError], says: str) -> None:
    with pytest.raises(error, match=says):
        ask()


@pytest.mark.parametrize(("upsampling", "is_whole"), [(WHOLE_PATCHES, True), (SMOOTH, False)])
def test_the_centre_of_a_patch_has_the_colour_of_its_weight(upsampling: Upsampling, is_whole: bool) -> None:
    """Of the drawn pixels; between two centres a smooth picture has colours that are none of the two."""
    weights = torch.tensor([0.05, 0.4, 0.1, 0.25, 0.05, 0.15])
    axes = overlay(torch.ones(20, 30), weights, extra=0, strength=1.0, upsampling=upsampling)
    image = axes.get_images()[-1]
    canvas = FigureCanvasAgg(axes.get_figure(root=True))
    canvas.draw()
    dots = np.asarray(canvas.buffer_rgba())

    def coloured(weight: float) -> np.ndarray:
        return np.asarray(image.to_rgba(np.array([[weight]])))[0, 0, :3] * 255

    def dot(column: float, row: float) -> np.ndarray:
        x, y = axes.transData.transform((column, row))
        return dots[len(dots) - 1 - int(y), int(x), :3].astype(int)

    for row in range(2):
        for column in range(3):
            assert np.abs(dot(column, row) - coloured(float(weights[3 * row + column]))).max() <= 3
    is_flat = np.abs(dot(0.4, 0) - coloured(float(weights[0]))).max() <= 3
    assert is_flat == is_whole
    assert patches(axes).ravel().tolist() == pytest.approx(weights.tolist())


def test_a_diffuse_map_leaves_the_image_as_it_is() -> None:
    """Colours begin at the smallest weight of a patch; the query is named by the title or the bar."""
    weights = torch.full((7, 7), 1 / 7)
    weights[0, 1], weights[0, 2] = 1 / 7 - 0.01, 1 / 7 + 0.01
    axes = overlay(torch.rand(3, 28, 42), weights, extra=1)
    assert axes.get_images()[-1].norm.vmin == pytest.approx(1 / 7 - 0.01)
    assert axes.get_title(loc="left").startswith("class token · ")
    figure = overlay_grid(torch.rand(3, 28, 42), [("head 0", weights)], token=2)
    assert figure.axes[-1].get_xlabel().endswith("; of the patch 2")
