"""How a query and a key become a score.

A score is an object with two steps. `prepare` acts once on the whole query and key (a projection, a
normalization of their length); `block` turns any block of prepared queries and keys into scores. A
score that is a scaled dot product after `prepare` says so in `dot_scale`, and then the fused kernels
can run it.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError, ShapeError

_KEEPING = {"retain_graph": True, "allow_unused": True, "materialize_grads": True}
"""What is chosen for some heads is one graph for all tiles."""

Pull = Callable[[Tensor, Sequence[Tensor]], tuple[Tensor, Tensor]]
"""From the gradient of a block of scores, which it may write into, to those of the block's queries and keys.

The gradients of what is learned are added to the tensors that come second. It is called once.
"""


SWEEP = 1 << 18
"""Numbers that an additive score's buffer holds: 1 MiB in float32."""


class Score(ABC):
    """What a score answers."""

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """Transform the whole query and key once, in memory linear in their lengths."""
        return same_width(self, query, key)

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
        """The tensors that `block` reads besides query and key, and that may take a gradient."""
        return ()

    def select(self, heads: Tensor) -> "Score":
        """The score of some heads, each as a batch row of one head; a score without heads is its own."""
        return self

    def pair_width(self, dim: int) -> int:
        """How many numbers `block` holds for each pair while it runs."""
        return 1

    def linearize(self, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Pull]:
        """`block` without a graph, as scores that may be written into, and how their gradient goes back.

        `learned` are those tensors of `learned()` that take a gradient, of the score that this one was selected from.
        Autograd answers, unless a score knows a shorter way.
        """
        scale = self.dot_scale(query.shape[-1])
        return _by_autograd(self, query, key, learned) if scale is None else _dot(query, key, scale)

    def dot_scale(self, dim: int) -> float | None:
        """The factor c if the score is c * (query . key) for prepared vectors of width dim, else None."""
        return None


@dataclass(frozen=True, slots=True)
class ScaledDot(Score):
    r"""$s_{ij} = c \, q_i \cdot k_j$, with $c = 1/\sqrt{D}$ unless given.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1; their $d_k$ is our D.

    >>> ScaledDot().block(torch.ones(1, 4), torch.ones(2, 4))
    tensor([[2., 2.]])
    """

    scale: float | None = None
    """c; None is 1/sqrt(D)."""

    def dot_scale(self, dim: int) -> float:
        """C for vectors of width dim."""
        return dim**-0.5 if self.scale is None else self.scale

    def block(
        self, query: Float[Tensor, "*batch t D"], key: Float[Tensor, "*batch s D"]
    ) -> Float[Tensor, "*batch t s"]:
        """C * query @ key^T."""
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


@dataclass(frozen=True, slots=True, eq=False)
class Cosine(Score):
    r"""$s_{ij} = \tau \, \frac{q_i}{\lVert q_i \rVert} \cdot \frac{k_j}{\lVert k_j \rVert}$.

    Source: Henry et al. 2020 (arXiv:2010.04245), equation 6, whose learned g is our `temperature`.

    >>> Cosine(10.0).prepare(torch.tensor([[3.0, 4.0]]), torch.tensor([[0.0, 2.0]]))
    (tensor([[6., 8.]]), tensor([[0., 1.]]))
    """

    temperature: float | Float[Tensor, "..."] = 1.0
    """tau: a number, a learned scalar, or one for each head (H,)."""

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """Vectors of length tau and 1; a zero vector stays zero."""
        query, key = same_width(self, query, key)
        query, key = torch.nn.functional.normalize(query, dim=-1), torch.nn.functional.normalize(key, dim=-1)
        return query * per_head(self.temperature, query).to(query.dtype), key

    def dot_scale(self, dim: int) -> float:
        """1: the temperature is in the query."""
        return 1.0

    def block(
        self, query: Float[Tensor, "*batch t D"], key: Float[Tensor, "*batch s D"]
    ) -> Float[Tensor, "*batch t s"]:
        """query @ key^T."""
        return query @ key.mT

    def __str__(self) -> str:
        return "cosine"


