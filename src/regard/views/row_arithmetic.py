"""One query's attention in numbers: its vector, the keys, the scores, the weights, the values and their sum."""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from regard.call.masks.base import Mask
from regard.errors import ArgumentError, ShapeError, require, require_whole
from regard.functional import AnyNormalization, AnyScore, attention, make_call
from regard.lazy import displayed
from regard.views.axis_text import FONT_POINTS, LINE
from regard.views.cell_text import write_weights
from regard.views.drawing import Colouring, Drawn, Panel, drawn
from regard.views.figures import heading_inches, new_figure, require_matplotlib, warn_of_missing, write_heading
from regard.views.heatmap import draw_maps
from regard.views.layout import MARGIN, Box
from regard.views.themes import LIGHT, Theme

if TYPE_CHECKING:
    from matplotlib.figure import Figure

MOST_KEYS, MOST_WIDTH = 24, 12
"""The most keys, and the most elements of a vector, whose numbers can be read."""
ACROSS, DOWN = 0.44, 0.3
"""Inches of a cell."""


@displayed
class RowArithmetic(NamedTuple):
    """The numbers of one query, in float64."""

    query: Tensor
    """(D,)."""
    keys: Tensor
    """(S, D)."""
    scores: Tensor
    """(S,); -inf where a mask excludes the key."""
    weights: Tensor
    """(S,)."""
    values: Tensor
    """(S, E)."""
    output: Tensor
    """(E,)."""


def arithmetic_of_row(
    query: Tensor, key: Tensor, value: Tensor, row: int, *, score: AnyScore = "scaled dot",
    normalization: AnyNormalization = "softmax", mask: Mask | Tensor | None = None,
) -> RowArithmetic:  # fmt: skip
    r"""The steps of one query: $s_j = s(q, k_j)$, $p = \mathrm{normalize}(s)$ and $o = \sum_j p_j v_j$.

    Args:
        query: (T, D).
        key: (S, D).
        value: (S, E).
        row: the query, from 0; -1 is the last.
        score, normalization, mask: as in `regard.attention`.

    Raises:
        ShapeError: the tensors are not matrices, or do not fit each other.
        ArgumentError: there is no such row.

    Source: Vaswani et al. 2017 (arXiv:1706.03762), equation 1.

    >>> import torch
    >>> steps = arithmetic_of_row(torch.eye(2), torch.eye(2), torch.tensor([[2.0], [4.0]]), 0, score="dot")
    >>> steps.scores.tolist(), [round(float(w), 3) for w in steps.weights], round(float(steps.output), 3)
    ([1.0, 0.0], [0.731, 0.269], 2.538)
    """
    for name, one in (("query", query), ("key", key), ("value", value)):
        require(one, Tensor, name, "a tensor")
    require_whole(row=row)
    given = [one.detach().double() for one in (query, key, value)]
    if any(one.dim() != 2 for one in given):
        shapes = ", ".join(str(tuple(one.shape)) for one in given)
        raise ShapeError(f"query, key and value must be matrices, (T, D), (S, D) and (S, E); got {shapes}")
    q, k, v = given
    if not -len(q) <= row < len(q):
        raise ArgumentError(f"row must be one of {len(q)} queries; got {row}")
    place = range(len(q))[row]
    options: dict[str, Any] = {"score": score, "normalization": normalization, "mask": mask}
    output, weights = attention(q, k, v, return_weights=True, **options)
    call, _ = make_call(q, k, v, dropout=0.0, bias=None, **options)
    scores = call.scores(range(place, place + 1), range(len(k)))
    return RowArithmetic(q[place], k, scores.flatten(), weights[..., place, :], v, output[place])


