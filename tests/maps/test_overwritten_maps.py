"""A map holds the caller's queries and keys: whoever writes to them is told so when the map is read."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch

import regard
from regard.errors import OverwrittenError

CALLS: dict[str, dict[str, Any]] = {
    "fused": {"mask": regard.causal()},
    "a bias": {"bias": torch.zeros(5, 7)},
    "tiled": {"backend": "tiled"},
    "soft-capped": {"score": regard.SoftCapped(regard.ScaledDot(), 3.0)},
    "sigmoid": {"normalization": regard.Sigmoid()},
}
READS: dict[str, Callable[[regard.AttentionMap], Any]] = {
    "dense": lambda w: w.dense(),
    "product": lambda w: w @ torch.ones(7, 2),
    "entropy": lambda w: w.entropy(),
    "received, of an average": lambda w: w.average().received(),
    "of the transpose": lambda w: w.mT[0],
    "a copy": copy.deepcopy,
    "detached": lambda w: w.detach(),
}


@pytest.mark.parametrize("times", [1, 3])  # calls that were seen before are put together later
@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("which", ["queries", "keys"])
def test_what_was_written_to_is_not_read(which: str, name: str, times: int) -> None:
    with torch.no_grad():
        for _ in range(times):
            q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
            weights = regard.attention(q, k, k, return_weights=True, **CALLS[name]).weights
        some = weights[0]
        expected = some.dense()
        (q if which == "queries" else k).mul_(2)
    for read in READS.values():
        with pytest.raises(OverwrittenError, match=rf"the {which} \(2, 3, .* written to since its call"):
            read(weights)
    assert weights.shape == (2, 3, 5, 7)
    assert "cannot be read: the " in repr(weights)
    # Cells that were chosen before are copies.
    torch.testing.assert_close(some.dense(), expected)


OTHERS: dict[str, Callable[[], tuple[torch.Tensor, dict[str, Any]]]] = {
    "a bias": lambda: (b := torch.randn(5, 7), {"bias": b}),
    "a mask": lambda: (m := torch.rand(5, 7) > 0.5, {"mask": m}),
    "lengths": lambda: (n := torch.tensor([7, 3]), {"mask": regard.lengths(n)}),
    "causal and lengths": lambda: (n := torch.tensor([7, 3]), {"mask": regard.lengths(n) & regard.causal(0)}),
    "offsets": lambda: (o := torch.tensor([0, 2]), {"mask": regard.causal(o)}),
    "a learned score": lambda: (w := torch.randn(4, 4), {"score": regard.Bilinear(w)}),
    "a sink": lambda: (s := torch.randn(3), {"normalization": regard.SoftmaxWithSink(s)}),
}


@torch.no_grad()
@pytest.mark.parametrize("times", [1, 3])
@pytest.mark.parametrize("name", OTHERS)
def test_masks_biases_and_parameters_that_were_written_to(name: str, times: int) -> None:
    for _ in range(times):
        written, options = OTHERS[name]()
        q, k = torch.randn(2, 3, 5, 4), torch.randn(2, 3, 7, 4)
        weights = regard.attention(q, k, k, return_weights=True, **options).weights
    written.fill_(1)
    with pytest.raises(OverwrittenError, match=r"mask, the bias or the score .* written to since"):
        weights.dense()


@torch.no_grad()
def test_a_cache_with_room_for_more_keys_may_be_filled() -> None:
    cache, q = torch.zeros(2, 3, 20, 4), torch.randn(2, 3, 1, 4)
    cache[:, :, :7] = torch.randn(2, 3, 7, 4)
    keys = cache[:, :, :7]
    weights = regard.attention(q, keys, keys, return_weights=True).weights
    expected = weights.dense()
    cache[:, :, 7] = 1.0
    torch.testing.assert_close(weights.dense(), expected)


def test_tensors_of_inference_mode_are_read_as_they_are() -> None:
    with torch.inference_mode():
        q = torch.randn(2, 3, 5, 4)
        weights = regard.attention(q, q, q, return_weights=True).weights
    assert weights.dense().shape == (2, 3, 5, 5)
