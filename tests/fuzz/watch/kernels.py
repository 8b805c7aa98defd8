"""Attention through torch's kernel, and through regard's own."""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from tests.fuzz.drawing import Drawn
from tests.fuzz.watch.truths import Truths


class Kernel(nn.Module):
    def __init__(self, dim: int, heads: int, drawn: Drawn, truths: Truths) -> None:
        super().__init__()
        self.heads, self.truths = heads, [truths]
        self.groups = heads if drawn.chance() else 1
        self.how = drawn.of(["sdpa", "sdpa", "regard"])
        self.masking = drawn.of(["bool", "float", "lowest"])
        self.is_causal = drawn.chance(3)
        self.scale = drawn.of([None, 0.3, 1.0])
        self.dropout = drawn.of([0.0, 0.0, 0.2])
        self.has_heads = not drawn.chance(6)
        head = dim // heads
        self.query, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim)
        self.key_value = nn.Linear(dim, 2 * self.groups * head)

    def __str__(self) -> str:
        return (
            f"{self.how} {self.groups}/{self.heads} {self.masking} causal={self.is_causal} {self.scale} {self.dropout}"
        )

    def forward(self, x: Tensor, memory: Tensor | None = None, keep: Tensor | None = None) -> Tensor:
        """x (B, T, dim), memory (B, S, dim), keep (1 or B, 1, T, S)."""
        memory = x if memory is None else memory
        q = self.query(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k, v = self.key_value(memory).unflatten(-1, (self.groups, -1)).transpose(1, 2).chunk(2, -1)
        is_causal = self.is_causal and keep is None and q.shape[2] == k.shape[2]
        if not self.has_heads and self.groups == self.heads:
            return self._without_heads(q, k, v)
        attended = (self._sdpa if self.how == "sdpa" else self._regard)(q, k, v, keep, is_causal)
        return self.out(attended.transpose(1, 2).flatten(2))

    def _without_heads(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Three dimensions: (B, T, D) of the first head."""
        self.truths[0].add_scores(self, "sdpa of 3 dimensions", q[:, :1], k[:, :1])
        first = F.scaled_dot_product_attention(q[:, 0], k[:, 0], v[:, 0])
        return self.out(torch.cat([first] * self.heads, -1))

    def _sdpa(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        mask = keep
        if keep is not None and self.masking != "bool":
            low = -torch.inf if self.masking == "float" else torch.finfo(q.dtype).min
            mask = torch.zeros(keep.shape, dtype=q.dtype).masked_fill(~keep, low)
        self.truths[0].add_scores(self, str(self), q, k, mask=mask, is_causal=is_causal, scale=self.scale)
        return F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, dropout_p=self.dropout if self.training else 0.0, is_causal=is_causal,
            scale=self.scale, enable_gqa=self.groups != self.heads,
        )  # fmt: skip

    def _regard(self, q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, is_causal: bool) -> Tensor:
        self.truths[0].add_scores(self, str(self), q, k, mask=keep, is_causal=is_causal, scale=self.scale)
        mask: Any = regard.causal() if is_causal else None if keep is None else keep
        dropout = self.dropout if self.training else 0.0
        return regard.attention(q, k, v, score=regard.ScaledDot(self.scale), mask=mask, dropout=dropout)
