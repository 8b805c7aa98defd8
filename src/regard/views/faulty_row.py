"""The row of weights that shows a fault of an audit."""

from typing import TYPE_CHECKING

import numpy as np

from regard.errors import require
from regard.views.charts import name_axes, plot_of_lines
from regard.views.figures import require_matplotlib, warn_of_missing
from regard.views.themes import LIGHT, Theme
from regard.watching.checks.finding import Finding

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def faulty_row(finding: Finding, *, theme: Theme = LIGHT) -> "Figure":
    """Draw the weights of the row that shows a fault: a bar for each key, and the faulty one in another colour.

    Args:
        finding: one of `seen.audit()` with an example.
        theme: `LIGHT` or `DARK`.

    Returns:
        A new figure; `save_figure(figure, path)` writes it.

    Raises:
        NotKeptError: the finding has no example.
        MissingExtraError: matplotlib is not installed.
    """
    require(finding, Finding, "finding", "a finding of seen.audit()")
    require_matplotlib()
    weights, example = finding.row.detach().float().cpu().numpy(), finding.example
    assert example is not None, "only a finding with one has a row"
    where = f"{finding.path or 'the model'}, sequence {example.sequence}, head {example.head}, query {example.query}"
    figure, ax, missing = plot_of_lines(f"{finding.reason}: {where}", theme)
    colours = [theme.accents[1] if key == example.key else theme.accents[0] for key in range(len(weights))]
    ax.bar(np.arange(len(weights)), weights, 0.8, color=colours, linewidth=0)
    ax.set_xlim(-0.5, len(weights) - 0.5)
    name_axes(ax, "keys", "weight", theme)
    warn_of_missing(missing)
    return figure
