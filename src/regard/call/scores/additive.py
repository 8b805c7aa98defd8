"""Additive scores (Bahdanau)."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.call.scores.base import Score, ScorePull
from regard.errors import ShapeError, require
from regard.tensors.guards import is_recorded
from regard.tensors.triton_use import or_else, runs_triton

KERNEL = "additive scores"
BLOCK = (16, 16, 32)
"""Rows, columns and hidden units in a program's registers."""
Pulled = tuple[Tensor, Tensor, Tensor]
"""The gradients of queries, keys and the vector; the last is 0 unless requested."""


def has_additive_kernel(query: Tensor) -> bool:
    """Whether the kernel takes these vectors: float32, on a GPU."""
    return query.dtype == torch.float32 and runs_triton(query.device, KERNEL)


def scores_by_kernel(query: Tensor, key: Tensor, vector: Tensor) -> Tensor:
    """The scores (..., t, s) of queries (..., t, A) and keys (..., s, A)."""
    from regard.call.scores import triton_additive

    lead, q, k = _flat(query, key)
    cells, queries, hidden = q.shape
    keys, (rows, columns, units) = k.shape[1], BLOCK
    scores = q.new_empty(cells, queries, keys)
    if scores.numel():
        programs = cells * -(-queries // rows) * -(-keys // columns)
        triton_additive.add_scores[(programs,)](
            q, k, vector.float().contiguous(), scores, queries, keys, hidden,
            ROWS=rows, COLUMNS=columns, UNITS=units,
        )  # fmt: skip
    return scores.view(*lead, queries, keys)


def pulled_by_kernel(query: Tensor, key: Tensor, vector: Tensor, gradient: Tensor, *, finds_vector: bool) -> Pulled:
    """The gradients of queries, keys and the vector, from those of the scores (..., t, s)."""
    from regard.call.scores import triton_additive

    lead, q, k = _flat(query, key)
    cells, queries, hidden = q.shape
    keys, (rows, columns, units) = k.shape[1], BLOCK
    gradient = gradient.reshape(cells, queries, keys).contiguous()
    d_query, d_key = torch.zeros_like(q), torch.zeros_like(k)
    parts = q.new_zeros(cells * -(-queries // rows) if finds_vector else 1, hidden)
    vector = vector.float().contiguous()
    blocks_of_units = -(-hidden // units)

    def pull(one: Tensor, other: Tensor, d_one: Tensor, steps: tuple[int, int], wants: bool) -> None:
        count, length = one.shape[1], other.shape[1]
        if cells and count and length:
            triton_additive.pull_rows[(cells * -(-count // rows) * blocks_of_units,)](
                one, other, vector, gradient, d_one, parts, count, length, hidden, *steps,
                FINDS_VECTOR=wants, ROWS=rows, COLUMNS=columns, UNITS=units,
            )  # fmt: skip

    pull(q, k, d_query, (keys, 1), finds_vector)
    pull(k, q, d_key, (1, keys), False)
    return d_query.view(*lead, queries, hidden), d_key.view(*lead, keys, hidden), parts.sum(0)


def _flat(query: Tensor, key: Tensor) -> tuple[tuple[int, ...], Tensor, Tensor]:
    lead = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2])
    q, k = (x.expand(*lead, *x.shape[-2:]).reshape(-1, *x.shape[-2:]).contiguous() for x in (query, key))
    return tuple(lead), q, k


SWEEP = 1 << 18
"""The elements in the buffer of an additive score: 1 MiB in float32."""


@dataclass(frozen=True, slots=True, eq=False)
class Additive(Score):
    r"""$s_{ij} = v^\top \tanh(W_q q_i + W_k k_j)$.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section A.1.2: their $v_a$, $W_a$ and $U_a$ are our
    `vector`, `query_weight` and `key_weight`.

    Leave out a weight if the query or key is already projected, such as keys projected once for a whole decoding. The
    projections run once; only the sum, the tanh and the product with v run for each pair.

    >>> score = Additive(torch.ones(2), query_weight=torch.eye(2), key_weight=torch.zeros(2, 3))
    >>> q, k = score.prepare(torch.ones(1, 2), torch.ones(4, 3))
    >>> score.block(q, k)
    tensor([[1.5232, 1.5232, 1.5232, 1.5232]])
    """

    vector: Float[Tensor, " A"]
    """v: one weight for each hidden unit."""
    query_weight: Float[Tensor, "A Dq"] | None = None
    """W_q; None for queries of width A."""
    key_weight: Float[Tensor, "A Dk"] | None = None
    """W_k; None for keys of width A."""

    def __post_init__(self) -> None:
        require(self.vector, Tensor, "vector", "a tensor (A,), a weight for each hidden unit")

    @classmethod
    def concat(cls, vector: Float[Tensor, " A"], weight: Float[Tensor, "A width"], query_dim: int) -> "Additive":
        r"""$v^\top \tanh(W [q; k])$: the same score, with $W = [W_q\; W_k]$ in one matrix.

        Source: Luong et al. 2015 (arXiv:1508.04025), equation 8 ("concat").
        """
        return cls(vector, query_weight=weight[:, :query_dim], key_weight=weight[:, query_dim:])

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        query = self._project(query, self.query_weight, "query")
        key = self._project(key, self.key_weight, "key")
        return query, key

    def _project(self, vectors: Tensor, weight: Tensor | None, name: str) -> Tensor:
        hidden = self.vector.shape[-1]
        expected = hidden if weight is None else weight.shape[-1]
        if vectors.shape[-1] != expected or (weight is not None and weight.shape[0] != hidden):
            shape = None if weight is None else tuple(weight.shape)
            raise ShapeError(
                f"additive score with {hidden} hidden units and {name}_weight {shape} "
                f"needs a {name} of width {expected}, got {vectors.shape[-1]}"
            )
        return vectors if weight is None else torch.nn.functional.linear(vectors, weight)

    def block(self, query: Tensor, key: Tensor) -> Tensor:
        takes_gradient = is_recorded() and any(x.requires_grad for x in (query, key, self.vector))
        if not takes_gradient and has_additive_kernel(query):
            return or_else(KERNEL, lambda: scores_by_kernel(query, key, self.vector), lambda: self._block(query, key))
        return self._block(query, key, takes_gradient=takes_gradient)

    def _block(self, query: Tensor, key: Tensor, *, takes_gradient: bool = False) -> Tensor:
        if not takes_gradient and query.shape[-2] * key.shape[-2] * key.shape[-1] > SWEEP:
            return self._swept(query, key)
        # In place: neither the sum nor its gradient is used again.
        hidden = (query[..., :, None, :] + key[..., None, :, :]).tanh_()
        return hidden @ self.vector.to(hidden.dtype)

    def _swept(self, query: Tensor, key: Tensor) -> Tensor:
        *batch, t, dim = query.shape
        s = key.shape[-2]
        scores = query.new_empty(*batch, t, s)
        rows, vector = max(1, SWEEP // (s * dim)), self.vector.to(query.dtype)
        hidden = query.new_empty(min(rows, t), s, dim)
        whole = (x.reshape(-1, *x.shape[-2:]) for x in (query, key.expand(*batch, s, dim), scores))
        for q, k, answers in zip(*whole, strict=True):
            for some, answer in zip(q.split(rows), answers.split(rows), strict=True):
                buffer = hidden[: len(some)]
                torch.add(some[:, None], k, out=buffer).tanh_()
                torch.mv(buffer.flatten(0, 1), vector, out=answer.view(-1))
        return scores

    def linearize(self, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ScorePull]:
        if has_additive_kernel(query):
            return or_else(
                KERNEL,
                lambda: self._linearize_by_kernel(query, key),
                lambda: self._linearize(query, key),
            )
        return self._linearize(query, key)

    def _linearize_by_kernel(self, query: Tensor, key: Tensor) -> tuple[Tensor, ScorePull]:
        vector = self.vector.detach()

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            d_query, d_key, d_vector = pulled_by_kernel(query, key, vector, grad, finds_vector=bool(totals))
            for total in totals:
                total += d_vector
            return d_query, d_key

        return scores_by_kernel(query, key, vector), pull

    def _linearize(self, query: Tensor, key: Tensor) -> tuple[Tensor, ScorePull]:
        hidden = (query[..., :, None, :] + key[..., None, :, :]).tanh_()
        vector = self.vector.detach().to(hidden.dtype)

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            for total in totals:
                total += grad.flatten() @ hidden.flatten(0, -2)
            slope = hidden.square_().sub_(1).mul_(grad[..., None])
            return slope.sum(-2) * -vector, slope.sum(-3) * -vector

        return hidden @ vector, pull

    def learned(self) -> tuple[Tensor, ...]:
        return (self.vector,)

    def pair_width(self, dim: int) -> int:
        by_kernel = self.vector.dtype != torch.float64 and runs_triton(self.vector.device, KERNEL)
        return 1 if by_kernel else self.vector.shape[-1]

    def __str__(self) -> str:
        return f"additive score with {self.vector.shape[-1]} hidden units"
