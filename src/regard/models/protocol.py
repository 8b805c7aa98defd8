"""The interface of every sequence-to-sequence model: training, decoding, and its attention maps."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

from jaxtyping import Float, Integer
from torch import Tensor, nn

from regard.maps.attention_map import AttentionMap

OutputLoss = Callable[[Tensor, nn.Linear], tuple[Tensor, Tensor]]
"""From the input of the output layer and that layer itself: a summed loss and its count, without all logits at once.

`regard.tasks.training.losses.output_cross_entropy`, with its targets, is such a function.
"""

RecordMap = Callable[[str, AttentionMap], None]


class StepAlignment(Protocol):
    """The attention of a step to the source."""

    def dense(self) -> Float[Tensor, "N H 1 S"]: ...


class Step(NamedTuple):
    """One step of decoding."""

    logits: Float[Tensor, "N V"]
    alignment: StepAlignment | None
    """The attention of the step to the source, computed on demand; None without a source."""
    state: Any


@runtime_checkable
class Seq2Seq(Protocol):
    """A model from token ids to token ids: B sequences, S source tokens, T target tokens, a vocabulary of V."""

    max_length: int | None
    """The longest source or target; None for no limit."""

    def __call__(
        self,
        source: Integer[Tensor, "B S"],
        source_lengths: Integer[Tensor, " B"],
        target_input: Integer[Tensor, "B T"],
    ) -> Float[Tensor, "B T V"]: ...

    def start(self, source: Integer[Tensor, "B S"], source_lengths: Integer[Tensor, " B"]) -> Any:
        """Read the source, and return the state before the first step."""
        ...

    def step(self, state: Any, ids: Integer[Tensor, " N"]) -> Step:
        """Read one token for each sequence. The step may reuse the buffers of the given state."""
        ...

    def reorder(self, state: Any, index: Integer[Tensor, " N"]) -> Any:
        """The state of the sequences `index`, in that order; an index may occur several times."""
        ...

    def attend(
        self,
        source: Integer[Tensor, "B S"],
        source_lengths: Integer[Tensor, " B"],
        target_input: Integer[Tensor, "B T"],
    ) -> dict[str, AttentionMap]:
        """Every attention map of a teacher-forced pass, by name, each (B, H, T or S, S or T)."""
        ...

    @property
    def alignment_names(self) -> list[str]:
        """The names of the maps from target to source."""
        ...

    @property
    def source_names(self) -> list[str]:
        """The names of the maps within the source."""
        ...
