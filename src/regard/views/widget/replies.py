"""The questions of a view to the kernel, and the answers: exact weights of any query, key or region, as bytes.

A question is plain data; an answer is plain data and buffers of float32 or 32-bit integers. Questions change nothing
and are independent, so that several views may share a kernel.
"""

import math
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from regard.call.masks.basic import Causal
from regard.call.scores.base import ScaledDot
from regard.errors import ArgumentError, NonFiniteError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import Factors
from regard.maps.statistics.pooling import Grid
from regard.tensors.memory import widest_dtype
from regard.views.html.contents import Example
from regard.views.html.factors import why_no_softmax
from regard.views.html.numbers import as_heads, common_text, mean_of_heads, numbers, spans
from regard.views.labels import axis_labels

MASK_CHOICES = ("own", "none", "causal")
"""The reader's choice of mask: that of the call, none, or causal."""
COLDEST, HOTTEST = 0.05, 20.0


def recomputed(heads: AttentionMap, temperature: float, mask: str) -> AttentionMap:
    r"""The map $\mathrm{softmax}(c \, q_i \cdot k_j / \tau)$, deferred until it is read; $\tau$ is from 0.05 to 20. A
    causal mask has the last query at the last key."""
    source = heads.source
    if (reason := why_no_softmax(heads)) or not isinstance(source, CallSource):
        raise ArgumentError(f"only a softmax of scaled dot products without a bias is computed anew; {reason}")
    is_number = isinstance(temperature, int | float) and math.isfinite(temperature)
    if not (is_number and COLDEST <= temperature <= HOTTEST) or mask not in MASK_CHOICES:
        raise ArgumentError(
            f"the temperature must be from {COLDEST} to {HOTTEST} and the mask one of {', '.join(MASK_CHOICES)}; got "
            f"{temperature!r} and {mask!r}"
        )
    call = source.call
    scale = call.score.dot_scale(call.query.shape[-1])
    assert scale is not None
    chosen = {"own": call.mask, "none": None, "causal": Causal().bind(call.sizes, call.query.device)}[mask]
    # In float64: scores of a low temperature are large, and float32 keeps few digits of their sum of exponentials.
    wide = widest_dtype(call.query.device)
    changed = replace(
        call, query=call.query.to(wide), key=call.key.to(wide), score=ScaledDot(scale / temperature), mask=chosen
    )
    return AttentionMap(CallSource(Factors.given(changed, None), source.shape, names=source.dimensions))


AT_ONCE = 2**24
"""The most weights read for one answer with statistics of heads, but at least one head."""
LARGEST_TILE = 1024
"""The most cells on a side of a tile."""
OWN = 1.0, "own"
"""The temperature and the mask of the call."""
HELD = 12
"""The cached heads, with one value for each query; recomputed heads have factors of their own."""


class Reply(NamedTuple):
    content: dict[str, Any]
    buffers: list[bytes]


