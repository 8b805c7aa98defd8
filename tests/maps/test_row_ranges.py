"""Masks as ranges of keys, against the masks themselves."""

from typing import Any

import pytest
import torch

import regard
from regard.call.masks.row_ranges import FAR, RowRanges
from regard.call.shapes import Sizes

T, S = 11, 9
MASKS: dict[str, Any] = {
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


@pytest.mark.parametrize("name", MASKS)
def test_the_ranges_are_those_of_the_mask(name: str) -> None:
    sizes, cpu = Sizes((2,), 1, 1, T, S, False), torch.device("cpu")
    mask = MASKS[name].bind(sizes, cpu)
    found = RowRanges.of(mask, sizes, cpu)
    assert found is not None
    i, j = torch.arange(T)[:, None], torch.arange(S)
    seen = (j >= i + found.lower) & (j < i + found.upper)
    seen = seen if found.first is None else seen & (j >= found.first[..., None])
    seen = seen if found.stop is None else seen & (j < found.stop[..., None])
    seen = seen if found.keep is None else seen & found.keep[:, None]
    assert torch.equal(seen.expand(2, T, S), mask.dense(sizes).expand(2, 1, T, S)[:, 0])


def test_closed_forms_are_numbers_and_other_masks_have_no_ranges() -> None:
    sizes, cpu = Sizes((2,), 1, 1, T, S, False), torch.device("cpu")
    found = RowRanges.of((regard.causal() & regard.window(4)).bind(sizes, cpu), sizes, cpu)
    assert found is not None
    assert (found.lower, found.upper) == (S - T - 3, S - T + 1)
    assert found.first is found.stop is found.keep is None
    assert RowRanges.of(None, sizes, cpu).lower == -FAR
    strided = regard.call.masks.strided(2).bind(sizes, cpu)
    assert RowRanges.of(strided, sizes, cpu) is None
    assert RowRanges.of((regard.padding(torch.ones(2, S) > 0) | regard.causal()).bind(sizes, cpu), sizes, cpu) is None
