"""What a model that generates offers, and what each search does alike."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.generation.filters import Constraint, Progress, constrain


@runtime_checkable
class Decodable(Protocol):
    """What a search needs of a model. State is a tree of tensors with the sequences first."""

    def start(self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"]) -> Any:
        """Read the source; the state before the first step."""
        ...

    def step(self, state: Any, tokens: Int[Tensor, " N"]) -> Any:
        """(logits (N, V), alignment, state) after one more token of each sequence.

        The alignment is None or has `dense()` of shape (N, H, 1, S). The state that was given must not be
        used again: its buffers may be the new one's.
        """
        ...

    def reorder(self, state: Any, index: Int[Tensor, " N"]) -> Any:
        """The state of sequences `index`, in that order; an index may repeat or be left out.

        The state that was given must not be used again, as with `step`.
        """
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Hypothesis:
    """One translation: its tokens without the begin mark, and with the end mark if it came to an end."""

    tokens: list[int]
    score: float
    """Sum of the tokens' log-probabilities, divided by length ** length_penalty."""
    alignment: Float[Tensor, "T S"] | None = None
    """What each token attended to, mean over heads; rows sum to 1."""


def worth_leaving(running: int, undecided: int) -> bool:
    """Whether enough sources are done to go on without them, which copies the state of the others."""
    return 4 * undecided <= 3 * running


def log_probabilities(
    logits: Float[Tensor, "N V"], constraints: Sequence[Constraint], progress: Progress
) -> Float[Tensor, "N V"]:
    """The model's own log-probabilities of what may be chosen, -inf for all else."""
    return constrain(precise(logits).log_softmax(-1), constraints, progress)


def precise(logits: Tensor) -> Tensor:
    """In at least float32: sums of bfloat16 log-probabilities would tie."""
    return logits.to(torch.promote_types(logits.dtype, torch.float32))


def first_tokens(rows: Int[Tensor, " N"], bos_id: int | Int[Tensor, " B"]) -> Int[Tensor, " N"]:
    """The first token of each row, which answers the source of that number."""
    return torch.full_like(rows, bos_id) if isinstance(bos_id, int) else bos_id[rows]


def mean_over_heads(alignment: Any) -> Float[Tensor, "N S"]:
    """What each new token attended to, as the mean over heads."""
    return alignment.dense().mean(1)[:, 0]


def check_source(source: Tensor, source_lengths: Tensor, max_steps: int) -> None:
    """Refuse sources and lengths that do not fit, and searches of no step."""
    if source.dim() != 2 or source_lengths.shape != source.shape[:1]:
        raise ArgumentError(
            "source must be (B, S) with source_lengths (B,), "
            f"got {tuple(source.shape)} and {tuple(source_lengths.shape)}"
        )
    if max_steps < 1:
        raise ArgumentError(f"max_steps must be at least 1, got {max_steps}")
