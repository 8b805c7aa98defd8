"""The drop-in MultiheadAttention against torch's, and what it does better."""

from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.nn.compat import MultiheadAttention

SHAPES = {"embed_dim": 8, "num_heads": 2}


def both(**options: Any) -> tuple[MultiheadAttention, nn.MultiheadAttention]:
    theirs = nn.MultiheadAttention(**SHAPES, **options, dtype=torch.float64)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = MultiheadAttention(**SHAPES, **options, dtype=torch.float64)
    ours.load_state_dict(theirs.state_dict())
    return ours, theirs


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize(
    "options", [{}, {"kdim": 5, "vdim": 3}, {"bias": False}, {"add_bias_kv": True}, {"add_zero_attn": True}]
)
def test_it_is_torchs(options: dict[str, int], batch_first: bool) -> None:
    ours, theirs = both(**options, batch_first=batch_first)
    n, t, s = 3, 5, 7
    shape = (lambda length, width: (n, length, width)) if batch_first else (lambda length, width: (length, n, width))
    query = torch.randn(*shape(t, 8), dtype=torch.float64)
    key = torch.randn(*shape(s, options.get("kdim", 8)), dtype=torch.float64)
    value = torch.randn(*shape(s, options.get("vdim", 8)), dtype=torch.float64)
    padding = torch.zeros(n, s, dtype=torch.bool)
    padding[1, 4:] = True
    float_mask = torch.randn(t, s, dtype=torch.float64)
    bool_mask = torch.rand(n * 2, t, s) < 0.3
    bool_mask[..., 0] = False
    for masks in (
        {},
        {"key_padding_mask": padding},
        {"attn_mask": float_mask},
        {"attn_mask": bool_mask, "key_padding_mask": padding},
        {"average_attn_weights": False},
        {"need_weights": False},
    ):
        output, weights = ours(query, key, value, **masks)
        expected, their_weights = theirs(query, key, value, **masks)
        torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
        if their_weights is None:
            assert weights is None
        else:
            torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-12)


def test_unbatched_and_causal_without_a_mask() -> None:
    ours, theirs = both()
    x = torch.randn(5, 8, dtype=torch.float64)
    mask = nn.Transformer.generate_square_subsequent_mask(5, dtype=torch.float64)
    output, weights = ours(x, x, x, is_causal=True)
    expected, their_weights = theirs(x, x, x, attn_mask=mask)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights, their_weights, rtol=0, atol=1e-12)


def test_an_empty_row_is_zero_with_finite_gradients_where_torch_has_nan() -> None:
    ours, theirs = both(batch_first=True)
    x = torch.randn(2, 3, 8, dtype=torch.float64)
    padding = torch.tensor([[False] * 3, [True] * 3])
    output, weights = ours(x, x, x, key_padding_mask=padding)
    assert (weights[1] == 0).all()
    output[0].sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in ours.parameters())
    assert theirs(x, x, x, key_padding_mask=padding)[1].isnan().any()


def test_from_torch_copies_the_weights() -> None:
    for options in ({}, {"kdim": 5, "vdim": 3}, {"bias": False}):
        _, theirs = both(**options, batch_first=True)
        ours = regard.nn.MultiHeadAttention.from_torch(theirs)
        q = torch.randn(2, 3, 8, dtype=torch.float64)
        k = torch.randn(2, 4, options.get("kdim", 8), dtype=torch.float64)
        v = torch.randn(2, 4, options.get("vdim", 8), dtype=torch.float64)
        torch.testing.assert_close(ours(q, k, v), theirs(q, k, v)[0], rtol=0, atol=1e-12)
    with pytest.raises(regard.RegardError, match=r"use regard\.nn\.compat"):
        regard.nn.MultiHeadAttention.from_torch(nn.MultiheadAttention(8, 2, add_zero_attn=True))
