"""The masks of attention-gym as predicates, and its scores beside ours: the output is their formula, dense."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import create_mask

import regard

masks = pytest.importorskip(
    "attn_gym.masks", reason="attn_gym is in an environment of its own: make consumers ONLY=attention_gym"
)
mods = pytest.importorskip("attn_gym.mods")

T, H = 64, 4
OFFSETS = torch.tensor([0, 10, 11, 40, T])

MODS: dict[str, Callable[[], Any]] = {
    "causal": lambda: masks.causal_mask,
    "window": lambda: masks.generate_sliding_window(7),
    "dilated window": lambda: masks.generate_dilated_sliding_window(8, 3),
    "global window": lambda: masks.generate_global_sliding_window(5, torch.arange(T) % 20 == 0),
    "prefix": lambda: masks.generate_prefix_lm_mask(9),
    "documents": lambda: masks.generate_doc_mask_mod(masks.causal_mask, OFFSETS),
    "block diffusion": lambda: masks.generate_block_diffusion_mask(T // 2, 8),
    "natten": lambda: masks.generate_natten(8, 8, 3, 3),
    "tiled natten": lambda: masks.generate_tiled_natten(8, 8, 3, 3, 4, 4),
    "morton natten": lambda: masks.generate_morton_natten(8, 8, 3, 3),
}


def inputs() -> tuple[torch.Tensor, ...]:
    return tuple(torch.randn(2, H, T, 16, dtype=torch.float64) for _ in range(3))


@pytest.mark.parametrize("backend", ["tiled", "reference"])
@pytest.mark.parametrize("name", MODS)
def test_a_mask_is_a_predicate(name: str, backend: Any) -> None:
    mod, (q, k, v) = MODS[name](), inputs()
    allowed = create_mask(mod, 2, H, T, T, device="cpu")
    dense = (q @ k.mT / 4).masked_fill(~allowed, float("-inf")).softmax(-1)
    output, weights = regard.attention(q, k, v, mask=regard.predicate(mod), backend=backend, return_weights=True)
    assert torch.allclose(output, dense @ v, atol=1e-12)
    assert torch.allclose(weights.dense(), dense, atol=1e-12)


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("causal", regard.causal()),
        ("window", regard.causal() & regard.window(8)),  # theirs leaves the query's own position uncounted
        ("prefix", regard.causal() | regard.prefix(9)),
        ("documents", regard.causal() & regard.documents(offsets=OFFSETS)),
    ],
)
def test_ours_of_the_same_name_is_the_same(name: str, ours: Any) -> None:
    theirs = create_mask(MODS[name](), 1, 1, T, T, device="cpu")
    assert torch.equal(torch.broadcast_to(ours.to_tensor(T, T), theirs.shape), theirs)


def test_their_alibi_and_soft_cap_are_ours() -> None:
    q, k, v = inputs()
    alibi, cap = mods.generate_alibi_bias(H), mods.generate_tanh_softcap(3)
    at = torch.meshgrid(torch.arange(2), torch.arange(H), torch.arange(T), torch.arange(T), indexing="ij")
    scores = q @ k.mT / 4
    for mod, given in (
        (alibi, {"bias": regard.ALiBi(H)}),
        (cap, {"score": regard.SoftCapped(regard.ScaledDot(), cap=3.0)}),
    ):
        expected = mod(scores, *at).masked_fill(at[2] < at[3], float("-inf")).softmax(-1) @ v
        assert torch.allclose(regard.attention(q, k, v, mask=regard.causal(), **given), expected, atol=1e-5), mod
