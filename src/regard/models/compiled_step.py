"""A decoder's step as one call of compiled code, with numba: see `regard.compiled.step_loop`.

A step of a small model is dozens of operations of torch, and half of its time passes between them. The stages are
written down once; a step sets the addresses of its caches and starts the threads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from regard.compiled.choice_work import WORK as CHOICE
from regard.compiled.step_work import ATTEND, HELD, STAGE
from regard.mechanisms.rotary.layouts import Half
from regard.mechanisms.rotary.rotary import Rotary
from regard.models.compiled_layers import CompiledLayers, StageFields, is_looked_at, row_memory, timed_as
from regard.models.step_parts import AttentionParts, StepParts
from regard.storage.choices import Way, choices

TRIAL_S = 0.05
"""The time that it may take to see which is faster. One step of each is run four times in any case."""
OF_ONE = "step"
"""The kind of the steps of single texts."""
FIRST_TURNS = 64
"""The number of positions whose sines and cosines are kept at first. It doubles when more are asked for."""


class HeldKeys(NamedTuple):
    """Where the keys and values of one attention stand: addresses in bytes, and strides in numbers."""

    keys: int
    values: int
    owners: int
    """The address of the number of the owner of each row's keys, int64; 0 if each row has its own."""
    places: int
    """The address of the numbers of the owners (rows, placed) of each row's first keys, int64."""
    placed: int
    """How many keys these are; the others stand with the row's own owner."""
    owner_stride: int
    """From the keys of one owner to those of the next."""
    group_stride: int
    key_stride: int


