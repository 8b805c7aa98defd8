"""Changes of logits before a token is chosen: constraints forbid tokens, filters change probabilities.

A search takes constraints and keeps the model's own scores. Sampling takes both. Each is one small object; a list is
applied in order:

    sample(..., filters=[Temperature(0.8), TopK(50), TopP(0.95)])
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from regard.errors import ArgumentError


class Progress(NamedTuple):
    """The state of N unfinished texts."""

    sources: Integer[Tensor, " N"]
    """The index of each text's source, in the order of the call."""
    tokens: Integer[Tensor, "N t"]
    """The t tokens chosen so far."""


@runtime_checkable
class Constraint(Protocol):
    """Limits the next tokens."""

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "#N V"]:
        """True for allowed tokens, at least one in each row."""


@runtime_checkable
class Filter(Protocol):
    """Changes the distribution of the next token."""

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]: ...


def constrain(
    logits: Float[Tensor, "N V"], constraints: Sequence[Constraint], progress: Progress
) -> Float[Tensor, "N V"]:
    """Logits with -inf for tokens forbidden by any constraint."""
    for constraint in constraints:
        logits = logits.masked_fill(~constraint.allowed(progress, logits.shape[-1]), -torch.inf)
    return logits


# -- constraints -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ForcedPrefix:
    """Each answer begins with given tokens, and is free after them.

    >>> forced = ForcedPrefix([[3, 1], []])
    >>> forced.allowed(Progress(torch.tensor([0, 1]), torch.zeros(2, 0, dtype=torch.long)), 4)
    tensor([[False, False, False,  True],
            [ True,  True,  True,  True]])
    """

    prefixes: Sequence[Sequence[int]]
    """The prefix of the answer to each source."""

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "N V"]:
        """The next token of the prefix, or any token after it; raises ArgumentError for an unknown token."""
        step, sources = progress.tokens.shape[1], progress.sources
        free = torch.ones(len(sources), vocab_size, dtype=torch.bool, device=sources.device)
        for row, source in enumerate(sources.tolist()):
            prefix = self.prefixes[source]
            if step < len(prefix):
                _require_token(prefix[step], vocab_size)
                free[row] = False
                free[row, prefix[step]] = True
        return free


@dataclass(frozen=True, slots=True, eq=False)
class Vocabulary:
    """Only the given tokens may come. The end mark must be one of them, or the answers cannot end.

    >>> Vocabulary.of([0, 2], 4).tokens
    tensor([ True, False,  True, False])
    """

    tokens: Bool[Tensor, " V"] | Bool[Tensor, "B V"]
    """True for allowed tokens: in all answers (V), or in the answer to each source (B, V)."""

    @classmethod
    def of(cls, ids: Sequence[int], vocab_size: int) -> "Vocabulary":
        """The constraint of all answers to these tokens; ArgumentError for none, or for one outside the vocabulary."""
        if not ids:
            raise ArgumentError("a vocabulary needs at least one token that may come")
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        for token in ids:
            _require_token(token, vocab_size)
            mask[token] = True
        return cls(mask)

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "#N V"]:
        """The same tokens at every step; raises ArgumentError for a vocabulary of another size."""
        if self.tokens.shape[-1] != vocab_size:
            raise ArgumentError(f"the model has {vocab_size} tokens, the constraint {self.tokens.shape[-1]}")
        tokens = self.tokens.to(progress.sources.device)
        return tokens[None] if tokens.dim() == 1 else tokens[progress.sources]


@dataclass(frozen=True, slots=True, eq=False)
class StillWanted:
    """Answers that are no longer wanted end at this step."""

    wanted: Sequence[Callable[[], bool] | None]
    """Whether the answer to each source is still wanted; None for always."""
    end_id: int

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "#N V"]:
        left = [source for source, is_wanted in enumerate(self.wanted) if is_wanted is not None and not is_wanted()]
        free = torch.ones(len(progress.sources) if left else 1, vocab_size, dtype=torch.bool)
        if left:
            rows = torch.isin(progress.sources.cpu(), torch.tensor(left)).nonzero()[:, 0]
            free[rows] = torch.arange(vocab_size) == self.end_id
        return free.to(progress.sources.device)


# -- filters -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Temperature:
    r"""$z / \tau$: below 1, likely tokens become more likely; above 1, the probabilities come closer to each other.

    Source: Ackley et al. 1985, "A learning algorithm for Boltzmann machines", equation 5.
    """

    temperature: float
    """tau, above 0; towards 0, sampling becomes greedy search."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ArgumentError(f"temperature must be above 0 and finite, got {self.temperature}")

    @property
    def divisor(self) -> float:
        """tau within float32's reach: from 1e-20 down draws are greedy, and from 1e20 up even."""
        return min(max(self.temperature, 1e-20), 1e20)

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        return logits / self.divisor


@dataclass(frozen=True, slots=True)
class TopK:
    """The k most probable tokens, with ties.

    Source: Fan et al. 2018 (arXiv:1805.04833), section 5.

    >>> TopK(2)(torch.tensor([[1.0, 3.0, 2.0]]), None)
    tensor([[-inf, 3., 2.]])
    """

    k: int
    """At least 1."""

    def __post_init__(self) -> None:
        if self.k < 1:
            raise ArgumentError(f"top-k must keep at least 1 token, got {self.k}")

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        least = logits.topk(min(self.k, logits.shape[-1]), dim=-1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)


NUCLEI = (256, 4_096)
"""So many of the most probable tokens are looked at before all are."""


@dataclass(frozen=True, slots=True)
class TopP:
    """The nucleus: the fewest of the most probable tokens whose probabilities have a sum of p or more.

    Source: Holtzman et al. 2020 (arXiv:1904.09751), equations 2 and 3.

    >>> TopP(0.7)(torch.tensor([[0.5, 0.3, 0.2]]).log(), None).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """

    p: float
    """In (0, 1]; 1 keeps all tokens."""

    def __post_init__(self) -> None:
        if not 0 < self.p <= 1:
            raise ArgumentError(f"top-p must be above 0 and at most 1, got {self.p}")

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        """Drop a token if the more probable tokens already sum to p or more."""
        if self.p == 1.0:
            return logits
        probabilities, vocab_size = logits.softmax(-1), logits.shape[-1]
        # To sort all tokens takes longer than a step of a small model, and the nucleus is mostly among a few.
        for count in NUCLEI:
            likely, order = probabilities.topk(min(count, vocab_size), -1)
            if count >= vocab_size or not bool((likely.sum(-1) < self.p).any()):
                break
        else:
            likely, order = probabilities.sort(-1, descending=True)
        kept = likely.cumsum(-1, dtype=torch.float64) - likely < self.p
        return torch.full_like(logits, -torch.inf).scatter(1, order, logits.gather(1, order).where(kept, -torch.inf))


def _require_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ArgumentError(f"tokens are from 0 to {vocab_size - 1}, got {token}")