@dataclass(frozen=True, slots=True, eq=False)
class Bilinear(Score):
    r"""$s_{ij} = q_i^\top W k_j$.

    Source: Luong et al. 2015 (arXiv:1508.04025), equation 8 ("general"): their $W_a$ is our `weight`.

    >>> q, k = Bilinear(torch.ones(2, 3)).prepare(torch.ones(1, 2), torch.ones(4, 3))
    >>> q @ k.mT
    tensor([[6., 6., 6., 6.]])
    """

    weight: Float[Tensor, "Dq Dk"]

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """Project the query to the key's width, once."""
        if (query.shape[-1], key.shape[-1]) != tuple(self.weight.shape):
            raise ShapeError(
                f"bilinear score with a weight {tuple(self.weight.shape)} needs query and key of these widths, "
                f"got {query.shape[-1]} and {key.shape[-1]}"
            )
        return query @ self.weight, key

    def dot_scale(self, dim: int) -> float:
        """1."""
        return 1.0

    def block(
        self, query: Float[Tensor, "*batch t D"], key: Float[Tensor, "*batch s D"]
    ) -> Float[Tensor, "*batch t s"]:
        """query @ key^T, the query being projected."""
        return query @ key.mT

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
        if not self.cap > 0:
            raise ArgumentError(f"cap must be above 0, got {self.cap}")

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """The inner score's."""
        return self.score.prepare(query, key)

    @property
    def is_declared(self) -> bool:
        """The inner score's."""
        return self.score.is_declared

    def learned(self) -> tuple[Tensor, ...]:
        """The inner score's."""
        return self.score.learned()

    def select(self, heads: Tensor) -> "Score":
        """The inner score's, capped."""
        return SoftCapped(self.score.select(heads), self.cap)

    def pair_width(self, dim: int) -> int:
        """The inner score's."""
        return self.score.pair_width(dim)

    def linearize(self, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Pull]:
        """The inner score's, times 1 - tanh^2."""
        inner, pull_inner = self.score.linearize(query, key, learned)
        capped = inner.div_(self.cap).tanh_()

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            return pull_inner(grad.mul_(1 - capped.square()), totals)

        return self.cap * capped, pull

    def block(
        self, query: Float[Tensor, "*batch t D"], key: Float[Tensor, "*batch s D"]
    ) -> Float[Tensor, "*batch t s"]:
        """c tanh(score / c)."""
        return self.cap * torch.tanh(self.score.block(query, key) / self.cap)

    def __str__(self) -> str:
        return f"{self.score}, soft-capped at {self.cap:g}"