class CompiledStep(CompiledLayers):
    """The step of a decoder of float32 for up to so many rows.

    Matrices may be kept in bfloat16; vectors and sums are float32, and products too, where they are not of pairs. The
    bits of a row depend on no other row.
    """

    def __init__(self, parts: StepParts, most_rows: int) -> None:
        attentions = [one.body for one in parts.sublayers if isinstance(one.body, AttentionParts)]
        # Queries to the source have memory of their own, because they are handed out after the step.
        self._query = row_memory(
            most_rows, max((one.heads * one.dim for one in attentions if one.is_across), default=0)
        )
        super().__init__(parts, most_rows)
        self._turns = next((_Turns(one.rotary) for one in attentions if one.rotary is not None), None)
        self._numbers = self.stages.view(np.int64).reshape(len(self.stages), -1)
        names = list(STAGE.names or ())
        self._held = slice(names.index(HELD[0]), names.index(HELD[-1]) + 1)
        attends = self.stages["kind"] == ATTEND
        self._back = np.flatnonzero(attends & (self.stages["writes"] == 1))
        self._across = np.flatnonzero(attends & (self.stages["writes"] == 0))

    def __call__(
        self,
        x: Tensor,
        position: int,
        back: Sequence[HeldKeys],
        across: Sequence[HeldKeys] = (),
        source_length: int = 0,
        source_lengths: Int[Tensor, " A"] | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Do the step.

        Args:
            x: the embedded tokens (N, M), float32.
            position: how many positions of the caches are filled. The next one is written.
            back: the cache of each self-attention, with room for one more position.
            across: for each attention to the sources, their keys and values.
            source_length: how many there are of these.
            source_lengths: how many of them are no padding, at least one, int64 and side by side; None if all are.

        Returns:
            Logits (N, V), and the last layer's queries to the source (N, H * D), or (N, 0) if there is none.
        """
        with self.lock:
            self._look(position, back, across, source_length, source_lengths)
            logits = self.run(x)
            return logits, self._query[: x.shape[0]].clone()

    def write(
        self,
        x: Tensor,
        position: int,
        back: Sequence[HeldKeys],
        across: Sequence[HeldKeys],
        source_length: int,
        *,
        table: Float[Tensor, "V M"],
        positions: Float[Tensor, "P M"],
        end: int,
    ) -> tuple[list[int], list[float]]:
        """Do P steps of one text, or fewer if it ends, and choose the most probable token after each.

        Args:
            x: the embedded first token (1, M), at the first of the positions.
            position, back, across, source_length: as for one step; the caches have room for P more positions.
            table: the vector of each token, float32, row after row.
            positions: what is added to the vectors of the tokens of each step, float32, row after row.
            end: the token that ends the text.

        Returns:
            The tokens, and the log-probability of each.
        """
        assert self._turns is None, "turned queries need other angles at each step"
        steps = positions.shape[0]
        tokens, gains = np.zeros(steps, np.int64), np.zeros(steps, np.float32)
        value, place, offset = np.zeros(1, np.float32), np.zeros(1, np.int64), np.zeros(1, np.float32)
        choice = np.zeros(1, CHOICE)
        choice["groups"], choice["members"], choice["wanted"] = 1, 1, 1
        choice["columns"] = choice["row_stride"] = self.stages["outputs"][-1]
        choice["offsets"], choice["values"] = offset.ctypes.data, value.ctypes.data
        choice["places"] = place.ctypes.data
        with self.lock:
            self._look(position, back, across, source_length, None)
            self.run(
                x, steps=steps, choice=choice.ctypes.data, tokens=tokens.ctypes.data, gains=gains.ctypes.data,
                end=end, table=table.data_ptr(), positions=positions.data_ptr(),
            )  # fmt: skip
        written = tokens.tolist()
        count = written.index(end) + 1 if end in written else steps
        return written[:count], gains[:count].tolist()

    def _look(
        self,
        position: int,
        back: Sequence[HeldKeys],
        across: Sequence[HeldKeys],
        source_length: int,
        source_lengths: Tensor | None,
    ) -> None:
        """Tell the stages where keys and values stand. The lock is held by the caller."""
        stages = self.stages
        self._numbers[self._back, self._held] = back
        stages["length"][self._back] = position + 1
        if across:
            self._numbers[self._across, self._held] = across
            stages["length"][self._across] = source_length
            stages["lengths"][self._across] = 0 if source_lengths is None else source_lengths.data_ptr()
        if self._turns is not None:
            stages["cosines"][self._back], stages["sines"][self._back] = self._turns.at(position)

    @property
    def has_turns(self) -> bool:
        """Whether queries and keys are turned by the angles of their positions."""
        return self._turns is not None

    def queries_of(self, attention: AttentionParts) -> Tensor:
        """Where the queries of an attention are written, and behind them its keys and values."""
        return self._query if attention.is_across else self.begun

    def looking(self, attention: AttentionParts, source: Tensor) -> StageFields:
        """Keys and values stand in a cache, in which each step writes one more of self-attention."""
        heads, groups, dim = attention.heads, attention.groups, attention.dim
        turned = {} if attention.rotary is None else _turning(attention.rotary)
        return {"writes": not attention.is_across, "values_at": (heads + groups) * dim, **turned}


class _Turns:
    """The cosines and sines of rotary positions, in float32."""

    def __init__(self, rotary: Rotary) -> None:
        self._rotary, self._count = rotary, 0
        self._cosines = self._sines = torch.zeros(0, 1)

    def at(self, position: int) -> tuple[int, int]:
        """The addresses of the cosines and the sines of a position."""
        if position >= self._count:
            self._count = max(FIRST_TURNS, 2 * position)
            found = self._rotary.cos_sin(torch.arange(self._count))
            self._cosines, self._sines = (one.float().contiguous() for one in found)
        place = 4 * position * self._cosines.shape[1]
        return self._cosines.data_ptr() + place, self._sines.data_ptr() + place


class LateStep:
    """The compiled step of a decoder, made when it is wanted, and taken where it was measured to be faster.

    Args:
        parts: gives what it is made of; None if the decoder has parts that it does not know.
        first_steps: so many steps of single texts are done by operations, because to load compiled code takes half a
            second, and to compile it once some seconds.
        most_rows: the most rows of a step.
    """

    def __init__(self, parts: Callable[[], StepParts | None], first_steps: int, most_rows: int) -> None:
        self._parts: Callable[[], StepParts | None] | None = parts
        self._first_steps, self._most_rows, self._said = first_steps, most_rows, ""
        self._made: CompiledStep | None = None
        self._is_faster: dict[str, bool] = {}
        """By kind of step."""
        self._measuring = Lock()
        self.count = 0
        """The steps so far that a compiled one could have done."""

    @property
    def is_made(self) -> bool:
        """Whether the steps of single texts are done by compiled code by now."""
        return self._is_faster.get(OF_ONE, False)

    def chosen(self, step: Callable[[CompiledStep | None, Tensor], Tensor]) -> CompiledStep | None:
        """Who does the steps of a text that begins now; None for the operations of torch.

        Args:
            step: does the first step of a text by either, to see which takes less time on this machine.
        """
        if is_looked_at() or (OF_ONE not in self._is_faster and self.count < self._first_steps):
            return None
        return self._faster(OF_ONE, step, torch.zeros(1, dtype=torch.int64))

    def chosen_for(
        self, tokens: Int[Tensor, " N"], step: Callable[[CompiledStep | None, Tensor], Tensor]
    ) -> CompiledStep | None:
        """Who does the next step of many sentences, with these tokens; it depends on their number alone."""
        if is_looked_at() or not 0 < len(tokens) <= self._most_rows:
            return None
        return self._faster(f"step of up to {1 << (len(tokens) - 1).bit_length()} rows of many sentences", step, tokens)

    def _faster(
        self, kind: str, step: Callable[[CompiledStep | None, Tensor], Tensor], tokens: Tensor
    ) -> CompiledStep | None:
        if kind not in self._is_faster:
            with self._measuring:
                self._is_faster[kind] = self._measured(kind, step, tokens)
        return self._made if self._is_faster[kind] else None

    def _measured(self, kind: str, step: Callable[[CompiledStep | None, Tensor], Tensor], tokens: Tensor) -> bool:
        """Whether the compiled step takes less time; what it is made of is kept until one is."""
        compiled = self._made
        if compiled is None:
            parts = None if self._parts is None else self._parts()
            if parts is None:
                return False
            compiled, self._said = CompiledStep(parts, self._most_rows), timed_as(parts)
        ways: dict[str, Callable[[], Way]] = {
            "operations": lambda: partial(step, None),
            "compiled": lambda: partial(step, compiled),
        }
        choices().allow(TRIAL_S)
        asked = f"{kind} of {self._said}, threads: {torch.get_num_threads()}"
        is_faster = choices().fastest(asked, ways, tokens) == "compiled"
        choices().keep()
        if is_faster:
            self._made, self._parts = compiled, None
        return is_faster


def _turning(rotary: Rotary) -> StageFields:
    """Where the pairs of numbers stand that are turned."""
    turned = rotary.rotated
    between, within = (1, turned // 2) if isinstance(rotary.layout, Half) else (2, 1)
    return {"turned": turned, "between_pairs": between, "within_pair": within}
