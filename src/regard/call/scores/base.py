"""Scores: scalar functions of a query and a key.

A score has two steps. `prepare` runs once on the whole query and key (a projection, a normalization of their length).
`block` turns any block of prepared queries and keys into scores. `dot_scale` declares a scaled dot product after
`prepare`, for the fused kernels.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from numbers import Real

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, ShapeError, require
from regard.tensors.memory import widest_dtype

ScorePull = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""From the gradient of a block of scores to the gradients of the block's queries and keys.

It may overwrite its first argument, and adds the gradients of the learned tensors to those in its second argument.
It is called once.
"""


class Score(ABC):
    """The interface of scores."""

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """Transform the whole query and key once, in memory linear in their lengths."""
        return (query, key) if query.shape[-1] == key.shape[-1] else same_width(self, query, key)

    @abstractmethod
    def block(
        self, query: Float[Tensor, "*batch t D"], key: Float[Tensor, "*batch s D"]
    ) -> Float[Tensor, "*batch t s"]:
        """Scores of a block of prepared queries against a block of prepared keys."""

    @property
    def is_declared(self) -> bool:
        """Whether `learned` names every tensor through which `block` takes a gradient."""
        return True

    def learned(self) -> tuple[Tensor, ...]:
        """The tensors, besides query and key, with a gradient from `block`."""
        return ()

    def select(self, heads: Tensor) -> "Score":
        """The score of some heads, each as a batch row of one head. A score without heads returns itself."""
        return self

    def pair_width(self, dim: int) -> int:
        """The elements in memory for each pair while `block` runs."""
        return 1

    def linearize(self, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ScorePull]:
        """`block` without a graph, as scores that may be overwritten, and its backward function.

        `learned` are the tensors of `learned()` with a gradient, of the score before `select`. Autograd does the work,
        unless a subclass has a faster way.
        """
        scale = self.dot_scale(query.shape[-1])
        return _by_autograd(self, query, key, learned) if scale is None else _dot(query, key, scale)

    def dot_scale(self, dim: int) -> float | None:
        """The factor c of a score c * (query . key) of prepared vectors of width dim; None for other scores."""
        return None


@dataclass(frozen=True, slots=True)
class ScaledDot(Score):
    r"""$s_{ij} = c \, q_i \cdot k_j$, with $c = 1/\sqrt{D}$ unless c is given.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; their $d_k$ is our D.

    >>> ScaledDot().block(torch.ones(1, 4), torch.ones(2, 4))
    tensor([[2., 2.]])
    """

    scale: float | None = None
    """c; default 1/sqrt(D)."""

    def dot_scale(self, dim: int) -> float:
        return dim**-0.5 if self.scale is None else self.scale

    def block(self, query: Tensor, key: Tensor) -> Tensor:
        return (query * self.dot_scale(query.shape[-1])) @ key.mT

    def __str__(self) -> str:
        return "scaled dot product" if self.scale is None else f"dot product times {self.scale:g}"


def Dot() -> ScaledDot:
    r"""$s_{ij} = q_i \cdot k_j$: `ScaledDot` with the factor 1.

    Source: Luong et al. 2015 (arXiv:1508.04025), equation 8 ("dot").

    >>> Dot().block(torch.ones(1, 4), torch.ones(2, 4))
    tensor([[4., 4.]])
    """
    return ScaledDot(scale=1.0)


class PreparedDot(Score):
    """The dot product of prepared vectors. Subclasses define `prepare`."""

    def dot_scale(self, dim: int) -> float:
        return 1.0

    def block(self, query: Tensor, key: Tensor) -> Tensor:
        return query @ key.mT


@dataclass(frozen=True, slots=True, eq=False)
class Cosine(PreparedDot):
    r"""$s_{ij} = \tau \, \frac{q_i}{\lVert q_i \rVert} \cdot \frac{k_j}{\lVert k_j \rVert}$.

    Source: Henry et al. 2020 (arXiv:2010.04245), equation 6, whose learned g is our `temperature`.

    >>> Cosine(10.0).prepare(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]))
    (tensor([[6., 8.]]), tensor([[0., 1.]]))
    """

    temperature: float | Float[Tensor, "..."] = 1.0
    """tau: a scalar, perhaps learned, or one for each head (H,)."""

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        query, key = same_width(self, query, key)
        # In half precision, squares of small vectors vanish, and those of large ones overflow.
        dtype, precise = query.dtype, torch.promote_types(query.dtype, torch.float32)
        query, key = (torch.nn.functional.normalize(x.to(precise), dim=-1) for x in (query, key))
        return (query * per_head(self.temperature, query).to(precise)).to(dtype), key.to(dtype)

    def __str__(self) -> str:
        return "cosine"


