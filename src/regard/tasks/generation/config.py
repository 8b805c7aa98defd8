"""The settings of a beam search, without torch."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, TypeVar

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

LARGEST = 50
"""The largest penalty or reward: more would overflow."""
Total = TypeVar("Total", float, "Tensor")

MOST = 10_000
"""The largest beam: each hypothesis is a row of the model, with a number for each token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Beam:
    r"""The settings of a beam search: its counts of followed and returned hypotheses, and the weight of their length.

    A hypothesis is scored by $(\log p(y \mid x) + \gamma |y|) / |y|^\alpha$; $|y|$ counts its end mark.

    Raises:
        ArgumentError: a value is out of its range.

    >>> Beam(4, num_best=2)
    Beam(size=4, num_best=2, length_penalty=1.0, length_reward=0.0)
    >>> Beam(length_penalty=0.0, length_reward=0.5).score(-6.0, 4)
    -4.0
    """

    size: int = 5
    """Hypotheses of each source that are continued at each step, 1 to 10,000; 1 is greedy search."""
    _: KW_ONLY
    num_best: int = 1
    """Hypotheses that are returned, 1 to `size`."""
    length_penalty: float = 1.0
    """Alpha, at least 0: above 1 favours longer answers, below 1 shorter ones; 0 scores by log-probability alone."""
    length_reward: float = 0.0
    """Gamma, in nats for each token, at least 0; it changes no order at a length penalty of 1, which is refused: take
    0. 0.3 to 0.6 suit small models, whose most probable translations are too short."""

    def __post_init__(self) -> None:
        if self.size > MOST:
            raise ArgumentError(f"a beam has at most {MOST:,} hypotheses, got {self.size:,}: 5 are usual")
        if not 1 <= self.num_best <= self.size:
            raise ArgumentError(f"num_best must be in 1..size, got num_best={self.num_best} and size={self.size}")
        for name, value in (("length_penalty", self.length_penalty), ("length_reward", self.length_reward)):
            if not 0 <= value < float("inf"):
                raise ArgumentError(f"{name} must be at least 0 and finite, got {value}")
            if value > LARGEST:
                raise ArgumentError(f"{name} must be at most {LARGEST}, got {value}: 0 to 2 are usual")
        if self.length_reward and self.length_penalty == 1:
            raise ArgumentError(
                f"a length_reward of {self.length_reward} changes no order at a length_penalty of 1: set that to 0"
            )

    def score(self, log_probability: Total, length: int) -> Total:
        """The score of a hypothesis of that log-probability (or of many, as a tensor) and length."""
        return (log_probability + self.length_reward * length) / length**self.length_penalty
