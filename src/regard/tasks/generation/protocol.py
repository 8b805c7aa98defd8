"""The interface of models that generate text, and the parts and the loop shared by searches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float, Integer
from torch import Tensor

from regard.errors import ArgumentError
from regard.lazy import displayed
from regard.tasks.generation.filters import Constraint, Progress, constrain
from regard.tensors.ranges import require_at_least


@runtime_checkable
class Decodable(Protocol):
    """The methods a search needs. The state keeps the sequences in order."""

    def start(self, source: Integer[Tensor, "B S"], source_lengths: Integer[Tensor, " B"]) -> Any:
        """Read the source, and return the state before the first step."""

    def step(self, state: Any, ids: Integer[Tensor, " N"]) -> Any:
        """Add one token to each sequence, and return (logits (N, V), any alignment, state). The given state must not
        be used again: the new state may use its buffers."""

    def reorder(self, state: Any, index: Integer[Tensor, " N"]) -> Any:
        """Return the state of the sequences `index`, in that order. Indices may repeat or be missing. The given state
        must not be used again, as in `step`."""


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """One translation: its tokens without the begin mark, and with the end mark if the translation has ended."""

    tokens: list[int]
    score: float
    """The sum of the tokens' log-probabilities, divided by the penalty of its length (`Beam.score`)."""
    alignment: Float[Tensor, "T S"] | None = None
    """The attention of each token to the source, as a mean over heads; rows sum to 1."""
    limited: bool = False
    """True if the limit of tokens alone let the best of an ended search win: one that was cut off scored higher."""


def worth_leaving(running: int, undecided: int) -> bool:
    """True if enough sources are finished to justify compacting the batch (a state copy)."""
    return 16 * undecided <= 15 * running


def log_probabilities(
    logits: Float[Tensor, "N V"], constraints: Sequence[Constraint], progress: Progress
) -> Float[Tensor, "N V"]:
    """The model's own log-probabilities of the allowed tokens; -inf for all others."""
    return constrain(precise(logits).log_softmax(-1), constraints, progress)


def precise(logits: Tensor) -> Tensor:
    """Logits in at least float32: in bfloat16, sums of log-probabilities would often be equal."""
    dtype = torch.promote_types(logits.dtype, torch.float32)
    return logits if logits.dtype == dtype else logits.to(dtype)


def first_tokens(rows: Integer[Tensor, " N"], bos_id: int | Integer[Tensor, " B"]) -> Integer[Tensor, " N"]:
    """The first token of each row; row number n belongs to source n of `bos_id`."""
    return torch.full_like(rows, bos_id) if isinstance(bos_id, int) else bos_id.long()[rows]


@dataclass(frozen=True, slots=True, eq=False)
class SearchOf:
    """Sources, and the tokens that a search may write for them.

    Raises:
        ArgumentError: source and lengths do not fit, or max_steps is below 1.

    >>> asked = SearchOf(torch.tensor([[4, 5, 2]]), torch.tensor([3]), bos_id=1, eos_id=2, max_steps=7)
    >>> asked.max_steps
    7
    """

    source: Integer[Tensor, "B S"]
    """Token ids of B sources, padded with anything."""
    source_lengths: Integer[Tensor, " B"]
    _: KW_ONLY
    bos_id: int | Integer[Tensor, " B"]
    """The first token of every target; for a language model, the last token of each text."""
    eos_id: int
    """The token that ends a target."""
    max_steps: int
    """The most tokens of an answer, including the end mark."""
    constraints: Sequence[Constraint] = ()
    """The allowed tokens; see `regard.tasks.generation.filters`. Scores stay the model's own."""

    def __post_init__(self) -> None:
        if self.source.dim() != 2 or self.source_lengths.shape != self.source.shape[:1]:
            raise ArgumentError(
                "source must be (B, S) with source_lengths (B,), "
                f"got {tuple(self.source.shape)} and {tuple(self.source_lengths.shape)}"
            )
        require_at_least(1, max_steps=self.max_steps)


Choose = Callable[[Tensor, Progress], tuple[Tensor, Tensor]]
"""Chooses a token for each of N texts from logits (N, V), and returns it with the model's own log-probability."""


@displayed
class TextStep(NamedTuple):
    """One step of a search or of sampling, for the N unfinished texts."""

    rows: Integer[Tensor, " N"]
    """The indices of the texts."""
    tokens: Integer[Tensor, " N"]
    gains: Float[Tensor, " N"]
    """The model's own log-probability of each token."""
    ended: Bool[Tensor, " N"]
    """True for texts ended before this step; their tokens are meaningless."""


def steps(
    model: Decodable,
    asked: SearchOf,
    *,
    choose: Choose,
    is_worth_leaving: Callable[[int, int], bool],
) -> Iterator[TextStep]:
    """The steps until every text has its end mark, at most `max_steps`. The caller may stop earlier.

    The caller must turn gradients off by `torch.no_grad`. `is_worth_leaving` decides from the counts of texts in the
    batch and of unfinished ones whether to compact the batch, which copies the state.
    """
    state = model.start(asked.source, asked.source_lengths)
    rows = torch.arange(len(asked.source), device=asked.source.device)
    tokens, ended = first_tokens(rows, asked.bos_id), torch.zeros_like(rows, dtype=torch.bool)
    written = tokens.new_empty((rows.shape[0], asked.max_steps))  # (len() of a tensor takes microseconds.)
    for length in range(asked.max_steps):
        logits, _, state = model.step(state, tokens)
        progress = Progress(rows, written[:, :length])
        tokens, gains = choose(logits, progress)
        yield TextStep(rows, tokens, gains, ended)
        written[:, length] = tokens
        ended = ended | (tokens == asked.eos_id)
        left = rows.shape[0] - int(ended.sum())
        if not left:
            return
        if is_worth_leaving(rows.shape[0], left):
            running = (~ended).nonzero()[:, 0]
            state = model.reorder(state, running)
            rows, tokens, ended, written = (x[running] for x in (rows, tokens, ended, written))
