"""`MultiHeadAttention` against torch.nn.MultiheadAttention, and against itself by another route."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import regard
from regard.errors import ArgumentError, ShapeError
from regard.nn import KeyValue, MultiHeadAttention

BATCH, QUERIES, KEYS, HEADS, DIM = 2, 5, 7, 3, 33
TOLERANCE = {torch.float32: 2e-6, torch.float64: 1e-12}


def twins(*, bias: bool = True, dtype: torch.dtype = torch.float64, **widths: int) -> tuple[nn.Module, nn.Module]:
    """torch's module with random biases, and ours with its weights; `widths` are kdim and vdim."""
    theirs = nn.MultiheadAttention(DIM, HEADS, bias=bias, batch_first=True, dtype=dtype, **widths)
    ours = MultiHeadAttention(
        DIM, HEADS, bias=bias, key_dim=widths.get("kdim"), value_dim=widths.get("vdim")
    ).to(dtype)  # fmt: skip
    with torch.no_grad():
        if bias:
            theirs.in_proj_bias.normal_()
            theirs.out_proj.bias.normal_()
            ours.in_bias.copy_(theirs.in_proj_bias)
        if theirs.in_proj_weight is not None:
            packed = [theirs.in_proj_weight]
        else:
            packed = [theirs.q_proj_weight, theirs.k_proj_weight, theirs.v_proj_weight]
        for mine, other in zip(ours.in_weights, packed, strict=True):
            mine.copy_(other)
        ours.out.load_state_dict(theirs.out_proj.state_dict())
    return theirs, ours


@given(
    batch=st.integers(1, 3),
    queries=st.integers(1, 5),
    keys=st.integers(1, 7),
    is_self=st.booleans(),
    is_causal=st.booleans(),
    has_padding=st.booleans(),
    bias=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.float64]),
    seed=st.integers(0, 99),
)
def test_equals_torch(
    *, batch: int, queries: int, keys: int, is_self: bool, is_causal: bool, has_padding: bool, bias: bool,
    dtype: torch.dtype, seed: int,
) -> None:  # fmt: skip
    torch.manual_seed(seed)
    theirs, ours = twins(bias=bias, dtype=dtype)
    x = torch.randn(batch, queries, DIM, dtype=dtype)
    y = x if is_self else torch.randn(batch, keys, DIM, dtype=dtype)
    keys = y.shape[1]
    valid = torch.randint(1, keys + 1, (batch,)) if has_padding else torch.full((batch,), keys)
    mask = regard.lengths(valid)
    forbidden = torch.zeros(queries, keys, dtype=torch.bool)
    if is_causal:
        mask = mask & regard.causal(0)
        forbidden = torch.ones(queries, keys, dtype=torch.bool).triu(1)
    # torch's masks say who may NOT attend.
    padded = torch.arange(keys) >= valid[:, None]
    expected, their_weights = theirs(
        x, y, y, key_padding_mask=padded, attn_mask=forbidden, average_attn_weights=False
    )  # fmt: skip
    output, weights = ours(x, mask=mask, return_weights=True) if is_self else ours(x, y, mask=mask, return_weights=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=TOLERANCE[dtype])
    torch.testing.assert_close(weights.dense(), their_weights, rtol=0, atol=TOLERANCE[dtype])


def test_keys_and_values_of_their_own_widths() -> None:
    theirs, ours = twins(kdim=11, vdim=13)
    x = torch.randn(BATCH, QUERIES, DIM, dtype=torch.float64)
    key, value = (torch.randn(BATCH, KEYS, n, dtype=torch.float64) for n in (11, 13))
    expected, their_weights = theirs(x, key, value, average_attn_weights=False)
    output, weights = ours(x, key, value, return_weights=True)
    torch.testing.assert_close(output, expected, rtol=0, atol=1e-12)
    torch.testing.assert_close(weights.dense(), their_weights, rtol=0, atol=1e-12)


def test_packed_and_separate_routes_agree() -> None:
    attend: Any = MultiHeadAttention(DIM, HEADS, num_kv_heads=1).double()
    nn.init.normal_(attend.in_bias)
    x, y = (torch.randn(BATCH, n, DIM, dtype=torch.float64) for n in (QUERIES, KEYS))
    torch.testing.assert_close(attend(x), attend(x, x.clone(), x.clone()), rtol=0, atol=1e-12)
    torch.testing.assert_close(attend(x, y), attend(x, y, y.clone()), rtol=0, atol=1e-12)
    torch.testing.assert_close(attend.attend(x, attend.project(y)), attend(x, y), rtol=0, atol=1e-12)
    torch.testing.assert_close(
        attend.attend(x, attend.project(y, 2 * y)), attend(x, y, 2 * y), rtol=0, atol=1e-12
    )  # fmt: skip


def test_more_batch_dimensions() -> None:
    attend = MultiHeadAttention(DIM, HEADS).double()
    x = torch.randn(2, 3, QUERIES, DIM, dtype=torch.float64)
    valid = torch.tensor([[1, 2, 5], [5, 3, 4]])
    output, weights = attend(x, mask=regard.lengths(valid), return_weights=True)
    flat = attend(x.flatten(0, 1), mask=regard.lengths(valid.flatten()))
    torch.testing.assert_close(output.flatten(0, 1), flat, rtol=0, atol=1e-12)
    assert weights.shape == (2, 3, HEADS, QUERIES, QUERIES)


def test_dropout_is_of_weights_and_only_in_training() -> None:
    attend = MultiHeadAttention(DIM, HEADS, dropout=0.5)
    x = torch.randn(BATCH, QUERIES, DIM)
    assert (attend(x) - attend(x)).abs().max() > 1e-3
    attend.eval()
    assert torch.equal(attend(x), attend(x))


