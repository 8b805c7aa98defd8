"""Additive (Bahdanau) attention as a module."""

from typing import Literal, overload

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.call.masks.base import Mask
from regard.call.scores.additive import Additive
from regard.call.shapes import require_dense
from regard.errors import ShapeError
from regard.functional import Attended, attention
from regard.kernels.base import BackendName
from regard.tensors.kinds import refuse_wrong_kinds
from regard.tensors.ranges import require_dropout, require_sizes


@refuse_wrong_kinds
class AdditiveAttention(nn.Module):
    r"""$s_{ij} = v^\top \tanh(W_q q_i + W_k k_j)$, weights by softmax, output $\sum_j P_{ij} v_j$.

    Args:
        query_dim: width of the queries.
        key_dim: width of the keys.
        hidden_dim: A, the hidden units; the paper's n'.
        dropout: the probability that a weight is dropped in training, in [0, 1).

    Raises:
        ArgumentError: a size is below 1, or the dropout is outside its range.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section A.1.2: their $v_a$, $W_a$ and $U_a$ are our `vector`,
    `query_weight` and `key_weight`.

    >>> import regard
    >>> attend = AdditiveAttention(4, 6, 8)
    >>> memory = torch.randn(2, 5, 6)
    >>> attend(torch.randn(2, 1, 4), memory, mask=regard.lengths(torch.tensor([2, 5]))).shape
    torch.Size([2, 1, 6])

    For many queries on the same keys, one after the other, project the keys once:

    >>> projected = attend.project(memory)
    >>> attend.attend(torch.randn(2, 1, 4), projected, memory).shape
    torch.Size([2, 1, 6])
    """

    def __init__(self, query_dim: int, key_dim: int, hidden_dim: int, *, dropout: float = 0.0) -> None:
        super().__init__()
        require_sizes(query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden_dim)
        require_dropout(dropout=dropout)
        self.query_weight = nn.Parameter(torch.empty(hidden_dim, query_dim))
        self.key_weight = nn.Parameter(torch.empty(hidden_dim, key_dim))
        self.vector = nn.Parameter(torch.empty(hidden_dim))
        self.dropout = dropout
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Glorot uniform; v is initialised as the row of a layer with one output."""
        nn.init.xavier_uniform_(self.query_weight)
        nn.init.xavier_uniform_(self.key_weight)
        nn.init.xavier_uniform_(self.vector.detach()[None])

    def forward(
        self,
        query: Float[Tensor, "*batch T query_dim"],
        key: Float[Tensor, "*batch S key_dim"],
        value: Float[Tensor, "*batch S E"] | None = None,
        *,
        mask: Mask | Tensor | None = None,
        backend: BackendName | None = None,
        return_weights: bool = False,
    ) -> Tensor | Attended:
        """Attend from query to key and value.

        Args:
            query: (batch..., T, query_dim).
            key: (batch..., S, key_dim).
            value: (batch..., S, E); by default the key.
            mask: as in `regard.attention`, over (batch..., T, S).
            backend: as in `regard.attention`.
            return_weights: also return the weights, an `AttentionMap` of shape (batch..., T, S).

        Returns:
            (batch..., T, E), or the named tuple (output, weights).

        Raises:
            ShapeError: the inputs do not fit each other.
        """
        value = key if value is None else value
        projected = self.project(key)
        return self.attend(query, projected, value, mask=mask, backend=backend, return_weights=return_weights)

    def project(self, key: Float[Tensor, "*batch S key_dim"]) -> Float[Tensor, "*batch S A"]:
        """W_k k, for one or many calls of `attend`."""
        require_dense(key, "the key")
        if key.shape[-1] != self.key_weight.shape[1]:
            raise ShapeError(f"the key must be {self.key_weight.shape[1]} wide, got {key.shape[-1]}")
        return nn.functional.linear(key, self.key_weight)

    @overload
    def attend(
        self, query: Tensor, projected: Tensor, value: Tensor, *, mask: Mask | Tensor | None = ...,
        backend: BackendName | None = ..., return_weights: Literal[False] = ...,
    ) -> Tensor: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, projected: Tensor, value: Tensor, *, mask: Mask | Tensor | None = ...,
        backend: BackendName | None = ..., return_weights: Literal[True],
    ) -> Attended: ...  # fmt: skip
    @overload
    def attend(
        self, query: Tensor, projected: Tensor, value: Tensor, *, mask: Mask | Tensor | None = ...,
        backend: BackendName | None = ..., return_weights: bool,
    ) -> Tensor | Attended: ...  # fmt: skip
    def attend(
        self,
        query: Float[Tensor, "*batch T query_dim"],
        projected: Float[Tensor, "*batch S A"],
        value: Float[Tensor, "*batch S E"],
        *,
        mask: Mask | Tensor | None = None,
        backend: BackendName | None = None,
        return_weights: bool = False,
    ) -> Tensor | Attended:
        """Attend to projected keys; the rest is as in `forward`."""
        return attention(
            query,
            projected,
            value,
            score=Additive(self.vector, query_weight=self.query_weight),
            mask=mask,
            dropout=self.dropout if self.training else 0.0,
            backend=backend,
            return_weights=return_weights,
        )