@dataclass(frozen=True, slots=True, eq=False)
class Bilinear(PreparedDot):
    r"""$s_{ij} = q_i^\top W k_j$.

    Source: Luong et al. 2015 (arXiv:1508.04025), equation 8 ("general"): their $W_a$ is our `weight`.

    >>> q, k = Bilinear(torch.ones(2, 3)).prepare(torch.ones(1, 2), torch.ones(4, 3))
    >>> q @ k.mT
    tensor([[6., 6., 6., 6.]])
    """

    weight: Float[Tensor, "Dq Dk"]

    def __post_init__(self) -> None:
        require(self.weight, Tensor, "weight", "a tensor (Dq, Dk)")

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        if (query.shape[-1], key.shape[-1]) != tuple(self.weight.shape):
            raise ShapeError(
                f"bilinear score with a weight {tuple(self.weight.shape)} needs query and key of these widths, "
                f"got {query.shape[-1]} and {key.shape[-1]}"
            )
        return query @ self.weight, key

    def __str__(self) -> str:
        return "bilinear score"


@dataclass(frozen=True, slots=True, eq=False)
class SoftCapped(Score):
    r"""$c \tanh(s_{ij} / c)$ for another score s.

    Source: Gemma Team 2024 (arXiv:2408.00118), section 2 (logit soft-capping).

    >>> SoftCapped(Dot(), cap=2.0).block(torch.ones(1, 4), torch.ones(1, 4))
    tensor([[1.9281]])
    """

    score: Score
    cap: float

    def __post_init__(self) -> None:
        require(self.score, Score, "score", "a regard score")
        require(self.cap, Real, "cap", "a number")
        if not self.cap > 0:
            raise ArgumentError(f"cap must be above 0, got {self.cap}")

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        return self.score.prepare(query, key)

    @property
    def is_declared(self) -> bool:
        return self.score.is_declared

    def learned(self) -> tuple[Tensor, ...]:
        return self.score.learned()

    def select(self, heads: Tensor) -> "Score":
        return SoftCapped(self.score.select(heads), self.cap)

    def pair_width(self, dim: int) -> int:
        return self.score.pair_width(dim)

    def linearize(self, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ScorePull]:
        inner, pull_inner = self.score.linearize(query, key, learned)
        capped = inner.div_(self.cap).tanh_()

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return pull_inner(grad.mul_(1 - capped.square()), totals)

        return self.cap * capped, pull

    def block(self, query: Tensor, key: Tensor) -> Tensor:
        return self.cap * torch.tanh(self.score.block(query, key) / self.cap)

    def __str__(self) -> str:
        return f"{self.score}, soft-capped at {self.cap:g}"


def _dot(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, ScorePull]:
    query = query * scale

    def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return (grad @ key) * scale, grad.mT @ query

    return query @ key.mT, pull


def _by_autograd(score: Score, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, ScorePull]:
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    with torch.enable_grad():
        scores = score.block(query, key)

    def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return pull_through_graph(scores, grad, (query, key), learned, totals)

    # Autograd has saved these scores, so return a copy that may be overwritten.
    return scores.detach().clone(), pull


def require_for_heads(value: object) -> None:
    require(value, (Real, Tensor), "a width or a temperature", "a number, or a tensor of one for each head")


def per_head(value: float | Tensor, query: Tensor) -> Tensor:
    """Shape a scalar, or one for each head (H,), to multiply (..., H, T, D)."""
    # As float64, a Python number keeps all its digits up to the product.
    wide = widest_dtype(query.device)
    require_for_heads(value)
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=wide, device=query.device)
    if tensor.dim() != 1:
        return tensor
    if len(tensor) not in (1, query.shape[-3]):
        raise ShapeError(f"expected one number, or one for each of {query.shape[-3]} heads; got {len(tensor)}")
    return tensor[:, None, None]


def same_width(score: Score, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"{score} needs query and key of one width, got {query.shape[-1]} and {key.shape[-1]}")
    return query, key


def pull_through_graph(
    block: Tensor, grad: Tensor, vectors: tuple[Tensor, Tensor], learned: Sequence[Tensor], totals: Sequence[Tensor]
) -> tuple[Tensor, Tensor]:
    """The gradients of the query and the key of a block; the gradients of `learned` are added to `totals`.

    The graph is retained, because all blocks share the graphs of the selected learned tensors.

    >>> query, key = torch.ones(1, 2, requires_grad=True), torch.ones(3, 2, requires_grad=True)
    >>> pull_through_graph(query @ key.mT, torch.ones(1, 3), (query, key), (), ())[0]
    tensor([[3., 3.]])
    """
    d_query, d_key, *others = torch.autograd.grad(
        block, (*vectors, *learned), grad, retain_graph=True, allow_unused=True, materialize_grads=True
    )
    for total, other in zip(totals, others, strict=True):
        total += other
    return d_query, d_key
