"""A decoder's step as one call of compiled code, with numba: see `regard.compiled.step_loop`.

A step of a small model is dozens of operations of torch, and half of its time passes between them. The stages are
written down once; a step sets the addresses of its caches and starts the threads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from regard.compiled.step_work import ATTEND, GATE, HELD, MOST_ROWS, NORM, PRODUCT, STAGE, WORK
from regard.compiled.thread_team import run_in_threads
from regard.mechanisms.rotary.layouts import Half
from regard.mechanisms.rotary.rotary import Rotary
from regard.models.step_parts import (
    AttentionParts,
    FeedForwardParts,
    MatrixParts,
    NormParts,
    StepParts,
    SublayerParts,
)
from regard.storage.choices import Way, choices
from regard.torch_private import count_dispatch_modes, get_function_mode

TRIAL_S = 0.05
"""The time that it may take to see which is faster. One step of each is run four times in any case."""
FIRST_TURNS = 64
"""The number of positions whose sines and cosines are kept at first. It doubles when more are asked for."""

StageFields = dict[str, Any]


class HeldKeys(NamedTuple):
    """Where the keys and values of one attention stand: addresses in bytes, and strides in numbers."""

    keys: int
    values: int
    row_stride: int
    """From the keys of one row to those of the next; 0 if all rows have the same."""
    group_stride: int
    key_stride: int


class CompiledStep:
    """The step of a decoder of float32 for a few rows.

    Matrices may be kept in bfloat16; vectors, products and sums are float32.
    """

    def __init__(self, parts: StepParts) -> None:
        self._kept = list[Tensor]()
        """Memory whose addresses the stages hold."""
        self._lock = Lock()
        self._vocabulary, self._width = parts.output.weight.shape
        bodies = [one.body for one in parts.sublayers]
        attentions = [one for one in bodies if isinstance(one, AttentionParts)]
        self._x, self._inner = self._memory(self._width), self._memory(self._width)
        self._begun = self._memory(max(one.ends()[0].weight.shape[0] for one in parts.sublayers))
        self._middle = self._memory(max(one.ends()[1].weight.shape[1] for one in parts.sublayers))
        self._query = self._memory(max((one.heads * one.dim for one in attentions if one.is_across), default=0))
        self._turns = next((_Turns(one.rotary) for one in attentions if one.rotary is not None), None)
        self._stages = self._written(parts)
        self._numbers = self._stages.view(np.int64).reshape(len(self._stages), -1)
        names = list(STAGE.names or ())
        self._held = slice(names.index(HELD[0]), names.index(HELD[-1]) + 1)
        attends = self._stages["kind"] == ATTEND
        self._back = np.flatnonzero(attends & (self._stages["writes"] == 1))
        self._across = np.flatnonzero(attends & (self._stages["writes"] == 0))
        self._counters, self._work = np.zeros(2, np.int64), np.zeros(1, WORK)
        self._work["counter"] = self._counters.ctypes.data
        self._work["done"] = self._counters.ctypes.data + self._counters.itemsize
        self._work["count"], self._work["stages"] = len(self._stages), self._stages.ctypes.data

    def __call__(
        self,
        x: Tensor,
        position: int,
        back: Sequence[HeldKeys],
        across: Sequence[HeldKeys] = (),
        source_length: int = 0,
    ) -> tuple[Tensor, Tensor]:
        """Do the step.

        Args:
            x: the embedded tokens (N, M), float32; N is at most MOST_ROWS.
            position: how many positions of the caches are filled. The next one is written.
            back: the cache of each self-attention, with room for one more position.
            across: for each attention to the source, the source's keys and values, without padding.
            source_length: how many there are of these.

        Returns:
            Logits (N, V), and the last layer's queries to the source (N, H * D), or (N, 0) if there is none.
        """
        from regard.compiled.step_loop import run

        rows, stages = x.shape[0], self._stages
        logits = x.new_empty(rows, self._vocabulary)
        with self._lock:
            self._x[:rows] = x
            self._numbers[self._back, self._held] = back
            stages["length"][self._back] = position + 1
            if across:
                self._numbers[self._across, self._held] = across
                stages["length"][self._across] = source_length
            if self._turns is not None:
                stages["cosines"][self._back], stages["sines"][self._back] = self._turns.at(position)
            stages["target"][-1] = logits.data_ptr()
            self._work["rows"] = rows
            self._counters[:] = 0
            run_in_threads(run, self._work.ctypes.data, torch.get_num_threads())
            return logits, self._query[:rows].clone()

    # -- the stages ------------------------------------------------------------------------------------

    def _written(self, parts: StepParts) -> Any:
        """The stages, in order."""
        stages: list[StageFields] = []
        for sublayer in parts.sublayers:
            stages += self._sublayer(sublayer)
        source = self._x
        if parts.norm is not None:
            stages.append(self._norm(parts.norm, self._x, self._inner))
            source = self._inner
        stages.append({**self._product(parts.output, source, self._x), "target_stride": self._vocabulary})
        written = np.zeros(len(stages), STAGE)
        for stage, told in zip(written, stages, strict=True):
            for name, value in told.items():
                stage[name] = value
        return written

    def _sublayer(self, sublayer: SublayerParts) -> list[StageFields]:
        (first, last), body = sublayer.ends(), sublayer.body
        begun, between, done = self._begun, list[StageFields](), self._middle
        if isinstance(body, AttentionParts):
            begun = self._query if body.is_across else begun
            between.append(self._attend(body, begun, done))
        elif body.is_gated:
            between.append(self._gate(body, begun, done))
        else:
            done = begun
        if sublayer.is_norm_first:
            return [
                self._norm(sublayer.norm, self._x, self._inner),
                self._product(first, self._inner, begun),
                *between,
                self._product(last, done, self._x, plus=self._x),
            ]
        return [
            self._product(first, self._x, begun),
            *between,
            self._product(last, done, self._inner, plus=self._x),
            self._norm(sublayer.norm, self._inner, self._x),
        ]

    def _product(self, matrix: MatrixParts, source: Tensor, target: Tensor, plus: Tensor | None = None) -> StageFields:
        outputs, inputs = matrix.weight.shape
        return {
            "kind": PRODUCT, **_between(source, target), "inputs": inputs, "outputs": outputs,
            "weights": self._address(_panels(matrix.weight)), "bias": self._address(matrix.bias),
            "plus": self._address(plus), "is_half": matrix.weight.dtype == torch.bfloat16,
            "activation": matrix.activation,
        }  # fmt: skip

    def _norm(self, norm: NormParts, source: Tensor, target: Tensor) -> StageFields:
        return {
            "kind": NORM, **_between(source, target), "inputs": self._width, "weights": self._address(norm.weight),
            "bias": self._address(norm.bias), "number": norm.eps, "is_rms": norm.is_rms,
        }  # fmt: skip

    def _gate(self, network: FeedForwardParts, source: Tensor, target: Tensor) -> StageFields:
        return {"kind": GATE, **_between(source, target), "outputs": network.down.weight.shape[1]}

    def _attend(self, attention: AttentionParts, source: Tensor, target: Tensor) -> StageFields:
        heads, groups, dim, rotary = attention.heads, attention.groups, attention.dim, attention.rotary
        return {
            "kind": ATTEND, **_between(source, target), "groups": groups, "shared": heads // groups, "width": dim,
            "writes": not attention.is_across, "values_at": (heads + groups) * dim, "number": attention.scale,
            **({} if rotary is None else _turning(rotary)),
        }  # fmt: skip

    def _memory(self, width: int) -> Tensor:
        """A buffer of rows, which compiled code reads as float32 whatever torch's default dtype is."""
        return self._keep(torch.zeros(MOST_ROWS, width, dtype=torch.float32, device="cpu"))

    def _address(self, tensor: Tensor | None) -> int:
        return 0 if tensor is None else int(self._keep(tensor).data_ptr())

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor


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
    """The compiled step of a decoder, made when so many steps were done one by one that it is worth its start.

    Args:
        parts: gives what it is made of; None if the decoder has parts that it does not know.
        first_steps: so many steps are done by operations, because to load compiled code takes half a second, and to
            compile it once some seconds.
    """

    def __init__(self, parts: Callable[[], StepParts | None], first_steps: int) -> None:
        self._parts: Callable[[], StepParts | None] | None = parts
        self._first_steps = first_steps
        self._made: CompiledStep | None = None
        self.count = 0
        """The steps so far that a compiled one could have done."""

    def chosen(self, step: Callable[[CompiledStep | None, Tensor], Tensor]) -> CompiledStep | None:
        """Who does the steps of a text that begins now; None for the operations of torch.

        Args:
            step: does the first step of a text by either, to see which takes less time on this machine.
        """
        if get_function_mode() is not None or count_dispatch_modes():
            return None  # Whoever looks at the operations of torch would see nothing.
        if self._parts is None or self.count < self._first_steps:
            return self._made
        parts, self._parts = self._parts(), None
        if parts is None:
            return None
        compiled, token = CompiledStep(parts), torch.zeros(1, dtype=torch.int64)
        ways: dict[str, Callable[[], Way]] = {
            "operations": lambda: partial(step, None),
            "compiled": lambda: partial(step, compiled),
        }
        choices().allow(TRIAL_S)
        if choices().fastest(f"step of {parts}, threads: {torch.get_num_threads()}", ways, token) == "compiled":
            self._made = compiled
        choices().keep()
        return self._made


def _between(source: Tensor, target: Tensor) -> StageFields:
    return {
        "source": source.data_ptr(), "source_stride": source.stride(0),
        "target": target.data_ptr(), "target_stride": target.stride(0),
    }  # fmt: skip


def _turning(rotary: Rotary) -> StageFields:
    """Where the pairs of numbers stand that are turned."""
    turned = rotary.rotated
    between, within = (1, turned // 2) if isinstance(rotary.layout, Half) else (2, 1)
    return {"turned": turned, "between_pairs": between, "within_pair": within}


def _panels(weight: Tensor) -> Tensor:
    """The matrix (out, in) as panels (in, PANEL), with zeros in place of columns beyond the last."""
    from regard.compiled.vector_code import PANEL

    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous()
