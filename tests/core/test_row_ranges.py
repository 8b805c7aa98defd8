"""Masks as one range of keys for each query are the masks themselves."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import regard
from regard.call.masks.row_ranges import RowRanges
from regard.call.masks.selection import SelectedMask
from regard.call.shapes import Sizes
from tests.core.random_calls import combined
from tests.fuzz.core.masks import MASKS, Positions
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn

CPU = torch.device("cpu")
ALWAYS = ("lengths", "per query", "causal", "padding", "window", "prefix")
"""Masks that are one range for each query, whatever they were drawn to be."""


def check(mask: regard.Mask, allowed: torch.Tensor, sizes: Sizes) -> bool:
    """The ranges of a mask (B, H, T, S), if it has any."""
    found = RowRanges.of(mask, sizes, CPU)
    if found is None:
        return False
    query, key = torch.arange(sizes.queries)[:, None], torch.arange(sizes.keys)
    dense = ((query + found.lower <= key) & (key < query + found.upper))[None]
    dense = dense if found.first is None else dense & (found.first[..., None] <= key)
    dense = dense if found.stop is None else dense & (key < found.stop[..., None])
    dense = dense if found.keep is None else dense & found.keep[:, None]
    assert torch.equal(dense[:, None].expand(allowed.shape), allowed)
    return True


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
