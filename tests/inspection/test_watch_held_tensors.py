"""What a watch holds of a call is that call's own: masks that share memory, and calls that look like steps."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

import regard
from regard.watching.analysis.head_table import compare
from tests.modules import module

Attend = module(lambda m, x, mask=None: F.scaled_dot_product_attention(x, x, x, attn_mask=mask))


def dense(x: Tensor, mask: Tensor | None = None) -> Tensor:
    scores = x @ x.mT / x.shape[-1] ** 0.5
    return scores.masked_fill(~mask, -torch.inf).softmax(-1) if mask is not None else scores.softmax(-1)


def test_masks_that_are_parts_of_one_tensor_are_told_apart() -> None:
    x, masks = torch.randn(1, 2, 5, 4), torch.rand(3, 5, 5) < 0.6
    masks |= torch.eye(5, dtype=torch.bool)
    model = Attend()
    with torch.no_grad(), regard.watch(model) as seen:
        for mask in masks:
            model(x, mask)
    for call, mask in enumerate(masks):
        torch.testing.assert_close(seen["", call].dense(), dense(x, mask))


def test_calls_of_equal_shape_keep_their_own_keys() -> None:
    model, inputs = Attend(), torch.randn(3, 1, 2, 5, 4)
    with torch.no_grad(), regard.watch(model) as seen:
        for x in inputs:
            model(x)
    for call, x in enumerate(inputs):
        torch.testing.assert_close(seen["", call].dense(), dense(x))


def test_a_comparison_has_the_mean_divergence_of_every_sequence() -> None:
    one = torch.randn(3, 2, 5, 4)
    other: Any = one.clone()
    other[2, 1] += torch.randn(5, 4)
    maps = [regard.attention(x, x, x, return_weights=True).weights for x in (one, other)]
    found = compare([maps[0]], [maps[1]])
    p, r = dense(one), dense(other)
    m = (p + r) / 2
    apart = (p * (p / m).log() + r * (r / m).log()).sum(-1).mean((0, 2)) / 2
    torch.testing.assert_close(found["jensen-shannon"][0], apart)
    assert apart[1] > 1e-3 > apart[0]