def row_arithmetic(
    query: Tensor, key: Tensor, value: Tensor, row: int = -1, tokens: Sequence[str] | None = None, *,
    score: AnyScore = "scaled dot", normalization: AnyNormalization = "softmax", mask: Mask | Tensor | None = None,
    title: str = "", theme: Theme = LIGHT,
) -> "Figure":  # fmt: skip
    """Draw how one query attends, in numbers: the query, the keys, their scores and weights, the values and the output.

    Args:
        query: (T, D), with D up to 12.
        key: (S, D), with S up to 24.
        value: (S, E), with E up to 12.
        row: the query, from 0; -1 is the last.
        tokens: a label for each key.
        score, normalization, mask: as in `regard.attention`.
        title: printed above.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure with six plots: q, k, s, p, v and o.

    Raises:
        RegardError: as `arithmetic_of_row` and `heatmap`; ArgumentError if the numbers are too many to be read.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    >>> figure = row_arithmetic(x, x, x, tokens=["I", "see", "you"])
    >>> [ax.get_title(loc="left") for ax in figure.axes]
    ['query q', 'keys k', 'scores s', 'weights p', 'values v', 'output, the sum of p v']
    """
    steps = arithmetic_of_row(query, key, value, row, score=score, normalization=normalization, mask=mask)
    return draw_arithmetic(steps, tokens, title, theme)


def draw_arithmetic(
    steps: RowArithmetic, tokens: Sequence[str] | None = None, title: str = "", theme: Theme = LIGHT
) -> "Figure":
    """Draw the numbers of one query; raises as `row_arithmetic` does."""
    require_matplotlib()
    keys, width, wide = len(steps.keys), len(steps.query), len(steps.output)
    if keys > MOST_KEYS or max(width, wide) > MOST_WIDTH:
        raise ArgumentError(
            f"the numbers of at most {MOST_KEYS} keys and vectors of {MOST_WIDTH} can be read; got {keys} keys, "
            f"and vectors of {width} and {wide}: choose some, as in key[:{MOST_KEYS}, :{MOST_WIDTH}]"
        )
    labels = list(tokens) if tokens is not None else [str(place) for place in range(keys)]
    hidden = steps.scores.isinf() & (steps.scores < 0)
    shown = steps.scores.masked_fill(hidden, 0.0)
    panels = [
        Panel(steps.query[None], [""], title="query q"),
        Panel(steps.keys, labels, title="keys k"),
        Panel(shown[:, None], [""] * keys, [""], "scores s", ~hidden[:, None]),
        Panel(steps.weights[:, None], [""] * keys, [""], "weights p", ~hidden[:, None]),
        Panel(steps.values, [""] * keys, title="values v"),
        Panel(steps.output[None], [""], title="output, the sum of p v"),
    ]
    look = Colouring.chosen("linear", None, False, theme, None)
    maps = [drawn(panel, look, max_cells=MOST_KEYS, pooling="max") for panel in panels]
    figure, axes = new_figure(*_boxes(maps, title), theme)
    missing = write_heading(figure, title, theme) if title else ""
    for ax, panel, one in zip(axes, panels, maps, strict=True):
        missing += draw_maps([ax], [one], look, None)
        write_weights(ax, one)
        ax.tick_params(length=0, labelsize=FONT_POINTS - 1)
        if not any(panel.rows or ()):
            ax.set_yticks([])
        if panel.columns is not None:
            ax.set_xticks([])
    warn_of_missing(missing)
    return figure


def _boxes(maps: list[Drawn], title: str) -> tuple[Box, list[Box]]:
    label = max(one.inches for one in maps[1].rows) + 0.15
    gap, above = 0.5, 2.6 * LINE
    left = MARGIN + label
    first = MARGIN + above + (1.5 * LINE if title else 0.0)
    second = first + DOWN + above
    third = second + maps[1].values.shape[0] * DOWN + above
    boxes, at = [Box(left, first, maps[0].values.shape[1] * ACROSS, DOWN)], left
    for one in maps[1:5]:
        width = max(one.values.shape[1] * ACROSS, 0.75)
        boxes.append(Box(at, second, width, one.values.shape[0] * DOWN))
        at += width + gap
    values = boxes[4]
    boxes.append(Box(values.left, third, maps[5].values.shape[1] * ACROSS, DOWN))
    wide = max(at - gap, values.left + 1.7, heading_inches(title) if title else 0.0)
    return Box(0, 0, wide + MARGIN, third + DOWN + MARGIN), boxes
