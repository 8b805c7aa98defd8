"""Masks as one range of keys for each query are the masks themselves; the numbers of their rows are of the pairs."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.call.masks.row_spans import FAR, RowRanges, RowSpans
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes
from tests.core.random_calls import combined
from tests.fuzz.core.masks import MASKS, Positions
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn

CPU = torch.device("cpu")
ALWAYS = ("lengths", "per query", "causal", "padding", "window", "prefix")
"""Masks that are one range for each query, whatever they were drawn to be."""


T, S = 11, 9
NAMED: dict[str, Any] = {
    "none": None,
    "causal": regard.causal(),
    "far": regard.causal(1 << 40),
    "offsets": regard.causal(torch.tensor([3, -4])),
    "window": regard.window(3) & regard.causal(1),
    "window of offsets": regard.window(5, side="both", offset=torch.tensor([0, 2])),
    "lengths": regard.lengths(torch.tensor([2, 7])) & regard.causal(),
    "lengths per query": regard.lengths(torch.arange(2 * T).reshape(2, T) % S, per_query=True),
    "padding": regard.padding(torch.arange(2 * S).reshape(2, S) % 3 > 0) & regard.lengths(8),
    "prefix": regard.prefix(torch.tensor([4, 0])),
    "documents": regard.documents(torch.arange(T).expand(2, -1) // 4, key_ids=torch.arange(S).expand(2, -1) // 3),
}


def check(mask: regard.Mask | None, allowed: torch.Tensor, sizes: Sizes) -> bool:
    """The ranges of a mask (B, H, T, S), if it has any, and the numbers of its rows: those of a row at a time."""
    found = RowRanges.of(mask, sizes, CPU)
    if found is None:
        return False
    query, key = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)
    dense = ((query + found.lower <= key) & (key < query + found.upper))[None]
    dense = dense if found.first is None else dense & (found.first[..., None] <= key)
    dense = dense if found.stop is None else dense & (key < found.stop[..., None])
    dense = dense if found.keep is None else dense & found.keep[:, None]
    assert torch.equal(dense[:, None].expand(allowed.shape), allowed)
    spans, read = (
        found.spans(sizes, CPU),
        RowSpans.read(lambda rows: (allowed[:, :1, rows.start : rows.stop], None), sizes.queries, 3),
    )
    for name in ("first", "last", "count", "live", "keys", "is_whole"):
        own, other = getattr(spans, name), getattr(read, name)
        assert torch.equal(own.expand(other.shape), other.to(own.dtype)), name
    return True


@pytest.mark.parametrize("name", NAMED)
def test_the_ranges_of_masks_by_name(name: str) -> None:
    sizes = Sizes((2,), 1, 1, T, S, False)
    mask = None if NAMED[name] is None else NAMED[name].bind(sizes, CPU)
    allowed = torch.ones(2, 1, T, S) > 0 if mask is None else mask.dense(sizes).expand(2, 1, T, S)
    assert check(mask, allowed, sizes)


def test_closed_forms_are_numbers_and_other_masks_have_no_ranges() -> None:
    sizes = Sizes((2,), 1, 1, T, S, False)
    found = RowRanges.of((regard.causal() & regard.window(4)).bind(sizes, CPU), sizes, CPU)
    assert found is not None
    assert (found.lower, found.upper) == (S - T - 3, S - T + 1)
    assert found.first is found.stop is found.keep is None
    assert RowRanges.of(None, sizes, CPU).lower == -FAR
    assert RowRanges.of((regard.padding(torch.ones(2, S) > 0) | regard.causal()).bind(sizes, CPU), sizes, CPU) is None


@given(data=st.data(), queries=st.integers(1, 19), keys=st.integers(1, 23))
def test_the_ranges_are_the_mask(data: st.DataObject, queries: int, keys: int) -> None:
    mask, allowed = combined(data.draw, Sides((2,), 3, 3, queries, keys, 1, 1, True))
    if isinstance(mask, regard.Mask):
        sizes = Sizes((2,), 3, 3, queries, keys, True)
        check(mask.bind(sizes, CPU), allowed, sizes)


@pytest.mark.parametrize("name", ALWAYS)
@given(data=st.data())
def test_the_usual_masks_have_ranges_also_of_chosen_heads(name: str, data: st.DataObject) -> None:
    sides = Sides((2,), 3, 3, 9, 11, 1, 1, True)
    found = MASKS[name](Drawn(data.draw), sides, Positions(sides))
    sizes, one = Sizes((2,), 3, 3, 9, 11, True), Sizes((4,), 1, 1, 9, 11, False)
    bound, allowed = found.mask.bind(sizes, CPU), found.allowed.expand(sides.full)
    assert check(bound, allowed, sizes)
    batches, heads = torch.tensor([1, 0, 1, 1]), torch.tensor([2, 0, 1, 1])
    assert check(SelectedMask(bound, batches, heads), allowed[batches, heads][:, None], one)


def test_documents_in_order_have_ranges_and_others_have_none() -> None:
    sizes = Sizes((1,), 1, 1, 6, 6, True)
    for ids, is_in_order in (([0, 0, 3, 3, 3, 7], True), ([0, 1, 0, 1, 2, 2], False)):
        tensor = torch.tensor([ids])
        bound = regard.documents(tensor).bind(sizes, CPU)
        assert check(bound, (tensor[..., None] == tensor[:, None])[:, None], sizes) == is_in_order
    strided = regard.call.masks.strided(2).bind(sizes, CPU)
    assert RowRanges.of(strided, sizes, CPU) is None
