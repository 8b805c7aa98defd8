"""The steps of a generation as one map: the concatenated rows of several maps."""

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate

import torch
from torch import Tensor

from regard.call.shapes import Rows
from regard.errors import ArgumentError, ShapeError, require
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.combined import SeveralSource
from regard.maps.sources.source import Part, Piece, Scratch, Source, Statistic
from regard.maps.sources.summary import SummarySource, joined_steps
from regard.maps.statistics import definitions as st
from regard.maps.statistics.tiles import ask
from regard.tensors.tile_sizes import union


@dataclass(frozen=True, eq=False)
class StackSource(SeveralSource):
    """Sources with concatenated rows. Each has a range of the keys; its weights of all others are 0."""

    parts: tuple[Source, ...]
    starts: tuple[int, ...]
    """The index of each step's first key among the keys of the stack."""

    @cached_property
    def ends(self) -> list[int]:
        return list(accumulate(step.queries for step in self.parts))

    @property
    def shape(self) -> torch.Size:
        keys = max(start + step.keys for start, step in zip(self.starts, self.parts, strict=True))
        return torch.Size((*self.parts[0].leading, self.ends[-1], keys))

    @property
    def answer_dtype(self) -> torch.dtype:
        return self.dtype

    @property
    def width(self) -> int:
        return max(step.width for step in self.parts)

    def __str__(self) -> str:
        return f"{len(self.parts)} steps"

    def columns(self, rows: range) -> range:
        if self.has_signs:
            return range(self.keys)
        found = ((self.parts[n].columns(inner), self.starts[n]) for n, inner in self._found(rows))
        return union(range(r.start + start, r.stop + start) for r, start in found)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        parts = [step.part(flat_heads) for step in self.parts]

        def weights(rows: Rows, columns: Rows) -> Piece:
            if not isinstance(rows, range):
                pieces = [weights(range(i, i + 1), columns).weights for i in rows.tolist()]
                return Piece(torch.cat(pieces, dim=1))
            found = [
                _within(parts[n], inner, columns, self.starts[n], self.parts[n].keys) for n, inner in self._found(rows)
            ]
            return Piece(found[0] if len(found) == 1 else torch.cat(found, dim=1))

        return weights

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        if not isinstance(statistic, st.Entropy | st.ParticipationRatio):
            return None
        found = [ask(step, statistic) for step in self.parts]
        return tuple(torch.cat(answers, dim=1) for answers in zip(*found, strict=True))

    def _found(self, rows: range) -> list[tuple[int, range]]:
        found, at = [], rows.start
        while at < rows.stop:
            step = bisect_right(self.ends, at)
            begin, stop = self.ends[step] - self.parts[step].queries, min(rows.stop, self.ends[step])
            found.append((step, range(at - begin, stop - begin)))
            at = stop
        return found


def starts_of(sources: Sequence[Source], starts: Sequence[int] | None) -> tuple[int, ...]:
    if not sources:
        raise ArgumentError("stack() needs at least one map")
    starts = (0,) * len(sources) if starts is None else tuple(starts)
    if len(starts) != len(sources) or any(start < 0 for start in starts):
        raise ArgumentError(
            f"stack() needs for each of {len(sources)} maps the place of its first key, at least 0; got {starts}"
        )
    if len({(m.leading, m.dtype, m.device) for m in sources}) > 1:
        shapes = ", ".join(sorted({f"{tuple(m.shape)} {m.dtype} on {m.device}" for m in sources}))
        raise ShapeError(f"the steps of a stack must share leading dimensions, dtype and device; got {shapes}")
    return starts


def _within(part: Part, rows: range, columns: Rows, start: int, keys: int) -> Tensor:
    """A block of a part with only the columns from `start` on; the weights of all others are 0."""
    if not isinstance(columns, range):
        inner = columns - start
        beyond = (inner < 0) | (inner >= keys)
        return part(rows, inner.clamp(0, keys - 1)).weights.masked_fill(beyond, 0.0)
    before = min(max(start - columns.start, 0), len(columns))
    known = range(max(columns.start - start, 0), min(columns.stop - start, keys))
    if not known:
        # Read one key, for the shape, the dtype and the device.
        weights = part(rows, range(1)).weights
        return weights.new_zeros(*weights.shape[:-1], len(columns))
    weights = part(rows, known).weights
    return torch.nn.functional.pad(weights, (before, len(columns) - before - len(known)))


def stack(maps: Sequence[AttentionMap], *, starts: Sequence[int] | None = None) -> AttentionMap:
    """The steps of a generation as one map: rows concatenated, and exact zeros for keys a step did not have.

    `Seen.joined` finds the steps among the calls of a watched module.

    Args:
        maps: (batch..., H, T_t, S_t), one for each step, usually with T_t = 1.
        starts: the index of each step's first key among all keys, above 0 where a sliding window has dropped earlier
            keys. The default is 0 for all steps.

    Returns:
        A map (batch..., H, sum of T_t, largest of start + S_t).

    For maps with statistics only, those of queries are concatenated, and those of keys are summed.

    Raises:
        ArgumentError: there are no maps, or not one start of at least 0 for each of them.
        NotKeptError: the steps have statistics only, and none of these can be joined.
        ShapeError: the maps differ in leading dimensions, dtype or device.

    >>> import regard, torch
    >>> k = torch.zeros(3, 1)
    >>> steps = [regard.attention(k[:1], k[:n], k[:n], return_weights=True).weights for n in (2, 3, 2)]
    >>> stack(steps, starts=(0, 0, 1)).dense()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.5000, 0.5000]])
    """
    require(maps, Sequence, "maps", "a sequence of maps")
    for one in maps:
        require(one, AttentionMap, "each of maps", "an AttentionMap")
    sources = [one.source for one in maps]
    places = starts_of(sources, starts)
    summaries = [source for source in sources if isinstance(source, SummarySource)]
    if len(summaries) == len(sources):
        return AttentionMap(joined_steps(summaries, places))
    return AttentionMap(StackSource(tuple(sources), places))
