"""The settings of a beam search, its engines, and the formats of exports, without torch."""

from dataclasses import KW_ONLY, dataclass
from typing import TYPE_CHECKING, Literal, TypeVar

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor


ExportFormat = Literal["huggingface", "ctranslate2"]
Engine = Literal["regard", "ctranslate2"]
"""Who searches for translations and texts."""
SearchPrecision = Literal["float32", "int8"]
"""The precision of CTranslate2's matrix products, in its own words; regard's own search has float32."""


LARGEST = 50
"""The largest penalty: more would overflow."""
Total = TypeVar("Total", float, "Tensor")

MOST = 10_000
"""The largest beam: each hypothesis is a row of the model, with a number for each token of the vocabulary."""


@dataclass(frozen=True, slots=True)
class Beam:
    r"""The settings of a beam search: its counts of followed and returned hypotheses, and the weight of their length.

    A hypothesis is scored by $\log p(y \mid x) / |y|^\alpha$; $|y|$ counts its end mark.

    Raises:
        ArgumentError: a value is out of its range.

    >>> Beam(4, num_best=2)
    Beam(size=4, num_best=2, length_penalty=1.0)
    >>> Beam().score(-6.0, 4)
    -1.5
    """

    size: int = 5
    """Hypotheses of each source that are continued at each step, 1 to 10,000; 1 is greedy search."""
    _: KW_ONLY
    num_best: int = 1
    """Hypotheses that are returned, 1 to `size`."""
    length_penalty: float = 1.0
    """Alpha, at least 0: above 1 favours longer answers, below 1 shorter ones; 0 scores by log-probability alone."""

    def __post_init__(self) -> None:
        if self.size > MOST:
            raise ArgumentError(f"a beam has at most {MOST:,} hypotheses, got {self.size:,}: 5 are usual")
        if not 1 <= self.num_best <= self.size:
            raise ArgumentError(f"num_best must be in 1..size, got num_best={self.num_best} and size={self.size}")
        if not 0 <= self.length_penalty < float("inf"):
            raise ArgumentError(f"length_penalty must be at least 0 and finite, got {self.length_penalty}")
        if self.length_penalty > LARGEST:
            raise ArgumentError(
                f"length_penalty must be at most {LARGEST}, got {self.length_penalty}: 0 to 2 are usual"
            )

    def score(self, log_probability: Total, length: int) -> Total:
        """The score of a hypothesis of that log-probability (or of many, as a tensor) and length."""
        return log_probability / length**self.length_penalty
