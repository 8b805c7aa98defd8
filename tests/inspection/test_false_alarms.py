"""What the report must not name as missed, and what it must go on to name."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import regard
from tests.modules import module


class AttentionCore(nn.Module):
    """Queries, keys and values from one matrix."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.made = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part[:, None] for part in self.made(x).chunk(3, -1))
        return F.scaled_dot_product_attention(q, k, v)[:, 0]


class AttentionOutput(nn.Module):
    """What LXMERT and others call the projection after attention."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.dense, self.norm = nn.Linear(width, width), nn.LayerNorm(width)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        return self.norm(self.dense(x) + before)


class UnseenAttention(nn.Module):
    """Attention by a formula of its own: weights of 1 / (1 + distance)."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.query, self.key = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x: Tensor, before: Tensor) -> Tensor:
        near = 1 / (1 + torch.cdist(self.query(x), self.key(x)))
        return (near[..., None] * before[:, None]).sum(2) / near.sum(-1, keepdim=True)


class AttentionLayer(nn.Module):
    def __init__(self, after: nn.Module) -> None:
        super().__init__()
        self.core, self.after = AttentionCore(), after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.core(x), x)


def missed(model: nn.Module, *given: Any) -> list[tuple[str, str]]:
    with torch.no_grad(), regard.watch(model) as seen:
        model(*given)
    assert len(seen) == 1
    return [*seen.report().missed, *seen.report().mixers]


@pytest.mark.parametrize("nested", [False, True])
def test_the_projection_after_attention_that_was_seen_is_no_gap(nested: bool) -> None:
    layer = AttentionLayer(AttentionOutput())
    assert missed(nn.Sequential(layer) if nested else layer, torch.randn(2, 5, 8)) == []


def test_attention_beside_attention_that_was_seen_is_named() -> None:
    found = missed(AttentionLayer(UnseenAttention()), torch.randn(2, 5, 8))
    assert [path for path, _ in found] == ["after"]


def test_a_projection_is_no_gap_where_no_attention_around_it_was_seen() -> None:
    Model = module(lambda m, x: m.after(m.core(x), x), lambda: {"core": AttentionCore(), "after": AttentionOutput()})

    assert missed(Model(), torch.randn(2, 5, 8)) == []
