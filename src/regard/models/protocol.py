"""What every sequence-to-sequence model answers: training, decoding, and what it attends to."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.maps.attention_map import AttentionMap

OutputLoss = Callable[[Tensor, nn.Linear], tuple[Tensor, Tensor]]
"""Given what the output layer reads and that layer: a summed loss and its count, without all logits at once.

`regard.training.output_loss.output_cross_entropy` with its targets is one.
"""


class Step(NamedTuple):
    """One step of decoding."""

    logits: Float[Tensor, "N V"]
    alignment: AttentionMap | None
    """What the step attended to in the source: (N, H, 1, S), computed only if it is read; None without a source."""
    state: Any


@runtime_checkable
class Seq2Seq(Protocol):
    """A model from token ids to token ids. B sequences, S source and T target tokens, V the vocabulary."""

    max_length: int | None
    """The longest source or target that the model takes; None for any."""

    def __call__(
        self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"], target_input: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T V"]:
        """Logits of each next token, teacher forced."""
        ...

    def start(self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"]) -> Any:
        """Read the source; the state before the first step."""
        ...

    def step(self, state: Any, tokens: Int[Tensor, " N"]) -> Step:
        """Read one token for each sequence; may reuse the buffers of the state that it was given."""
        ...

    def reorder(self, state: Any, index: Int[Tensor, " N"]) -> Any:
        """The state of sequences `index`, in that order; an index may repeat."""
        ...

    def attend(
        self, source: Int[Tensor, "B S"], source_lengths: Int[Tensor, " B"], target_input: Int[Tensor, "B T"]
    ) -> dict[str, AttentionMap]:
        """Every attention map of a teacher-forced pass, by name, each (B, H, T or S, S or T)."""
        ...

    @property
    def alignment_names(self) -> list[str]:
        """Which of the maps align the target with the source."""
        ...
