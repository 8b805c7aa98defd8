"""The layers of a model as stages of compiled code: see `regard.compiled.step_work` for what a stage is.

The stages are written down once, with the addresses of the matrices and of the memory between them. What changes from
one call to the next, such as the address of a cache, whoever runs them sets before.
"""

from abc import ABC, abstractmethod
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.compiled.step_work import (
    ATTEND,
    CUT,
    FULL,
    GATE,
    HALVES,
    NORM,
    PAIRS,
    PRODUCT,
    STAGE,
    TILE_DEPTH,
    WORK,
)
from regard.compiled.thread_team import run_in_threads
from regard.models.compiled_tiles import Tiles, has_tiles
from regard.models.step_parts import (
    AttentionParts,
    FeedForwardParts,
    MatrixParts,
    NormParts,
    StepParts,
    SublayerParts,
)
from regard.torch_private import count_dispatch_modes, get_function_mode

StageFields = dict[str, Any]


class CompiledLayers(ABC):
    """Layers, the norm after them and an output layer, for up to so many rows of float32.

    Matrices may be kept in bfloat16; vectors and sums are float32, and products too, where they are not of pairs.
    """

    def __init__(self, parts: StepParts, most_rows: int) -> None:
        self._kept = list[Tensor]()
        """Memory whose addresses the stages hold."""
        self.lock = Lock()
        """Is held while the stages are set and run."""
        self.outputs = len(parts.output.weight)
        """How many numbers the output layer gives for a row."""
        self._width = parts.sublayers[0].norm.weight.shape[0]
        self._x, self._inner = row_memory(most_rows, self._width), row_memory(most_rows, self._width)
        self.begun = row_memory(most_rows, max(one.ends()[0].weight.shape[0] for one in parts.sublayers))
        """What the first matrix of a sublayer gives: queries, keys and values, or hidden numbers."""
        self._middle = row_memory(most_rows, max(one.ends()[1].weight.shape[1] for one in parts.sublayers))
        self._has_tiles, self._panels = has_tiles(most_rows), list[Tensor]()
        self.stages = self._written(parts)
        self._tiles = Tiles(self.stages, self._panels, most_rows)
        self._counters, self._work = np.zeros(3, np.int64), np.zeros(1, WORK)
        for place, name in enumerate(("counter", "done", "finished")):
            self._work[name] = self._counters.ctypes.data + place * self._counters.itemsize
        self._work["count"], self._work["stages"] = len(self.stages), self.stages.ctypes.data
        self._work["steps"], self._work["x"], self._work["width"] = 1, self._x.data_ptr(), self._width

    def run(self, x: Tensor, **writing: int) -> Tensor:
        """The output (N, V) for rows (N, M), float32. The lock is held by the caller.

        `writing` are the fields of WORK that are needed to go on with tokens that are chosen; the output is that of the
        last step.
        """
        from regard.compiled.step_loop import run

        rows = x.shape[0]
        self._tiles.make_ready(rows)
        found = torch.empty(rows, self.outputs, dtype=torch.float32, device="cpu")
        self._x[:rows] = x
        self.stages["target"][-1] = found.data_ptr()
        self._work["rows"] = rows
        self._counters[:] = 0
        try:
            for name, value in writing.items():
                self._work[name] = value
            run_in_threads(run, self._work.ctypes.data, torch.get_num_threads())
        finally:
            self._work["steps"], self._work["choice"] = 1, 0
        return found

    # -- what differs ----------------------------------------------------------------------------------

    @abstractmethod
    def queries_of(self, attention: AttentionParts) -> Tensor:
        """Where the queries of an attention are written, and behind them its keys and values."""

    @abstractmethod
    def looking(self, attention: AttentionParts, source: Tensor) -> StageFields:
        """Where the keys and values of an attention are, as far as that is known before the layers run."""

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
        stages += self._product(parts.output, source, self._x)
        stages[-1]["target_stride"] = self.outputs
        written = np.zeros(len(stages), STAGE)
        for stage, told in zip(written, stages, strict=True):
            for name, value in told.items():
                stage[name] = value
        return written

    def _sublayer(self, sublayer: SublayerParts) -> list[StageFields]:
        (first, last), body = sublayer.ends(), sublayer.body
        begun, between, done = self.begun, list[StageFields](), self._middle
        if isinstance(body, AttentionParts):
            begun = self.queries_of(body)
            between.append(self._attend(body, begun, done))
        elif body.is_gated:
            between.append(self._gate(body, begun, done))
        else:
            done = begun
        if sublayer.is_norm_first:
            return [
                self._norm(sublayer.norm, self._x, self._inner),
                *self._product(first, self._inner, begun),
                *between,
                *self._product(last, done, self._x, plus=self._x),
            ]
        return [
            *self._product(first, self._x, begun),
            *between,
            *self._product(last, done, self._inner, plus=self._x),
            self._norm(sublayer.norm, self._inner, self._x),
        ]

    def _product(
        self, matrix: MatrixParts, source: Tensor, target: Tensor, plus: Tensor | None = None
    ) -> list[StageFields]:
        """A product, and before it the cutting of what it multiplies, where there are tiles."""
        outputs, inputs = matrix.weight.shape
        self._panels.append(_panels(matrix.weight))
        product: StageFields = {
            "kind": PRODUCT, **_between(source, target), "inputs": inputs, "outputs": outputs,
            "weights": self._panels[-1].data_ptr(), "kept": _kept(matrix.weight),
            "bias": self._address(matrix.bias), "plus": self._address(plus), "activation": matrix.activation,
        }  # fmt: skip
        cut: StageFields = {"kind": CUT, **_between(source, target), "inputs": inputs}
        return [cut, product] if self._has_tiles else [product]

    def _norm(self, norm: NormParts, source: Tensor, target: Tensor) -> StageFields:
        return {
            "kind": NORM, **_between(source, target), "inputs": self._width, "weights": self._address(norm.weight),
            "bias": self._address(norm.bias), "number": norm.eps, "is_rms": norm.is_rms,
        }  # fmt: skip

    def _gate(self, network: FeedForwardParts, source: Tensor, target: Tensor) -> StageFields:
        return {"kind": GATE, **_between(source, target), "outputs": network.down.weight.shape[1]}

    def _attend(self, attention: AttentionParts, source: Tensor, target: Tensor) -> StageFields:
        heads, groups = attention.heads, attention.groups
        return {
            "kind": ATTEND, **_between(source, target), "groups": groups, "shared": heads // groups,
            "width": attention.dim, "number": attention.scale, **self.looking(attention, source),
        }  # fmt: skip

    def _address(self, tensor: Tensor | None) -> int:
        if tensor is None:
            return 0
        self._kept.append(tensor)
        return int(tensor.data_ptr())


