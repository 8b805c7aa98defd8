"""The numbers of a beam search, which need no torch."""

from dataclasses import KW_ONLY, dataclass

from regard.errors import ArgumentError

MOST = 10_000
"""The largest beam: each hypothesis is a row of the model, with a number for each token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Beam:
    """The numbers of a beam search: how many hypotheses it follows and returns, and the length penalty.

    Raises:
        ArgumentError: a number is out of its range.

    >>> Beam(4, num_best=2)
    Beam(size=4, num_best=2, length_penalty=1.0)
    """

    size: int = 5
    """Hypotheses of each source that are continued at each step, 1 to 10,000; 1 is greedy search."""
    _: KW_ONLY
    num_best: int = 1
    """Hypotheses that are returned, 1 to `size`."""
    length_penalty: float = 1.0
    """Alpha, at least 0: above 1 favours longer answers, below 1 shorter ones; 0 scores by log-probability alone."""

    def __post_init__(self) -> None:
        """Check the numbers once."""
        if self.size > MOST:
            raise ArgumentError(f"a beam has at most {MOST:,} hypotheses, got {self.size:,}: 5 are usual")
        if not 1 <= self.num_best <= self.size:
            raise ArgumentError(f"num_best must be in 1..size, got num_best={self.num_best} and size={self.size}")
        if not 0 <= self.length_penalty < float("inf"):
            raise ArgumentError(f"length_penalty must be at least 0 and finite, got {self.length_penalty}")
