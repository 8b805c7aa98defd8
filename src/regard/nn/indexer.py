"""The indexer of sparse attention: it chooses the keys of each query."""

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.masks.chosen_keys import chosen
from regard.call.shapes import Sizes
from regard.nn.arguments import require_sizes
from regard.tensors.tile_sizes import ranges

ROWS_AT_A_TIME = 256
"""The queries whose scores exist at a time."""


class Indexer(nn.Module):
    r"""Chooses the k keys s of each query t with the largest $I_{ts} = \sum_h w_{th} \max(q_{th} \cdot k_s, 0)$.

    Args:
        dim: width of the input.
        num_heads: the heads h of the indexer, which share one key.
        head_dim: their width.
        most: k.

    Raises:
        ArgumentError: a size is below 1.

    Source: DeepSeek-AI 2025 (arXiv:2512.02556), section 2.1, equations 1 and 2.

    >>> import regard
    >>> x, choose = torch.randn(1, 6, 16), Indexer(16, 2, 8, most=3)
    >>> choose(x, regard.causal()).to_tensor(6, batch=1).sum(-1).tolist()
    [[1, 2, 3, 3, 3, 3]]
    """

    def __init__(self, dim: int, num_heads: int, head_dim: int, *, most: int) -> None:
        super().__init__()
        require_sizes(dim=dim, num_heads=num_heads, head_dim=head_dim, most=most)
        self.most, self.num_heads = most, num_heads
        self.query, self.key = nn.Linear(dim, num_heads * head_dim, bias=False), nn.Linear(dim, head_dim, bias=False)
        self.weight = nn.Linear(dim, num_heads, bias=False)

    def scores(self, query: Float[Tensor, "B T D"], key: Float[Tensor, "B S D"]) -> Float[Tensor, "B T S"]:
        """I, with gradients: a loss can train the indexer towards the weights of the attention."""
        heads = self.query(query).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        products = torch.relu(heads @ self.key(key)[:, None].mT)
        return torch.einsum("bhts,bth->bts", products, self.weight(query))

    @torch.no_grad()
    def forward(
        self, query: Float[Tensor, "B T D"], mask: Mask | None = None, key: Float[Tensor, "B S D"] | None = None
    ) -> Mask:
        """The mask of the chosen keys, among those that `mask` allows.

        Args:
            query: (B, T, dim).
            mask: the keys to choose from; None for all.
            key: (B, S, dim); by default the query.

        Returns:
            `regard.chosen(indices)` with k indices for each query, in memory linear in T and S.
        """
        key = query if key is None else key
        (batch, queries, _), keys = query.shape, key.shape[1]
        sizes = Sizes((batch,), 1, 1, queries, keys, True)
        bound = None if mask is None else mask.bind(sizes, query.device)
        parts = []
        for rows in ranges(queries, ROWS_AT_A_TIME):
            scores = self.scores(query[:, rows.start : rows.stop], key)
            if bound is not None:
                allowed = bound.block(rows, range(keys), sizes=sizes, device=query.device).squeeze(1)
                scores = scores.masked_fill(~allowed, -torch.inf)
            best = scores.topk(min(self.most, keys), dim=-1)
            parts.append(best.indices.masked_fill(best.values == -torch.inf, -1))
        return chosen(torch.cat(parts, dim=1))
