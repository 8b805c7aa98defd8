"""Drawable maps: values in reading order, their scale and their labels. The part of a heatmap without axes. `heatmap`
and `heatmap_grid` share it."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from torch import nn

from regard.call.masks.base import Mask
from regard.errors import ArgumentError, ShapeError, require
from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.views.axis_text import AxisLabel, measured, short_title
from regard.views.colours import Theme
from regard.views.labels import right_to_left
from regard.views.masked import Cells, hidden_cells
from regard.views.reading_order import visual_order
from regard.views.scales import ColourScale, Limits, Numbers, ScaleName, checked_limits, scale_of
from regard.views.values import Picture, Pooling, picture
from regard.watching.analysis.tables import named
from regard.watching.watch import Seen

if TYPE_CHECKING:
    pass


MASK_SIDE = 12
"""The queries and keys of a mask without labels."""


@displayed
class Panel(NamedTuple):
    """One map of a grid, with its own labels."""

    weights: Any
    rows: Sequence[str] | None = None
    columns: Sequence[str] | None = None
    title: str = ""
    mask: Any = None
    """Who may attend to whom, as in `regard.attention`. An `AttentionMap` says it itself."""


@dataclass(frozen=True, slots=True)
class Colouring:
    scale: ColourScale
    limits: Limits | None
    """The caller's limits; None for those of the data."""
    without_sink: bool
    theme: Theme

    @classmethod
    def chosen(cls, scale: ScaleName | ColourScale, limits: Any, without_sink: bool, theme: Theme) -> "Colouring":
        rule = scale_of(scale)
        require(theme, Theme, "theme", "LIGHT, DARK or another Theme of regard.views")
        return cls(rule, None if limits is None else checked_limits(limits, rule), without_sink, theme)

    def note(self, *, titled: bool) -> str:
        is_cut = self.without_sink and self.limits is None
        return "; limits without the first key" if is_cut else "" if titled else "; rows look at columns"


class Drawn(NamedTuple):
    values: Numbers
    """The drawn values, (rows, columns)."""
    hidden: Cells
    counted: Cells
    """The cells from which the limits are taken."""
    rows: list[AxisLabel]
    columns: list[AxisLabel]
    order: list[int]
    """The key, or the block of keys, of each column from the left."""
    title: str

    @property
    def lowest(self) -> float:
        return float(self.values[~self.hidden].min(initial=0.0))

    @property
    def highest(self) -> float:
        return float(self.values[~self.hidden].max(initial=0.0))


def drawn(panel: Panel, look: Colouring, *, max_cells: int, pooling: Pooling) -> Drawn:
    shown, hidden, counted = read(panel := one_matrix(panel), look, max_cells=max_cells, pooling=pooling)
    values = look.scale.prepared(shown.values, counted)
    order, title = ordered(shown, panel.columns), short_title(panel.title)
    columns, note = [shown.columns[place] for place in order], note_of(shown, pooling)
    return Drawn(
        values[:, order], hidden[:, order], counted[:, order], measured(shown.rows), measured(columns), order,
        f"{title} ({note})" if title and note else title or note,
    )  # fmt: skip


def read(panel: Panel, look: Colouring, *, max_cells: int, pooling: Pooling) -> tuple[Picture, Cells, Cells]:
    """One map in the order of its keys, its masked cells, and the cells from which the limits are taken."""
    shown = picture(panel.weights, panel.rows, panel.columns, max_cells=max_cells, pooling=pooling)
    hidden = hidden_cells(panel.weights, shown.grid, panel.mask)
    counted = ~hidden
    if look.without_sink and counted[:, 1:].any():
        counted[:, 0] = False
    return shown, hidden, counted


def one_matrix(panel: Panel) -> Panel:
    """A panel with its weights as one matrix: a mask as zeros and ones, lists as an array, batches of one removed, and
    the only map of a watch, of a model with its inputs or of several maps.
    """
    weights = panel.weights
    if _holds_maps(weights):
        found = named(weights)
        if len(found) > 1:
            raise ArgumentError(
                f"a heatmap draws one map, and {len(found)} came ({', '.join(name for name, _ in found[:3])}, ...): "
                "name one, or draw all by model_grid"
            )
        weights = found[0][1]
    if isinstance(weights, Mask):
        columns = panel.rows if panel.columns is None else panel.columns
        queries, keys = (MASK_SIDE if labels is None else len(labels) for labels in (panel.rows, columns))
        return panel._replace(weights=weights.to_tensor(queries, keys).float(), mask=weights)
    if isinstance(weights, list | tuple):
        try:
            weights = np.asarray(weights)
        except ValueError as error:
            raise ShapeError(f"weights must be one matrix; the lists are none: {error}") from None
    while len(getattr(weights, "shape", ())) > 2 and weights.shape[0] == 1:
        weights = weights[0]
    return panel._replace(weights=weights)


def _holds_maps(weights: Any) -> bool:
    if isinstance(weights, list | tuple):
        return any(isinstance(one, AttentionMap | nn.Module) or getattr(one, "ndim", 0) > 1 for one in weights)
    return isinstance(weights, Seen | Mapping | nn.Module)


def ordered(shown: Picture, labels: Sequence[str] | None) -> list[int]:
    """The columns from the left. Blocks of several keys follow the direction of the whole text."""
    if shown.block[1] == 1:
        return visual_order(shown.columns)
    places = list(range(len(shown.columns)))
    return places[::-1] if right_to_left(labels or ()) else places


def limits_of(maps: Iterable[Drawn], look: Colouring) -> Limits:
    if look.limits is not None:
        return look.limits
    return look.scale.limits(np.concatenate([one.values[one.counted] for one in maps]))


def note_of(shown: Picture, pooling: Pooling) -> str:
    down, across = shown.block
    most = "" if shown.is_even else "up to "
    return "" if shown.block == (1, 1) else f"{pooling} of {most}{down} × {across} weights a cell"
