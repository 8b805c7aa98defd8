"""What the later of two edits does to what the earlier one replaced, and where numbers and edges of a text are."""

import torch
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.call.shapes import Sizes
from regard.edits import Knockout, ReplaceWeights, Reweight
from regard.edits.base import CallPlace, of_keys
from regard.edits.of_scores import KnockedOutEdges
from tests.modules import module

HEADS, LENGTH = 2, 4

Attend = module(lambda m, x: F.scaled_dot_product_attention(x, x, x))


def vectors() -> Tensor:
    return torch.randn(1, HEADS, LENGTH, 3, dtype=torch.float64)


def given(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, HEADS, LENGTH, LENGTH, dtype=torch.float64, generator=generator).softmax(-1)


def test_of_two_replacements_of_a_head_the_later_one_holds() -> None:
    x, model = vectors(), Attend()
    with regard.edit(model, {"": [ReplaceWeights(given(0)), ReplaceWeights(given(1), queries=[1])]}):
        found = model(x)
    weights = given(0)
    weights[:, :, 1] = given(1)[:, :, 1]
    torch.testing.assert_close(found, weights @ x)


def test_rows_that_were_replaced_keep_their_sums_when_they_are_reweighted_or_cut() -> None:
    x, model = vectors(), Attend()
    edits = [ReplaceWeights(0.5 * given(0)), Reweight([0, 2], 3.0), Knockout(keys=1)]
    with regard.edit(model, {"": edits}), regard.watch(model) as seen:
        found = model(x)
    weights = given(0) * torch.tensor([3.0, 0.0, 3.0, 1.0])
    weights = 0.5 * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found, weights @ x)
    torch.testing.assert_close(seen.maps[0].dense(), weights)


def place(first_key: int) -> CallPlace:
    sizes = Sizes((1,), HEADS, HEADS, 1, LENGTH, True)
    return CallPlace("a", 0, sizes, torch.device("cpu"), torch.float64, first_query=5, first_key=first_key)


def test_numbers_stay_with_their_keys_when_a_cache_has_let_others_go() -> None:
    numbers = of_keys(torch.tensor([1.0, 2.0, 3.0]), place(3), [4, 1, 6], None, None, "bias")
    assert numbers is not None
    assert numbers.flatten().tolist() == [0.0, 1.0, 0.0, 3.0]


def test_a_function_of_edges_is_asked_for_places_in_the_text() -> None:
    mask = KnockedOutEdges(lambda batch, head, query, key: (query == 5) & (key == 4), 5, 3, None, None)
    zero, key = torch.zeros(1, dtype=torch.long), torch.arange(LENGTH)
    assert mask.allowed(zero, zero, zero, key).tolist() == [True, False, True, True]
