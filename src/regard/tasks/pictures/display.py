"""Translations in a notebook: the words, and the alignment as a picture where it was asked for."""

from collections.abc import Sequence
from contextlib import suppress
from html import escape

from regard.errors import MissingExtraError
from regard.lazy import Bundle
from regard.tasks.pictures.token_maps import TextAttention
from regard.tasks.translation.results import Attention, Candidate, Translation
from regard.views.display import MOST_LABELLED, display_of, picture_bundle, table_html
from regard.views.display import bundle as bundle
from regard.views.heatmap import head_panels, heatmap, heatmap_grid


@display_of.register
def _(shown: Translation) -> Bundle:
    rows = [(f"{one.score:.3f}", one.text) for one in shown.candidates]
    problem = f"<p>{escape(shown.problem)}</p>" if shown.problem else ""
    words = f"<p>{escape(shown.source)}</p>{table_html(['score', 'translation'], rows)}{problem}"
    return _aligned(shown.candidates[0], shown.source_labels, words)


@display_of.register
def _(shown: Candidate) -> Bundle:
    return _aligned(shown, None, table_html(["score", "translation"], [(f"{shown.score:.3f}", shown.text)]))


def _aligned(best: Candidate, source: Sequence[str] | None, words: str) -> Bundle:
    with suppress(MissingExtraError):
        if best.alignment is not None and best.alignment.numel():
            axes = heatmap(best.alignment, best.labels or None, source or None)
            data, metadata = picture_bundle(axes.get_figure(root=True))
            return {**data, "text/html": words + data["text/html"]}, metadata
    return {"text/html": words}, {}


@display_of.register
def _(shown: Attention | TextAttention) -> Bundle:
    """The first heads of the map that is shown first: of a translator, its alignment."""
    name = shown.shown
    panels = head_panels(shown.maps[name], *shown.labels(name))
    return picture_bundle(heatmap_grid(panels[: 2 * MOST_LABELLED], title=name))