def is_looked_at() -> bool:
    """Whether somebody looks at the operations of torch, who would see nothing of compiled code, or changes them."""
    return get_function_mode() is not None or count_dispatch_modes() > 0 or torch.is_autocast_enabled("cpu")


def timed_as(parts: StepParts) -> str:
    """What decides about the time of compiled layers."""
    from regard.compiled.tile_code import HAS_TILES

    is_in_pairs = _kept(parts.sublayers[-1].ends()[1].weight) == PAIRS
    return f"{parts}{', in pairs' if is_in_pairs else ''}{', in tiles' if HAS_TILES else ''}"


def row_memory(rows: int, width: int) -> Tensor:
    """A buffer of rows, which compiled code reads as float32 whatever torch's default dtype is."""
    with torch.inference_mode(False):  # It is written to outside of that mode too.
        return torch.zeros(rows, width, dtype=torch.float32, device="cpu")


def _between(source: Tensor, target: Tensor) -> StageFields:
    return {
        "source": source.data_ptr(), "source_stride": source.stride(0),
        "target": target.data_ptr(), "target_stride": target.stride(0),
    }  # fmt: skip


def _kept(weight: Tensor) -> int:
    """How a matrix is kept."""
    from regard.compiled.vector_code import HAS_PAIRS

    if weight.dtype == torch.float32:
        return FULL
    return PAIRS if HAS_PAIRS else HALVES


def _panels(weight: Tensor) -> Tensor:
    """The matrix (out, in) as panels (in, PANEL), with zeros in place of columns beyond the last.

    Panels of pairs are (in / 2, PANEL, 2), with zeros up to a multiple of TILE_DEPTH inputs.
    """
    from regard.compiled.vector_code import PANEL

    outputs, inputs = weight.shape
    each, depth = (2, TILE_DEPTH) if _kept(weight) == PAIRS else (1, 1)
    padded = torch.nn.functional.pad(weight, (0, -inputs % depth, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, padded.shape[1] // each, each).transpose(1, 2).contiguous()
