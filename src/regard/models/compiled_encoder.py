"""One sentence read by one call of compiled code, with numba: the encoder, and the keys and values for the decoder.

To read a short sentence is fifty operations of torch, whose products are small: see `regard.models.compiled_step`.
"""

from collections.abc import Callable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from regard.compiled.step_work import ATTEND
from regard.models.compiled_layers import CompiledLayers, StageFields, is_looked_at, timed_as
from regard.models.step_parts import AttentionParts, StepParts
from regard.storage.choices import Way, choices

MOST_TOKENS = 128
"""The length of the longest sentence that is read so. The products of longer ones are large enough for a library."""
FEWEST_TOKENS = 16
"""Sentences of up to so many tokens are timed as one kind; so are those up to twice as many, and so on."""
TRIAL_S = 0.05
"""The time that it may take to see which is faster for one kind. Each is run four times in any case."""


class CompiledEncoder(CompiledLayers):
    """An encoder without rotary positions, and its output layer, for one sentence of up to MOST_TOKENS tokens."""

    def __init__(self, parts: StepParts) -> None:
        # All tokens have the keys of the one sentence.
        self._owners = torch.zeros(MOST_TOKENS, dtype=torch.int64, device="cpu")
        super().__init__(parts, MOST_TOKENS)
        self._attends = np.flatnonzero(self.stages["kind"] == ATTEND)

    def __call__(self, x: Float[Tensor, "1 S M"]) -> Float[Tensor, "1 S W"]:
        """The output layer of each token of a sentence without padding, float32."""
        with self.lock:
            self.stages["length"][self._attends] = x.shape[1]
            return self.run(x[0])[None]

    def queries_of(self, attention: AttentionParts) -> Tensor:
        """Where the queries of an attention are written, and behind them its keys and values."""
        return self.begun

    def looking(self, attention: AttentionParts, source: Tensor) -> StageFields:
        """Every token attends to all of them: keys and values stand behind the queries, in the rows of the source."""
        keys = source.data_ptr() + 4 * attention.heads * attention.dim
        return {
            "keys": keys, "values": keys + 4 * attention.groups * attention.dim, "owners": self._owners.data_ptr(),
            "group_stride": attention.dim, "key_stride": source.stride(0),
        }  # fmt: skip


class LateEncoder:
    """The compiled encoder of a model, made when it is first wanted, and taken where it was measured to be faster.

    Args:
        parts: what it is made of; None if the encoder has parts that it does not know.
    """

    def __init__(self, parts: StepParts | None) -> None:
        self._parts = parts
        self._made: CompiledEncoder | None = None
        self._is_faster: dict[int, bool] = {}

    def chosen(self, length: int, operations: Way) -> Way:
        """Who reads a sentence of so many tokens without padding; either takes (1, S, M)."""
        if self._parts is None or length > MOST_TOKENS:
            return operations
        if is_looked_at():
            return operations
        if self._made is None:
            self._made = CompiledEncoder(self._parts)
        most = max(FEWEST_TOKENS, 1 << (length - 1).bit_length())
        if most not in self._is_faster:
            self._is_faster[most] = _is_faster(self._made, self._parts, operations, most)
        return self._made if self._is_faster[most] else operations


def _is_faster(compiled: CompiledEncoder, parts: StepParts, operations: Way, length: int) -> bool:
    """Whether it reads a sentence of so many tokens in less time than the operations of torch do."""
    ways: dict[str, Callable[[], Way]] = {"operations": lambda: operations, "compiled": lambda: compiled}
    x = torch.ones(1, length, parts.sublayers[0].norm.weight.shape[0], dtype=torch.float32, device="cpu")
    choices().allow(TRIAL_S)
    kind = f"reading {length} tokens, {timed_as(parts)}, threads: {torch.get_num_threads()}"
    found = choices().fastest(kind, ways, x) == "compiled"
    choices().keep()
    return found