def test_initialisation_is_glorot_of_each_matrix() -> None:
    """Queries, keys and values of one width are one matrix, as in torch's module; of several widths they are three."""
    torch.manual_seed(0)
    attend: Any = MultiHeadAttention(64, 4, num_kv_heads=1)
    apart: Any = MultiHeadAttention(64, 4, key_dim=32)
    assert [tuple(weight.shape) for weight in attend.in_weights] == [(96, 64)]
    assert [tuple(weight.shape) for weight in apart.in_weights] == [(64, 64), (64, 32), (64, 32)]
    for weight in (*attend.in_weights, attend.out.weight, *apart.in_weights, apart.out.weight):
        bound = (6 / sum(weight.shape)) ** 0.5
        assert 0.98 * bound < weight.abs().max() <= bound
    theirs = torch.nn.MultiheadAttention(64, 4)
    ours: Any = MultiHeadAttention(64, 4)
    torch.testing.assert_close(ours.in_weights[0].std(), theirs.in_proj_weight.std(), rtol=0.03, atol=0)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"dim": 33, "num_heads": 4}, "dim must be a multiple of num_heads, got 33 and 4"),
        ({"dim": 33, "num_heads": 3, "num_kv_heads": 2}, "multiple of num_kv_heads, got 3 and 2"),
        ({"dim": 33, "num_heads": 0}, "num_heads must be at least 1, got 0"),
        ({"dim": 33, "num_heads": 3, "num_kv_heads": 0}, "num_kv_heads must be at least 1, got 0"),
        ({"dim": 33, "num_heads": 3, "dropout": 1.0}, r"dropout must be in \[0, 1\), got 1.0"),
        ({"dim": 0, "num_heads": 3}, "dim must be at least 1, got 0"),
    ],
)
def test_arguments_that_make_no_module(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        MultiHeadAttention(**arguments)


@pytest.mark.usefixtures("as_installed")
def test_inputs_that_do_not_fit() -> None:
    attend = MultiHeadAttention(DIM, HEADS, key_dim=11, value_dim=13)
    x, key, value = (torch.randn(BATCH, KEYS, n) for n in (DIM, 11, 13))
    with pytest.raises(ShapeError, match=r"\(batch..., length, dim\), got \(7, 33\)"):
        MultiHeadAttention(DIM, HEADS)(x[0])
    with pytest.raises(ShapeError, match="query must be 33 wide, got 32"):
        attend(x[..., 1:], key, value)
    with pytest.raises(ShapeError, match="key must be 11 wide, got 13"):
        attend(x, value, key)
    with pytest.raises(ShapeError, match="value must be 13 wide, got 11"):
        attend(x, key)
    with pytest.raises(ShapeError, match="query must be 33 wide, got 32"):
        MultiHeadAttention(DIM, HEADS)(x[..., 1:])
    with pytest.raises(ShapeError, match="key and value must have the same length"):
        attend(x, key, value[:, 1:])
    with pytest.raises(ShapeError, match=r"as wide as the queries, here \(33, 11, 11\)"):
        MultiHeadAttention(DIM, HEADS, key_dim=11).extend(x, None)


def random_kv(length: int, rows: int = BATCH) -> KeyValue:
    return KeyValue.of(torch.randn(rows, HEADS, length, 5), torch.randn(rows, HEADS, length, 5))


@given(lengths=st.lists(st.integers(1, 4), min_size=1, max_size=9), seed=st.integers(0, 9))
def test_appending_is_concatenation(lengths: list[int], seed: int) -> None:
    torch.manual_seed(seed)
    with torch.no_grad():
        pieces = [random_kv(n) for n in lengths]
        cache = pieces[0]
        before = []
        for piece in pieces[1:]:
            before.append((cache, cache.key.clone(), cache.value.clone()))
            cache = cache.append(piece)
    assert torch.equal(cache.key, torch.cat([p.key for p in pieces], 2))
    assert torch.equal(cache.value, torch.cat([p.value for p in pieces], 2))
    assert cache.length == sum(lengths)
    # What was handed over before still reads the same.
    for old, key, value in before:
        assert torch.equal(old.key, key)
        assert torch.equal(old.value, value)


def test_buffers_grow_geometrically_without_gradients() -> None:
    with torch.no_grad():
        cache = random_kv(1)
        buffers = set()
        for _ in range(64):
            cache = cache.append(random_kv(1))
            buffers.add(cache.key_buffer.data_ptr())
    assert len(buffers) <= 7


def test_reordering_picks_rows_and_leaves_the_old_state_alone() -> None:
    with torch.no_grad():
        cache = random_kv(3, rows=3).append(random_kv(2, rows=3))
        key, value = cache.key.clone(), cache.value.clone()
        picked = cache.reorder(torch.tensor([2, 0, 2, 1]))
        assert torch.equal(picked.key, key[[2, 0, 2, 1]])
        assert torch.equal(picked.value, value[[2, 0, 2, 1]])
        picked.append(random_kv(2, rows=4))
        assert torch.equal(cache.key, key)
        assert torch.equal(cache.value, value)


def test_a_cache_that_was_made_in_inference_mode_goes_on_outside_of_it() -> None:
    attend, x = regard.nn.MultiHeadAttention(8, 2), torch.randn(2, 9, 8)
    cache, outputs = None, []
    for mode, start, stop in ((torch.inference_mode, 0, 4), (torch.inference_mode, 4, 5), (torch.no_grad, 5, 6),
                              (torch.no_grad, 6, 7), (torch.enable_grad, 7, 9)):  # fmt: skip
        with mode():
            output, cache = attend.extend(x[:, start:stop], cache)
        outputs.append(output)
    torch.testing.assert_close(torch.cat(outputs, 1), attend(x, mask=regard.causal()), rtol=0, atol=1e-6)