class Replier:
    def __init__(self, examples: Sequence[Example]) -> None:
        self.maps: list[list[AttentionMap]] = []
        self._names: list[list[str]] = []
        self._texts: list[list[list[str] | None]] = []
        for example in examples:
            self._names.append(list(example.maps))
            self.maps.append([as_heads(name, one.weights) for name, one in example.maps.items()])
            sides = [
                (axis_labels(one.rows, heads.shape[-2], "rows"), axis_labels(one.columns, heads.shape[-1], "columns"))
                for one, heads in zip(example.maps.values(), self.maps[-1], strict=True)
            ]
            self._texts.append([common_text(*both) for both in sides])
        self._held: OrderedDict[tuple[Any, ...], tuple[tuple[float, str], AttentionMap]] = OrderedDict()
        self._numbers: dict[tuple[Any, ...], Reply] = {}

    @torch.no_grad()
    def to(self, question: Mapping[str, Any]) -> Reply:
        """The answer to a question.

        The question has its sort, an example, a map and a head (an index, or "mean"), and may have a `temperature` and
        a `mask` for recomputed weights.

        ==========  ===================================  ====================================================
        ask         and                                  answer
        ==========  ===================================  ====================================================
        numbers                                          of some heads around it: pictures, largest weights
        dense                                            every weight (T, S)
        row         at: a query                          its weights (S)
        column      at: a key                            its weights (T)
        tile        window: from query, to, from key,    the largest and the mean weight of each of the cells
                    to; cells: down, across
        strongest                                        of each query the strongest key (or -1), its weight
        ==========  ===================================  ====================================================
        """
        asked = str(question.get("ask"))
        tasks = {
            "numbers": self._numbers_of,
            "dense": self._dense,
            "row": self._row,
            "column": self._column,
            "tile": self._tile,
            "strongest": self._strongest,
        }
        if asked not in tasks:
            raise ArgumentError(f"a view asks for one of {', '.join(tasks)}; got {asked!r}")
        return tasks[asked](question)

    def _place(self, question: Mapping[str, Any]) -> tuple[int, int]:
        example = _index(question, "example", len(self.maps))
        return example, _index(question, "map", len(self.maps[example]))

    def _head(self, question: Mapping[str, Any]) -> AttentionMap:
        """The map (1, T, S) of a head, cached with its values of each query."""
        (example, place), head = self._place(question), question.get("head")
        how = question.get("temperature", 1.0), question.get("mask", "own")
        heads = self.maps[example][place]
        at = head if head == "mean" else _index(question, "head", len(heads))
        # Of each head, one other temperature and mask is cached besides the call's own.
        key = (example, place, at, how == OWN)
        if key not in self._held or self._held[key][0] != how:
            chosen = heads if at == "mean" else heads.only(heads=slice(at, at + 1))
            chosen = chosen if how == OWN else recomputed(chosen, *how)
            mean = mean_of_heads(chosen) if at == "mean" else chosen
            if mean is None:
                raise ArgumentError(f"map {self._names[example][place]!r} has no mean of heads")
            self._held[key] = how, mean
        self._held.move_to_end(key)
        while len(self._held) > HELD:
            self._held.popitem(last=False)
        return self._held[key][1]

    def _numbers_of(self, question: Mapping[str, Any]) -> Reply:
        example, place = self._place(question)
        heads, name = self.maps[example][place], self._names[example][place]
        if question.get("head") == "mean":
            first, stop, of = len(heads), len(heads) + 1, self._head(question)
        else:
            head = _index(question, "head", len(heads))
            size = max(1, AT_ONCE // (heads.shape[-2] * heads.shape[-1]))
            first = head // size * size
            stop = min(len(heads), first + size)
            of = heads.only(heads=slice(first, stop))
        key = (example, place, first)
        if key not in self._numbers:
            found = numbers(name, of, self._texts[example][place] if first < len(heads) else None)
            pictures = [one for one in (found.cells.largest, found.cells.mean) if one is not None]
            range_of_keys = spans(heads)
            content = {
                "heads": [first, stop],
                "grid": [found.cells.grid.rows.count, found.cells.grid.columns.count],
                "pictures": [
                    name for name in ("largest", "mean") if getattr(found.cells, name) is not None
                ],
                "largest": found.largest,
                "withoutSink": found.without_sink,
                "statistics": found.statistics,
                "spans": range_of_keys is not None,
            }  # fmt: skip
            buffers = [_floats(one) for one in pictures]
            if range_of_keys is not None:
                buffers.append(range_of_keys.astype("<u4").tobytes())
            self._numbers[key] = Reply(content, buffers)
        return self._numbers[key]

    def _dense(self, question: Mapping[str, Any]) -> Reply:
        weights = _numpy_of(self._head(question).dense()[0])
        return Reply({"largest": float(weights.max())}, [_floats(weights)])

    def _row(self, question: Mapping[str, Any]) -> Reply:
        head = self._head(question)
        at = _index(question, "at", head.shape[-2])
        return Reply({}, [_floats(_numpy_of(head.block(range(at, at + 1), range(head.shape[-1]))))])

    def _column(self, question: Mapping[str, Any]) -> Reply:
        head = self._head(question)
        at = _index(question, "at", head.shape[-1])
        return Reply({}, [_floats(_numpy_of(head.block(range(head.shape[-2]), range(at, at + 1))))])

    def _tile(self, question: Mapping[str, Any]) -> Reply:
        head = self._head(question)
        top, bottom, left, right = _whole_numbers(question, "window", 4)
        down, across = _whole_numbers(question, "cells", 2)
        queries, keys = head.shape[-2:]
        if not (0 <= top < bottom <= queries and 0 <= left < right <= keys):
            raise ArgumentError(f"a window lies within {queries} x {keys}; got {[top, bottom, left, right]}")
        if not (1 <= down <= LARGEST_TILE and 1 <= across <= LARGEST_TILE):
            raise ArgumentError(f"a tile has from 1 to {LARGEST_TILE} cells on a side; got {down} x {across}")
        grid = Grid.at_most(down, across, bottom - top, right - left)
        content = {"window": [top, bottom, left, right], "grid": [grid.rows.count, grid.columns.count]}
        if grid.is_whole:
            return Reply(content, [_floats(_numpy_of(head.block(range(top, bottom), range(left, right))))])
        is_all = (bottom - top, right - left) == (queries, keys)
        part = head if is_all else head.only(rows=slice(top, bottom), columns=slice(left, right))
        found = part.summary("pooled_max", "pooled_mean", rows=down, columns=across)
        return Reply(content, [_floats(_numpy_of(found[name])) for name in ("pooled_max", "pooled_mean")])

    def _strongest(self, question: Mapping[str, Any]) -> Reply:
        found = self._head(question).top_keys(1)
        keys = found.indices.where(found.values > 0, -1)
        return Reply({}, [keys.cpu().numpy().astype("<i4").tobytes(), _floats(_numpy_of(found.values))])


def _index(question: Mapping[str, Any], name: str, count: int) -> int:
    value = question.get(name)
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < count:
        raise ArgumentError(f"{name} must be a whole number from 0 to {count - 1}; got {value!r}")
    return value


def _whole_numbers(question: Mapping[str, Any], name: str, count: int) -> list[int]:
    value = question.get(name)
    is_list = isinstance(value, list) and len(value) == count
    if not is_list or not all(isinstance(one, int) and not isinstance(one, bool) for one in value or ()):
        raise ArgumentError(f"{name} must be {count} whole numbers; got {value!r}")
    return list(value or ())


def _numpy_of(weights: Tensor | Any) -> npt.NDArray[np.floating[Any]]:
    values: npt.NDArray[np.floating[Any]] = weights.detach().cpu().float().numpy()
    if not np.isfinite(values).all():
        raise NonFiniteError(f"weights must be finite; {values[~np.isfinite(values)][0]} came")
    return values


def _floats(values: npt.NDArray[np.floating[Any]]) -> bytes:
    return np.ascontiguousarray(values, "<f4").tobytes()
