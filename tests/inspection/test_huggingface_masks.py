"""The masks of transformers at the offsets of a cache that has let its first keys go, and where no mask is given."""

from typing import Any

import pytest
import torch
from torch import nn

from regard.huggingface.enable import forward
from regard.huggingface.masks import lazy_mask
from tests.transformers_version import places

masking = pytest.importorskip("transformers.masking_utils")


class Layer(nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("is_padded", [False, True])
@pytest.mark.parametrize("kind", ["causal", "window"])
def test_a_cache_that_begins_at_a_later_key(kind: str, is_padded: bool, queries: int) -> None:
    """The keys 4 to 9 of ten are left, and the last queries ask."""
    function = masking.causal_mask_function if kind == "causal" else masking.sliding_window_causal_mask_function(3)
    padding = torch.ones(2, 10, dtype=torch.bool)
    padding[0, :2] = False
    padding[1, :6] = False
    options: dict[str, Any] = {
        "batch_size": 2, "kv_length": 6, "kv_offset": 4, "mask_function": function,
        "attention_mask": padding if is_padded else None, **places(10 - queries, queries),
    }  # fmt: skip
    theirs = masking.sdpa_mask(**options, allow_is_causal_skip=False)
    ours = lazy_mask(**options)
    assert torch.equal(ours & True, theirs.expand(ours.shape))


@pytest.mark.parametrize(("queries", "is_causal"), [(1, True), (1, False), (5, True), (5, False)])
def test_without_a_mask_the_layer_says_whether_it_is_causal_and_one_query_sees_every_key(
    queries: int, is_causal: bool
) -> None:
    query, key = torch.randn(1, 2, queries, 4), torch.randn(1, 2, 5, 4)
    output, weights = forward(Layer(is_causal), query, key, key, None)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, is_causal=is_causal and queries > 1)
    torch.testing.assert_close(output, expected.transpose(1, 2))
    assert (weights.dense()[0, 0, 0] > 0).sum() == (1 if is_causal and queries > 1 else 5)


def test_numbers_for_more_keys_than_there_are_are_cut() -> None:
    query, key, added = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 5, 4), torch.randn(1, 2, 3, 8)
    output, _ = forward(nn.Module(), query, key, key, None, is_causal=False, position_bias=added)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, key, attn_mask=added[..., :5])
    torch.testing.assert_close(output, expected.transpose(1, 2))
