"""Join the calls of a sequence, such as the steps of a generation, to one map."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from regard.errors import ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.generation_steps import stack
from regard.maps.sources.summary import SummarySource
from regard.maps.statistics import definitions as st
from regard.watching.kept.sequences import CallSequence, SequenceStep, rows_before

NAMED = 4
"""How many sequences a message names."""


def separate(name: str, sequences: list[CallSequence]) -> str:
    said = [_said(sequence, n > 0) for n, sequence in enumerate(sequences[:NAMED])]
    more = len(sequences) - NAMED
    return (
        f"{name!r}: its calls are {len(sequences)} sequences, not one: {'; '.join(said)}"
        f"{f'; {more} more' if more > 0 else ''}. seen.generations({name!r}) has a map for each"
    )


def _said(sequence: CallSequence, has_reason: bool) -> str:
    calls = [step.call for step in sequence.steps]
    numbers = ", ".join(map(str, calls if len(calls) < 4 else [*calls[:2], "...", calls[-1]]))
    numbers = f"call{'s' if len(calls) > 1 else ''} {numbers}"
    return f"{numbers} ({sequence.why})" if has_reason else numbers


@dataclass(slots=True)
class _Piece:
    weights: AttentionMap
    start: int
    first: int
    rows: range


def joined_map(name: str, sequence: CallSequence, maps: Mapping[int, AttentionMap], others: "OfRuns") -> AttentionMap:
    steps = sequence.steps
    if len(steps) == 1:
        return _without_room(maps[steps[0].call], steps[0])
    orders = _orders(name, sequence, others)
    pieces: list[_Piece] = []
    for step, order in zip(steps, orders, strict=True):
        weights = _without_room(_in_order(maps[step.call], order), step)
        if sequence.grows:
            # Where a cache was cut back, queries beyond the cut were asked again. A cut never takes a whole call back:
            # with other keys a new sequence begins.
            for piece in pieces[-1:]:
                piece.rows = range(min(len(piece.rows), step.first - piece.first))
        pieces.append(_Piece(weights, step.start, step.first, range(weights.shape[-2])))
    return stack([_of_rows(piece) for piece in pieces], starts=[piece.start for piece in pieces])


ModelRun = tuple[int, int]


class OfRuns:
    def __init__(self, sequences: Iterable[CallSequence]) -> None:
        self._origins: dict[ModelRun, list[Tensor | None]] = {}
        for sequence in sequences:
            for step in sequence.steps[1:]:
                if (run := _run(step)) is not None:
                    self._origins.setdefault(run, []).append(step.origins)

    def narrowed(self, step: SequenceStep) -> Tensor | None:
        """The possible parent rows of a step, by every module of its run; None: each row its own."""
        if (origins := step.origins) is None:
            return None
        for other in self._of(step):
            if other is None and bool(origins.diagonal().all()) and origins.shape[0] == origins.shape[1]:
                return None
            if other is not None and other.shape == origins.shape and bool((origins & other).any(1).all()):
                origins = origins & other
        return origins

    def moves(self, steps: Iterable[SequenceStep]) -> bool:
        found = (origins for step in steps for origins in self._of(step))
        return any(o is not None and not (o.shape[0] == o.shape[1] and bool(o.diagonal().all())) for o in found)

    def _of(self, step: SequenceStep) -> list[Tensor | None]:
        run = _run(step)
        return [step.origins] if run is None else self._origins[run]


def _run(step: SequenceStep) -> ModelRun | None:
    return None if step.when.begun is None else (step.when.thread, step.when.begun)


def _orders(name: str, sequence: CallSequence, others: OfRuns) -> list[Tensor | None]:
    """For each step, the parent row in the last step of each row of its batch; None for the same rows."""
    steps = sequence.steps
    if sequence.grows and not others.moves(steps[1:]):
        # Rows with equal keys, as under a small window, are not suspected of changing positions.
        return [None] * len(steps)
    parents: list[Tensor | None] = []
    same = steps[0].alike
    for step in steps[1:]:
        if (origins := others.narrowed(step)) is None:
            same = None
            parents.append(None)
            continue
        chosen = rows_before(origins)
        possible = torch.zeros_like(origins) if same is None else same[chosen]
        possible[torch.arange(len(chosen)), chosen] = True
        if bool((origins & ~possible).any()):
            raise ShapeError(
                f"{name!r}, call {step.call}: rows of the batch have the same keys here, but were not the same before, "
                "so that it cannot be told which of them each row continues: watch the model's other attention too, "
                "or ask each call by itself"
            )
        same = None if step.alike is None else step.alike & possible[:, chosen]
        parents.append(chosen)
    order: Tensor | None = None
    orders: list[Tensor | None] = [None]
    for parent in reversed(parents):
        order = parent if order is None else order if parent is None else parent[order]
        orders.append(order)
    return orders[::-1]


def _in_order(weights: AttentionMap, order: Tensor | None) -> AttentionMap:
    if order is None:
        return weights
    source, leading = weights.source, weights.source.leading
    names = source.dimensions
    if names.leading.count("batch") != 1 and names.leading[:1] != ("unknown",):
        raise ShapeError(f"a map {tuple(weights.shape)} has not one dimension of rows that could change places")
    flat_heads = torch.arange(source.flat_heads, device=weights.device).view(leading[0], -1)[order]
    return AttentionMap(source.choose(flat_heads.reshape(-1), (len(order), *leading[1:])).with_dimensions(names))


def _without_room(weights: AttentionMap, step: SequenceStep) -> AttentionMap:
    queries, keys = weights.shape[-2:]
    filled = keys if step.filled is None else step.filled
    if not queries <= filled < keys:
        return weights
    if isinstance(source := weights.source, SummarySource):
        is_empty = not source.keeps(st.Received()) or not bool((weights.received()[..., filled:] != 0).any())
        return AttentionMap(source.of_keys(filled)) if is_empty else weights
    if bool((weights.only(columns=slice(filled, keys)).received() != 0).any()):
        return weights  # Its last keys are zeros, which a query may attend to.
    return weights.only(columns=slice(0, filled))


def _of_rows(piece: _Piece) -> AttentionMap:
    source = piece.weights.source
    if len(piece.rows) == source.queries:
        return piece.weights
    if isinstance(source, SummarySource):
        return AttentionMap(source.of_rows(piece.rows))
    return piece.weights.only(rows=slice(piece.rows.start, piece.rows.stop))
