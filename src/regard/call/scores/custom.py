"""A score that is any function of a block of queries and a block of keys."""

from collections.abc import Callable
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from regard.call.named import made
from regard.call.scores.base import Score
from regard.errors import ArgumentError, ShapeError


@dataclass(frozen=True, slots=True, eq=False)
class Custom(Score):
    """A score defined by the caller: any function from (..., t, D) queries and (..., s, D) keys to (..., t, s) scores.

    It runs on `reference` and `tiled`, with gradients, also to tensors in the function's closure.
    `regard.attention(..., score=function)` makes such a score. The function gets blocks, so it must treat every query
    and every key alike.

    >>> import torch
    >>> Custom(lambda q, k: -torch.cdist(q, k, p=1.0)).block(torch.zeros(1, 2), torch.ones(3, 2))
    tensor([[-2., -2., -2.]])
    """

    function: Callable[[Tensor, Tensor], Tensor]

    def prepare(self, query: Float[Tensor, "*queries T Dq"], key: Float[Tensor, "*keys S Dk"]) -> tuple[Tensor, Tensor]:
        return query, key

    @property
    def is_declared(self) -> bool:
        return False

    def pair_width(self, dim: int) -> int:
        return dim

    def block(self, query: Tensor, key: Tensor) -> Tensor:
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


def as_score(score: object) -> Score:
    """The caller's score as a `Score`: a score, a class of scores or its name ("dot"), or a function.

    Raises:
        ArgumentError: the class needs arguments, the name is unknown, or the argument is none of these.
    """
    if isinstance(score, Score):
        return score
    found: Score | None = made(score, Score, _makers(), "score")
    if found is not None:
        return found
    if not callable(score) or isinstance(score, type):
        raise ArgumentError(f"score= takes a regard score, its name or a function of (query, key), got {score!r}")
    return Custom(score)


def _makers() -> tuple[Callable[..., Score], ...]:
    from regard.call.scores.additive import Additive
    from regard.call.scores.base import Bilinear, Cosine, Dot, ScaledDot, SoftCapped
    from regard.call.scores.kernels import Boxcar, Constant, Epanechnikov, Gaussian, Laplacian, Triangular

    kernels = (Gaussian, Laplacian, Boxcar, Epanechnikov, Triangular, Constant)
    return (ScaledDot, Dot, Cosine, *kernels, Bilinear, Additive, SoftCapped)
