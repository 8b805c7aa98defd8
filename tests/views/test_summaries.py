"""Views of the statistics that a watch kept: kept pictures are drawn, others are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard import page
from regard.errors import ArgumentError, NotKeptError
from regard.maps import load_summary, save_summary
from regard.views import heatmap, heatmap_grid, model_example, model_grid
from regard.views.heatmap import head_panels
from regard.views.values import picture
from regard.watching import head_table
from regard.watching.watch import Seen
from tests.views.test_model_grid import image_of
from tests.views.written_dates import array_of, embedded

LENGTH, CELLS = 77, 16
WHAT = regard.Summarize("entropy", "top_keys", "pooled", "pooled_max", rows=CELLS, columns=CELLS)
Watched = tuple[Seen, Seen]


def seen_by(*keeps: Any, length: int = LENGTH) -> list[Seen]:
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False).eval()
    inputs, found = 3 * torch.randn(2, length, 16), []
    for keep in keeps:
        with torch.no_grad(), regard.watch(model, keep=keep) as seen:
            model(inputs)
        found.append(seen)
    return found


@pytest.mark.parametrize("how", ["mean", "max"])
def test_a_coarser_picture_is_drawn_where_a_finer_one_would_be_welcome(how: Any) -> None:
    whole, kept = seen_by("factors", WHAT)
    figure = model_grid(kept, how=how, cells=64)
    drawn = image_of(figure)
    expected = image_of(model_grid(whole, how=how, cells=CELLS))
    assert figure.texts[0].get_text() == f"({how} of 4.81 × 4.81 weights a dot)"
    assert drawn.shape == expected.shape  # Both fill the same room with the 16 values that were kept.
    side = (drawn.shape[1] + 6) // 4 - 6  # four heads, and 6 dots between two
    np.testing.assert_allclose(drawn[:side, :side], expected[:side, :side], rtol=0, atol=1e-5)


def test_heatmaps_and_grids_of_pictures() -> None:
    whole, kept = seen_by("factors", WHAT)
    name = next(iter(kept))
    for pooling in ("max", "mass"):
        one = picture(kept[name][0, 3], pooling=pooling)
        other = picture(whole[name][0, 3], max_cells=CELLS, pooling=pooling)
        np.testing.assert_allclose(one.values, other.values, rtol=0, atol=1e-5)
        assert (one.rows, one.columns, one.grid) == (other.rows, other.columns, other.grid)
    axes = heatmap(kept[name][0, 3], title="head 3")
    assert axes.get_title(loc="left") == "head 3 (max of up to 5 × 5 weights a cell)"
    assert len(heatmap_grid(head_panels(kept[name][1])).axes) == 5
    mean = picture(kept[name].average()[0], pooling="mass").values
    expected = picture(whole[name].average()[0], max_cells=CELLS, pooling="mass").values
    np.testing.assert_allclose(mean, expected, rtol=0, atol=1e-5)


def test_a_page_of_what_was_kept() -> None:
    whole, kept = seen_by("factors", WHAT)
    data = embedded(page([model_example(kept)]).text)
    for entry, weights in zip(data["examples"][0]["maps"], whole.maps, strict=True):
        (heads, mean) = entry["pictures"]
        assert (heads["grid"], entry["exact"], entry["tiles"]) == ([CELLS, CELLS], {}, {})
        pictures: list[tuple[Any, int]] = [("max", heads["largest"]), ("sum", heads["mass"])]
        for how, place in pictures:
            expected = weights[0].pooled(CELLS, CELLS, how).numpy()
            np.testing.assert_allclose(array_of(data, place).reshape(expected.shape), expected, rtol=1e-3, atol=1e-5)
        assert mean["largest"] is None
        expected = weights[0].average().pooled(CELLS, CELLS, "sum").numpy()
        np.testing.assert_allclose(array_of(data, mean["mass"]).reshape(expected.shape), expected, rtol=1e-3, atol=1e-5)
        assert {top["k"] for top in entry["top"].values()} == {4}
        assert len(entry["top"]) == 4
    (means,) = seen_by("summary", length=300)
    (first, _) = embedded(page([model_example(means)]).text)["examples"][0]["maps"]
    assert (first["pictures"][0]["grid"], first["pictures"][0]["largest"]) == ([128, 128], None)


def test_a_short_map_is_kept_whole_and_drawn_by_every_view() -> None:
    """With fewer tokens than blocks each block is one weight: its mean is its largest weight."""
    whole, kept = seen_by("factors", "summary", length=9)
    name = next(iter(kept))
    np.testing.assert_allclose(image_of(model_grid(kept)), image_of(model_grid(whole)), rtol=0, atol=1e-5)
    np.testing.assert_allclose(picture(kept[name][0, 1]).values, whole[name][0, 1].dense(), rtol=0, atol=1e-5)
    (labels,) = embedded(page([model_example(kept, list("abcdefghi"))]).text)["examples"][0]["labels"]
    assert labels["texts"] == list("abcdefghi")


@pytest.mark.parametrize(
    ("draw", "asked"),
    [
        (lambda seen: model_grid(seen), r"pooled\(128, 128, 'max'\)"),
        (lambda seen: model_grid(seen, how="mean", cells=100), r"pooled\(100, 100, 'mean'\)"),
        (lambda seen: heatmap(seen.maps[0][0, 0]), r"pooled\(256, 256, 'max'\)"),
    ],
)
def test_what_was_not_kept_is_refused_and_named(draw: Callable[[Seen], object], asked: str) -> None:
    (kept,) = seen_by("summary", length=300)
    said = (
        rf"{asked} cannot be told: .*'top_keys', 'pooled', k=4, rows=128, columns=128, how='mean'\).*name what you need"
    )
    with pytest.raises(NotKeptError, match=said):
        draw(kept)


def test_a_page_needs_a_picture() -> None:
    (kept,) = seen_by(regard.Summarize("entropy"), length=300)
    with pytest.raises(NotKeptError, match=r"pooled\(64, 64, 'max'\) cannot be told"):
        page([model_example(kept)])


def test_a_saved_summary_is_drawn_again(tmp_path: Path) -> None:
    pytest.importorskip("safetensors")
    _, kept = seen_by("factors", WHAT)
    loaded = []
    for number, one in enumerate(kept.maps):
        save_summary(tmp_path / f"{number}.safetensors", one)
        loaded.append(regard.AttentionMap.load(tmp_path / f"{number}.safetensors"))
        assert repr(loaded[-1]) == repr(one)
        read = load_summary(tmp_path / f"{number}.safetensors")
        assert list(read) == list(one.statistics)
        assert torch.equal(loaded[-1].entropy(), one.entropy())
        assert torch.equal(loaded[-1].top_keys(2).indices, one.top_keys(2).indices)
    assert np.array_equal(image_of(model_grid(loaded)), image_of(model_grid(kept)), equal_nan=True)
    with pytest.raises(NotKeptError, match=r"received\(\) cannot be told: .*'pooled_max', k=4, rows=16"):
        loaded[0].received()
    q = torch.ones(2, 2)
    with pytest.raises(ArgumentError, match=r"holds queries and keys: map.save\(path\)"):
        save_summary(tmp_path / "no", regard.attention(q, q, q, return_weights=True).weights)


def test_the_head_table_has_the_numbers_that_were_kept() -> None:
    whole, kept, some = seen_by(
        "factors", regard.Summarize("entropy", "distance", "top_weight"), regard.Summarize("entropy")
    )
    table, expected = head_table(kept), head_table(whole)
    assert list(table.columns) == ["distance", "entropy"]
    for name in table.columns:
        torch.testing.assert_close(table[name], expected[name], rtol=0, atol=1e-4)
    assert table.layers == expected.layers
    with pytest.raises(NotKeptError, match=r"which queries have a key.*Summarize\('entropy'\)"):
        head_table(some)
