"""What is done to logits before a token is chosen: constraints say what may come, filters change how likely it is.

A search takes constraints and keeps the model's own scores; sampling takes both. Each is one small object, and a
list of them is applied in its order:

    sample(..., filters=[RepetitionPenalty(1.2), Temperature(0.8), TopK(50), TopP(0.95)])
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.errors import ArgumentError


class Progress(NamedTuple):
    """How far N texts have come."""

    sources: Int[Tensor, " N"]
    """Which source each answers, as numbered in the call."""
    tokens: Int[Tensor, "N t"]
    """The t tokens chosen so far."""
    before: Int[Tensor, "N P"] | None = None
    """What stands before them, where that is text of the same vocabulary: a language model's prompts."""


@runtime_checkable
class Constraint(Protocol):
    """Says what may be chosen next."""

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "#N V"]:
        """True for the tokens that may come next, at least one a row."""
        ...


@runtime_checkable
class Filter(Protocol):
    """Changes the distribution that the next token is drawn from."""

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        """The logits to draw from; -inf for what is left out."""
        ...


def constrain(
    logits: Float[Tensor, "N V"], constraints: Sequence[Constraint], progress: Progress
) -> Float[Tensor, "N V"]:
    """The logits of what every constraint allows, -inf elsewhere."""
    for constraint in constraints:
        logits = logits.masked_fill(~constraint.allowed(progress, logits.shape[-1]), -torch.inf)
    return logits


# -- constraints -----------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class ForcedPrefix:
    """Each answer begins with given tokens, and goes on freely after them.

    >>> forced = ForcedPrefix([[3, 1], []])
    >>> forced.allowed(Progress(torch.tensor([0, 1]), torch.zeros(2, 0, dtype=torch.long)), 4)
    tensor([[False, False, False,  True],
            [ True,  True,  True,  True]])
    """

    prefixes: Sequence[Sequence[int]]
    """The tokens that the answer to each source begins with."""

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "N V"]:
        """The prefix's next token, or any.

        Raises:
            ArgumentError: a token that is not in the vocabulary.
        """
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
    """Nothing but given tokens; the end mark must be among them if answers are to end.

    >>> Vocabulary.of([0, 2], 4).tokens
    tensor([ True, False,  True, False])
    """

    tokens: Bool[Tensor, " V"] | Bool[Tensor, "B V"]
    """True for what may come, in any answer or in that of each source."""

    @classmethod
    def of(cls, tokens: Sequence[int], vocab_size: int) -> "Vocabulary":
        """Those tokens, in any answer.

        Raises:
            ArgumentError: there are none, or one is not in the vocabulary.
        """
        if not tokens:
            raise ArgumentError("a vocabulary needs at least one token that may come")
        mask = torch.zeros(vocab_size, dtype=torch.bool)
        for token in tokens:
            _require_token(token, vocab_size)
            mask[token] = True
        return cls(mask)

    def allowed(self, progress: Progress, vocab_size: int) -> Bool[Tensor, "#N V"]:
        """The same at every step.

        Raises:
            ArgumentError: it was made for a vocabulary of another size.
        """
        if self.tokens.shape[-1] != vocab_size:
            raise ArgumentError(f"the model has {vocab_size} tokens, the constraint {self.tokens.shape[-1]}")
        tokens = self.tokens.to(progress.sources.device)
        return tokens[None] if tokens.dim() == 1 else tokens[progress.sources]


# -- filters -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Temperature:
    r"""$z / \tau$: below 1 the likely becomes likelier, above 1 all come closer.

    Source: Ackley et al. 1985, "A learning algorithm for Boltzmann machines", equation 5.
    """

    temperature: float
    """tau, above 0; a greedy search is what it tends to at 0."""

    def __post_init__(self) -> None:
        if not 0 < self.temperature < float("inf"):
            raise ArgumentError(f"temperature must be above 0 and finite, got {self.temperature}")

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        """Divide."""
        return logits / self.temperature


@dataclass(frozen=True, slots=True)
class TopK:
    """The k most probable tokens; ties with the last of them stay too.

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
        """Leave out what is below the k-th."""
        least = logits.topk(min(self.k, logits.shape[-1]), dim=-1).values[:, -1:]
        return logits.masked_fill(logits < least, -torch.inf)


@dataclass(frozen=True, slots=True)
class TopP:
    """The fewest most probable tokens whose probabilities come to p or more: the nucleus.

    Source: Holtzman et al. 2020 (arXiv:1904.09751), equations 2 and 3.

    >>> TopP(0.7)(torch.tensor([[0.5, 0.3, 0.2]]).log(), None).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """

    p: float
    """In (0, 1]; 1 keeps all."""

    def __post_init__(self) -> None:
        _require_share("top-p", self.p)

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        """Leave out each token for which the less probable ones and itself come to at most 1 - p."""
        ascending, order = logits.sort(dim=-1)
        unlikely = ascending.softmax(-1).cumsum(-1) <= 1 - self.p
        unlikely[:, -1] = False  # the most probable stays, whatever rounding says
        return logits.masked_fill(unlikely.scatter(1, order, unlikely), -torch.inf)


@dataclass(frozen=True, slots=True)
class MinP:
    """Tokens that are at least p times as probable as the most probable one.

    Source: Nguyen et al. 2024 (arXiv:2407.01082), section 3.

    >>> MinP(0.5)(torch.tensor([[0.5, 0.3, 0.2]]).log(), None).exp()
    tensor([[0.5000, 0.3000, 0.0000]])
    """

    p: float
    """In (0, 1]."""

    def __post_init__(self) -> None:
        _require_share("min-p", self.p)

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        """Leave out what is less probable."""
        probabilities = logits.softmax(-1)
        return logits.masked_fill(probabilities < self.p * probabilities.amax(-1, keepdim=True), -torch.inf)


@dataclass(frozen=True, slots=True)
class RepetitionPenalty:
    """Logits of tokens that the text has already (prompt included), divided by the penalty, multiplied if negative.

    Source: Keskar et al. 2019 (arXiv:1909.05858), section 4.1, with the sign as in transformers.

    >>> progress = Progress(torch.tensor([0]), torch.tensor([[0, 1]]))
    >>> RepetitionPenalty(2.0)(torch.tensor([[4.0, -4.0, 4.0]]), progress)
    tensor([[ 2., -8.,  4.]])
    """

    penalty: float
    """Above 0; 1 changes nothing, more makes repetitions rarer."""

    def __post_init__(self) -> None:
        if not 0 < self.penalty < float("inf"):
            raise ArgumentError(f"the repetition penalty must be above 0 and finite, got {self.penalty}")

    def __call__(self, logits: Float[Tensor, "N V"], progress: Progress) -> Float[Tensor, "N V"]:
        """Divide or multiply."""
        tokens = progress.tokens
        if progress.before is not None:
            tokens = torch.cat([progress.before, tokens], 1)
        chosen = logits.gather(1, tokens)
        return logits.scatter(1, tokens, torch.where(chosen < 0, chosen * self.penalty, chosen / self.penalty))


def _require_token(token: int, vocab_size: int) -> None:
    if not 0 <= token < vocab_size:
        raise ArgumentError(f"tokens are from 0 to {vocab_size - 1}, got {token}")


def _require_share(name: str, p: float) -> None:
    if not 0 < p <= 1:
        raise ArgumentError(f"{name} must be above 0 and at most 1, got {p}")
