"""A decoder's step for one sentence as one call of compiled code, with numba: see `regard.compiled.step_loop`.

A step of a small model is some forty operations of torch, and half of its time passes between them. The stages are
written down once; a step sets the addresses of its caches and starts the threads.
"""

from collections.abc import Callable, Sequence
from functools import partial
from threading import Lock
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.compiled.step_work import ATTEND, MOST_ROWS, NORM, PRODUCT, STAGE, WORK
from regard.compiled.thread_team import run_in_threads
from regard.models.step_parts import AttentionParts, LayerParts, MatrixParts, NormParts, StepParts
from regard.nn.product_choice import Way, choices

FIRST_STEPS = 500
"""So many steps are done by operations: to load compiled code takes as long, and to compile it once some seconds."""

TRIAL_S = 0.05
"""The time that it may take to see which is faster. One step of each is run four times in any case."""


class CompiledStep:
    """The step of `FixedTransformer`, for the hypotheses of one sentence, in float32.

    Matrices may be kept in bfloat16; vectors, products and sums are float32.
    """

    def __init__(self, parts: StepParts) -> None:
        self._kept = list[Tensor]()
        """Memory whose addresses the stages hold."""
        self._lock = Lock()
        self._width = parts.output.weight.shape[1]
        self._vocabulary = parts.output.weight.shape[0]
        self._stages = self._written(parts)
        kinds = self._stages["kind"] == ATTEND
        self._back = np.flatnonzero(kinds & (self._stages["writes"] == 1))
        self._across = np.flatnonzero(kinds & (self._stages["writes"] == 0))
        self._counters = np.zeros(2, np.int64)
        self._work = np.zeros(1, WORK)
        self._work["counter"] = self._counters.ctypes.data
        self._work["done"] = self._counters.ctypes.data + self._counters.itemsize
        self._work["count"], self._work["stages"] = len(self._stages), self._stages.ctypes.data

    def __call__(
        self, x: Tensor, position: int, cache: Sequence[Tensor], keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Do the step.

        Args:
            x: the embedded tokens (N, M), float32; N is at most MOST_ROWS.
            position: how many positions of the cache are filled. The next one is written.
            cache: for each layer, (N, capacity, W): keys and values side by side.
            keys: for each layer, (1, G, S, D), of a source without padding.
            values: the same.

        Returns:
            Logits (N, V), and the queries of the last layer to the source (N, H * D).
        """
        from regard.compiled.step_loop import run

        rows, stages = x.shape[0], self._stages
        logits = x.new_empty(rows, self._vocabulary)
        with self._lock:
            self._x[:rows] = x
            held = [one.data_ptr() for one in cache]
            stages["keys"][self._back] = held
            stages["values"][self._back] = held + self._values_in_cache
            stages["row_stride"][self._back] = cache[0].shape[1] * stages["key_stride"][self._back]
            stages["length"][self._back] = position + 1
            stages["keys"][self._across] = [one.data_ptr() for one in keys]
            stages["values"][self._across] = [one.data_ptr() for one in values]
            length = keys[0].shape[2]
            stages["length"][self._across] = length
            stages["group_stride"][self._across] = length * stages["width"][self._across]
            stages["target"][-1] = logits.data_ptr()
            self._work["rows"] = rows
            self._counters[:] = 0
            run_in_threads(run, self._work.ctypes.data, torch.get_num_threads())
            return logits, self._query[:rows].clone()

    # -- the stages ------------------------------------------------------------------------------------

    def _written(self, parts: StepParts) -> Any:
        """The stages of all layers, in order."""
        layers = parts.layers
        self._x, self._query = self._memory(self._width), self._memory(_width_of([one.across for one in layers]))
        inner, attended = self._memory(self._width), self._memory(_width_of([*_attentions(layers)]))
        projected = self._memory(max(one.back.into.weight.shape[0] for one in layers))
        hidden = self._memory(max(one.up.weight.shape[0] for one in layers))
        self._values_in_cache = np.array([4 * one.back.groups * one.back.dim for one in layers], np.int64)
        stages: list[dict[str, Any]] = []
        for layer in layers:
            looks_back = self._attend(layer.back, projected, attended, writes=True)
            looks_across = self._attend(layer.across, self._query, attended, writes=False)
            for norm, begins, middle, ends in zip(
                layer.norms,
                ((layer.back.into, projected), (layer.across.into, self._query), (layer.up, hidden)),
                ([looks_back], [looks_across], []),
                ((layer.back.out, attended), (layer.across.out, attended), (layer.down, hidden)),
                strict=True,
            ):
                source, target = (inner, self._x) if layer.is_norm_first else (self._x, inner)
                sublayer = [
                    self._product(begins[0], source, begins[1]),
                    *middle,
                    self._product(ends[0], ends[1], target, plus=self._x),
                ]
                normed = self._norm(norm, self._x, inner) if layer.is_norm_first else self._norm(norm, inner, self._x)
                stages += [normed, *sublayer] if layer.is_norm_first else [*sublayer, normed]
        if parts.norm is not None:
            stages.append(self._norm(parts.norm, self._x, inner))
        source = self._x if parts.norm is None else inner
        stages.append({**self._product(parts.output, source, self._x), "target_stride": self._vocabulary})
        written = np.zeros(len(stages), STAGE)
        for stage, told in zip(written, stages, strict=True):
            for name, value in told.items():
                stage[name] = value
        return written

    def _product(
        self, matrix: MatrixParts, source: Tensor, target: Tensor, plus: Tensor | None = None
    ) -> dict[str, Any]:
        outputs, inputs = matrix.weight.shape
        return {
            "kind": PRODUCT, **_between(source, target), "inputs": inputs, "outputs": outputs,
            "weights": self._address(_panels(matrix.weight)), "bias": self._address(matrix.bias),
            "plus": self._address(plus), "is_half": matrix.weight.dtype == torch.bfloat16, "is_relu": matrix.is_relu,
        }  # fmt: skip

    def _norm(self, norm: NormParts, source: Tensor, target: Tensor) -> dict[str, Any]:
        return {
            "kind": NORM, **_between(source, target), "inputs": self._width, "weights": self._address(norm.weight),
            "bias": self._address(norm.bias), "number": norm.eps,
        }  # fmt: skip

    def _attend(self, attention: AttentionParts, source: Tensor, target: Tensor, *, writes: bool) -> dict[str, Any]:
        heads, groups, dim = attention.heads, attention.groups, attention.dim
        return {
            "kind": ATTEND, **_between(source, target), "groups": groups, "shared": heads // groups, "width": dim,
            "writes": writes, "values_at": (heads + groups) * dim, "number": attention.scale, "group_stride": dim,
            "key_stride": 2 * groups * dim if writes else dim,
        }  # fmt: skip

    def _memory(self, width: int) -> Tensor:
        """A buffer of rows."""
        return self._keep(torch.zeros(MOST_ROWS, width))

    def _address(self, tensor: Tensor | None) -> int:
        return 0 if tensor is None else int(self._keep(tensor).data_ptr())

    def _keep(self, tensor: Tensor) -> Tensor:
        self._kept.append(tensor)
        return tensor


class LateStep:
    """The compiled step of a decoder, made when so many steps were done one by one that it is worth its start.

    Args:
        parts: what it is made of; None if the decoder has parts that it does not know.
    """

    def __init__(self, parts: StepParts | None) -> None:
        self._parts = parts
        self._made: CompiledStep | None = None
        self.count = 0
        """The steps of single sentences so far."""

    def chosen(self, step: Callable[[CompiledStep | None, Tensor], Tensor]) -> CompiledStep | None:
        """Who does the steps of a sentence that begins now; None for the operations of torch.

        Args:
            step: does the first step of a sentence by either, to see which takes less time on this machine.
        """
        parts = self._parts
        if parts is None or self.count < FIRST_STEPS:
            return self._made
        self._parts = None
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


def _between(source: Tensor, target: Tensor) -> dict[str, int]:
    return {
        "source": source.data_ptr(), "source_stride": source.stride(0),
        "target": target.data_ptr(), "target_stride": target.stride(0),
    }  # fmt: skip


def _panels(weight: Tensor) -> Tensor:
    """The matrix (out, in) as panels (in, PANEL), with zeros in place of columns beyond the last."""
    from regard.compiled.vector_code import PANEL

    outputs, inputs = weight.shape
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -outputs % PANEL))
    return padded.view(-1, PANEL, inputs).transpose(1, 2).contiguous()


def _attentions(layers: Sequence[LayerParts]) -> list[AttentionParts]:
    return [attention for layer in layers for attention in (layer.back, layer.across)]


def _width_of(attentions: Sequence[AttentionParts]) -> int:
    """The largest width of their queries."""
    return max(one.heads * one.dim for one in attentions)