@dataclass(frozen=True, slots=True, eq=False)
class Custom(Score):
    """A score of one's own: any function from (..., t, D) queries and (..., s, D) keys to (..., t, s) scores.

    It runs on `reference` and `tiled`, with gradients, also to tensors that the function closes over.
    `regard.attention(..., score=function)` makes one. It must treat every query and key alike: it is asked
    for blocks.

    >>> Custom(lambda q, k: -torch.cdist(q, k, p=1.0)).block(torch.zeros(1, 2), torch.ones(3, 2))
    tensor([[-2., -2., -2.]])
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """As they are; the widths are the function's affair."""
        return query, key

    @property
    def is_declared(self) -> bool:
        """What a function closes over cannot be seen from outside."""
        return False

    def pair_width(self, dim: int) -> int:
        """A guess: scores that take differences hold D numbers for each pair."""
        return dim

    def block(
        self, query: Float[Tensor, "*batch t D"], key: Float[Tensor, "*batch s D"]
    ) -> Float[Tensor, "*batch t s"]:
        """What the function says.

        Raises:
            ShapeError: it does not answer with one score for each pair.
        """
        scores = self.function(query, key)
        expected = (*query.shape[:-1], key.shape[-2])
        if not isinstance(scores, Tensor) or tuple(scores.shape) != expected:
            got = tuple(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ShapeError(
                f"a score must answer (..., t, s) for queries (..., t, D) and keys (..., s, D): "
                f"expected {expected}, got {got}"
            )
        return scores

    def __str__(self) -> str:
        return getattr(self.function, "__name__", type(self.function).__name__).replace("<lambda>", "custom score")


def _dot(query: Tensor, key: Tensor, scale: float) -> tuple[Tensor, Pull]:
    query = query * scale

    def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        return (grad @ key) * scale, grad.mT @ query

    return query @ key.mT, pull


def _by_autograd(score: Score, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Pull]:
    query, key = query.detach().requires_grad_(), key.detach().requires_grad_()
    with torch.enable_grad():
        scores = score.block(query, key)

    def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
        inputs = (query, key, *learned)
        d_query, d_key, *others = torch.autograd.grad(scores, inputs, grad, **_KEEPING)
        for total, other in zip(totals, others, strict=True):
            total += other
        return d_query, d_key

    # What autograd has saved must not be written into.
    return scores.detach().clone(), pull


def as_score(score: object) -> Score:
    """A score from what a caller may hand over.

    Raises:
        ArgumentError: neither a score nor a function.
    """
    if isinstance(score, Score):
        return score
    if not callable(score):
        raise ArgumentError(f"score= takes a regard score or a function of (query, key), got {score!r}")
    return Custom(score)


def per_head(value: float | Tensor, query: Tensor) -> Tensor:
    """A number, or one for each head (H,), so that it multiplies (..., H, T, D).

    Raises:
        ShapeError: as many numbers as there are heads were expected.
    """
    # A Python number keeps its digits until it meets the dtype of what it multiplies.
    tensor = value if isinstance(value, Tensor) else torch.tensor(value, dtype=torch.float64, device=query.device)
    if tensor.dim() != 1:
        return tensor
    if len(tensor) not in (1, query.shape[-3]):
        raise ShapeError(f"expected one number, or one for each of {query.shape[-3]} heads; got {len(tensor)}")
    return tensor[:, None, None]


def same_width(score: Score, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor]:
    """Query and key, if they are of one width.

    Raises:
        ShapeError: they are not.
    """
    if query.shape[-1] != key.shape[-1]:
        raise ShapeError(f"{score} needs query and key of one width, got {query.shape[-1]} and {key.shape[-1]}")
    return query, key


@dataclass(frozen=True, slots=True, eq=False)
class Additive(Score):
    r"""$s_{ij} = v^\top \tanh(W_q q_i + W_k k_j)$.

    Source: Bahdanau et al. 2015 (arXiv:1409.0473), section A.1.2: their $v_a$, $W_a$ and $U_a$ are our
    `vector`, `query_weight` and `key_weight`.

    Leave a weight out where the query or key is already projected (keys that are projected once and
    attended many times, as in a decoder). The projections run once; only the sum, the tanh and the
    product with v are made for each pair.

    >>> score = Additive(torch.ones(2), query_weight=torch.eye(2), key_weight=torch.zeros(2, 3))
    >>> q, k = score.prepare(torch.ones(1, 2), torch.ones(4, 3))
    >>> score.block(q, k)
    tensor([[1.5232, 1.5232, 1.5232, 1.5232]])
    """

    vector: Float[Tensor, " A"]
    """v: one weight for each hidden unit."""
    query_weight: Float[Tensor, "A Dq"] | None = None
    """W_q; None where the query is already A wide."""
    key_weight: Float[Tensor, "A Dk"] | None = None
    """W_k; None where the key is already A wide."""

    @classmethod
    def concat(cls, vector: Float[Tensor, " A"], weight: Float[Tensor, "A width"], query_dim: int) -> "Additive":
        r"""$v^\top \tanh(W [q; k])$: the same score, with $W = [W_q\; W_k]$ in one matrix.

        Source: Luong et al. 2015 (arXiv:1508.04025), equation 8 ("concat").
        """
        return cls(vector, query_weight=weight[:, :query_dim], key_weight=weight[:, query_dim:])

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        """Project query and key to the A hidden units."""
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

    def block(
        self, query: Float[Tensor, "*batch t A"], key: Float[Tensor, "*batch s A"]
    ) -> Float[Tensor, "*batch t s"]:
        """Scores of a block; holds (t, s, A) numbers while it runs, or fewer where no gradient is asked for."""
        takes_gradient = torch.is_grad_enabled() and any(x.requires_grad for x in (query, key, self.vector))
        if not takes_gradient and query.shape[-2] * key.shape[-2] * key.shape[-1] > SWEEP:
            return self._swept(query, key)
        # In place: the sum is needed by nobody else, nor by its own gradient.
        hidden = (query[..., :, None, :] + key[..., None, :, :]).tanh_()
        return hidden @ self.vector.to(hidden.dtype)

    def _swept(self, query: Tensor, key: Tensor) -> Tensor:
        """The same through one small buffer that stays in the cache."""
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

    def linearize(self, query: Tensor, key: Tensor, learned: Sequence[Tensor]) -> tuple[Tensor, Pull]:
        """With h the hidden units and g the gradient: dv = sum g h, and v g (1 - h^2) summed over keys or queries."""
        hidden = (query[..., :, None, :] + key[..., None, :, :]).tanh_()
        vector = self.vector.detach().to(hidden.dtype)

        def pull(grad: Tensor, totals: Sequence[Tensor]) -> tuple[Tensor, Tensor]:
            for total in totals:
                total += grad.flatten() @ hidden.flatten(0, -2)
            slope = hidden.square_().sub_(1).mul_(grad[..., None])
            return slope.sum(-2) * -vector, slope.sum(-3) * -vector

        return hidden @ vector, pull

    def learned(self) -> tuple[Tensor, ...]:
        """V; the projections are made before."""
        return (self.vector,)

    def pair_width(self, dim: int) -> int:
        """The hidden units."""
        return self.vector.shape[-1]

    def __str__(self) -> str:
        return f"additive score with {self.vector.shape[-1]} hidden units"
