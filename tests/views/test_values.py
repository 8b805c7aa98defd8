"""Reading maps: the checks at the door, exact pooling, and labels as printed."""

from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError, NonFiniteError, RegardError, ShapeError
from regard.maps import AttentionMap
from regard.maps.statistics import tiles
from regard.maps.statistics.definitions import Pooled
from regard.views import values
from regard.views.labels import printable, right_to_left
from regard.views.values import picture
from tests.views.written_dates import softmax


def lazy(num_queries: int = 7, num_keys: int = 11) -> regard.AttentionMap:
    query, key = torch.randn(2, 3, num_queries, 5), torch.randn(2, 3, num_keys, 5)
    return regard.attention(query, key, key, return_weights=True).weights


def test_map_tensor_and_array_give_the_same_numbers() -> None:
    weights = lazy()
    dense = weights.dense()[1, 2]
    for one in (weights[1, 2], dense, dense.numpy(), dense.double().requires_grad_(), dense.to(torch.float64).numpy()):
        np.testing.assert_allclose(picture(one).values, dense.numpy(), atol=5e-6)


@pytest.mark.parametrize(("max_cells", "block"), [(11, (1, 1)), (4, (2, 3)), (3, (3, 4)), (1, (7, 11))])
def test_pooling_is_exact_block_by_block(
    max_cells: int, block: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(values, "BLOCK_WEIGHTS", 25)  # Rows come two or three at a time.
    weights = softmax(7, 11).astype(np.float64)
    blocks = [np.array_split(rows, min(11, max_cells), 1) for rows in np.array_split(weights, min(7, max_cells), 0)]
    largest = picture(weights, max_cells=max_cells)
    assert largest.block == block
    assert largest.is_even == (max_cells in (1, 11))
    np.testing.assert_array_equal(largest.values, [[one.max() for one in row] for row in blocks])
    mass = picture(weights, max_cells=max_cells, pooling="mass").values
    np.testing.assert_allclose(mass, [[one.sum() / len(one) for one in row] for row in blocks], atol=1e-15)
    np.testing.assert_allclose(mass.sum(-1), 1, atol=1e-14)


def test_a_long_lazy_map_is_never_held_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = lazy(64, 64)[0, 0]
    expected = weights.dense().numpy().reshape(16, 4, 16, 4).max((1, 3))
    taken = []
    read = Pooled.read
    monkeypatch.setattr(Pooled, "read", lambda self, piece, tile: taken.append(piece) or read(self, piece, tile))
    monkeypatch.setattr(tiles, "TILE_ELEMENTS", 64 * 8)
    monkeypatch.setattr(AttentionMap, "block", None)
    pooled = picture(weights, max_cells=16)
    assert len(taken) == 8
    assert all(piece.weights.numel() == 64 * 8 for piece in taken)
    np.testing.assert_allclose(pooled.values, expected, atol=5e-6)


@pytest.mark.parametrize("pooling", ["max", "mass"])
@pytest.mark.parametrize("kind", [lambda w: w, lambda w: w.dense(), lambda w: w.dense().numpy()])
def test_one_rule_cuts_maps_tensors_and_arrays(kind: Any, pooling: Any) -> None:
    """513 tokens at 512 cells: 512 blocks, of which the first has two tokens."""
    weights = lazy(513, 20)[1, 2]
    dense = weights.dense().numpy().astype(np.float64)
    drawn = picture(kind(weights), [f"t{i}" for i in range(513)], max_cells=512, pooling=pooling)
    ranges = [range(2), *(range(i, i + 1) for i in range(2, 513))]
    assert drawn.grid.rows.ranges() == ranges
    assert drawn.values.shape == (512, 20)
    assert (drawn.block, drawn.is_even) == ((2, 1), False)
    assert drawn.rows == ["t0…t1", *(f"t{i}" for i in range(2, 513))]
    pool = np.max if pooling == "max" else np.mean
    expected = np.stack([pool(dense[block.start : block.stop], 0) for block in ranges])
    np.testing.assert_allclose(drawn.values, expected, rtol=0, atol=2e-6)


def test_labels_of_pooled_tokens_name_the_first_and_the_last() -> None:
    drawn = picture(np.eye(5), list("abcde"), None, max_cells=3)
    assert drawn.rows == ["a…b", "c…d", "e"]
    assert drawn.columns == ["0…1", "2…3", "4"]
    assert picture(np.eye(5), list("abcde"), max_cells=4).rows == ["a…b", "c", "d", "e"]


@pytest.mark.parametrize(
    ("weights", "labels", "error", "says"),
    [
        (torch.ones(2, 3, 3), None, ShapeError, r"\(2, 3, 3\).*weights\[0, 3\]"),
        (torch.ones(3), None, ShapeError, r"\(3,\)"),
        (torch.ones(0, 3), None, ShapeError, r"\(0, 3\)"),
        ([[1.0]], None, ShapeError, "list"),
        (np.array([["a"]]), None, ShapeError, "<U1"),
        (torch.ones(2, 2, dtype=torch.complex64), None, ShapeError, "complex64"),
        (torch.ones(2, 3), ["a"], ShapeError, "2 expected, 1 came"),
        (torch.ones(2, 3), "ab", ArgumentError, "list of strings"),
        (torch.ones(2, 3), [1, 2], ArgumentError, "list of strings"),
        (torch.tensor([[0.0, 1.0], [0.5, torch.nan]]), None, NonFiniteError, "nan came at query 1, key 1"),
        (np.array([[0.0, np.inf]]), None, NonFiniteError, "inf came at query 0, key 1"),
    ],
)
def test_what_cannot_be_drawn_is_refused(weights: Any, labels: Any, error: type[RegardError], says: str) -> None:
    with pytest.raises(error, match=says) as caught:
        picture(weights, labels)
    assert isinstance(caught.value, RegardError)


@pytest.mark.parametrize("options", [{"max_cells": 0}, {"pooling": "mean"}])
def test_options_out_of_range_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ArgumentError, match=str(next(iter(options.values())))):
        picture(np.eye(2), **options)


def test_bfloat16_is_read_exactly() -> None:
    weights = torch.rand(3, 5).bfloat16()
    assert picture(weights).values.dtype == np.float32
    np.testing.assert_array_equal(picture(weights).values, weights.float().numpy())


def test_invisible_characters_are_made_visible() -> None:
    assert printable("a b\n\t\0\x1b\x7f\u202f\u3000") == "a␣b↵⇥␀␛␡⍽␣"


def test_direction_counts_letters_only() -> None:
    assert right_to_left(["21", "בנובמבר", "2026"])
    assert not right_to_left(["21", "2026", "-"])
    assert not right_to_left(["November", "של"])
