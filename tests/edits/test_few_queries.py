"""An edit of a few queries leaves the flag of the kernel to the others; and the order and the places of edits."""

import math
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.call.shapes import Sizes
from regard.edits import AddBias, Edit, Knockout, ReplaceWeights, Reweight
from regard.edits.base import CallPlace, of_keys
from regard.edits.of_scores import KnockedOutBlock, KnockedOutEdges
from regard.kernels import fused
from regard.kernels.fused_plan import Plan, plan
from tests.fuzz.watch.truths import kernel_weights
from tests.modules import module

LENGTH = 150

Attend = module(
    lambda m, q, k, v, mask=None: F.scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=mask is None, enable_gqa=True
    )
)


def dense(q: Tensor, k: Tensor, v: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
    p = kernel_weights(q, k, added, is_causal=True)
    return p @ v.repeat_interleave(2, 1), p


def added(rows: list[int], keys: slice, number: float) -> Tensor:
    found = torch.zeros(LENGTH, LENGTH, dtype=torch.float64)
    for row in rows:
        found[row, keys] = number
    return found


CASES: dict[str, tuple[Edit, Tensor]] = {
    "the last one": (Knockout(slice(3, 9), queries=-1), added([LENGTH - 1], slice(3, 9), -torch.inf)),
    "one in the middle": (Knockout(slice(3, 9), queries=70), added([70], slice(3, 9), -torch.inf)),
    "a pair": (Knockout(edges=[(40, 2)]), added([40], slice(2, 3), -torch.inf)),
    "one that has no key left": (Knockout(slice(0, 5), queries=2), added([2], slice(0, 5), -torch.inf)),
    "a bias": (AddBias(1.5, slice(0, 20), queries=[33, 34]), added([33, 34], slice(0, 20), 1.5)),
    "a factor": (Reweight(slice(0, 20), 0.1, queries=[149]), added([149], slice(0, 20), -math.log(10))),
}


def plans() -> tuple[Any, list[Plan]]:
    found: list[Plan] = []

    def kept(*args: Any) -> Plan:
        found.append(plan(*args))
        return found[-1]

    return patch.object(fused, "plan", kept), found


@pytest.mark.parametrize("case", CASES)
def test_output_weights_and_gradients_are_those_of_the_dense_formula(case: str) -> None:
    edit, bias = CASES[case]
    q, k, v = (torch.randn(2, h, LENGTH, 8, dtype=torch.float64, requires_grad=True) for h in (4, 2, 2))
    model = Attend()
    patched, made = plans()
    with patched, regard.edit(model, {"": edit}), regard.watch(model) as seen:
        output = model(q, k, v)
    (covering,) = made
    assert covering.blocks[0].is_causal
    assert len(covering.blocks) == len(covering.anew) == 1
    assert len(covering.anew[0].rows) <= 32
    expected, weights = dense(q, k, v, bias)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(seen.maps[0].dense(), weights.detach(), rtol=0, atol=1e-12)
    theirs = torch.autograd.grad((expected * expected.detach().cos()).sum(), (q, k, v))
    for one, other in zip(torch.autograd.grad((output * output.detach().cos()).sum(), (q, k, v)), theirs, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-11)


@pytest.mark.parametrize("has_bias", [False, True])
def test_a_gradient_of_the_log_sum_exp_too(has_bias: bool) -> None:
    q, k, v = (torch.randn(1, 2, LENGTH, 8, dtype=torch.float64, requires_grad=True) for _ in range(3))
    rows = torch.zeros(LENGTH, dtype=torch.bool)
    rows[[5, 149]] = True
    mask = regard.causal(0) & KnockedOutBlock.of(rows, (torch.arange(LENGTH) < 3)[None, None, None])
    per_key = torch.randn(1, 2, 1, LENGTH, dtype=torch.float64) if has_bias else None
    found = []
    for backend in ("reference", "fused"):
        output, weights = regard.attention(q, k, v, mask=mask, bias=per_key, backend=backend, return_weights=True)
        found.append(torch.autograd.grad(output.sin().sum() + weights.lse.square().sum(), (q, k, v)))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=1e-10)


def test_many_queries_are_cut_into_blocks_as_before() -> None:
    model, (q, k, v) = Attend(), (torch.randn(1, h, LENGTH, 8) for h in (4, 2, 2))
    patched, made = plans()
    with patched, torch.no_grad(), regard.edit(model, {"": Knockout(slice(0, 5), queries=slice(20, 120))}):
        model(q, k, v)
    assert not made[0].anew


HEADS, KEYS = 2, 4

Alone = module(lambda m, x: F.scaled_dot_product_attention(x, x, x))


def vectors() -> Tensor:
    return torch.randn(1, HEADS, KEYS, 3, dtype=torch.float64)


def given(seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(1, HEADS, KEYS, KEYS, dtype=torch.float64, generator=generator).softmax(-1)


def test_of_two_replacements_of_a_head_the_later_one_holds() -> None:
    x, model = vectors(), Alone()
    with regard.edit(model, {"": [ReplaceWeights(given(0)), ReplaceWeights(given(1), queries=[1])]}):
        found = model(x)
    weights = given(0)
    weights[:, :, 1] = given(1)[:, :, 1]
    torch.testing.assert_close(found, weights @ x)


def test_rows_that_were_replaced_keep_their_sums_when_they_are_reweighted_or_cut() -> None:
    x, model = vectors(), Alone()
    edits = [ReplaceWeights(0.5 * given(0)), Reweight([0, 2], 3.0), Knockout(keys=1)]
    with regard.edit(model, {"": edits}), regard.watch(model) as seen:
        found = model(x)
    weights = given(0) * torch.tensor([3.0, 0.0, 3.0, 1.0])
    weights = 0.5 * weights / weights.sum(-1, keepdim=True)
    torch.testing.assert_close(found, weights @ x)
    torch.testing.assert_close(seen.maps[0].dense(), weights)


def place(first_key: int) -> CallPlace:
    sizes = Sizes((1,), HEADS, HEADS, 1, KEYS, True)
    return CallPlace("a", 0, sizes, torch.device("cpu"), torch.float64, first_query=5, first_key=first_key)


def test_numbers_stay_with_their_keys_when_a_cache_has_let_others_go() -> None:
    numbers = of_keys(torch.tensor([1.0, 2.0, 3.0]), place(3), [4, 1, 6], None, None, "bias")
    assert numbers is not None
    assert numbers.flatten().tolist() == [0.0, 1.0, 0.0, 3.0]


def test_a_function_of_edges_is_asked_for_places_in_the_text() -> None:
    mask = KnockedOutEdges(lambda batch, head, query, key: (query == 5) & (key == 4), 5, 3, None, None)
    zero, key = torch.zeros(1, dtype=torch.long), torch.arange(KEYS)
    assert mask.allowed(zero, zero, zero, key).tolist() == [True, False, True, True]
