"""What a translator attended to, as a picture and as a page."""

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from regard.tasks.translator import Attention, Translator
from regard.views.heatmap import Panel, heatmap_grid
from regard.views.page import Example, Map, save_page
from regard.weights import AttentionMap


def save_pictures(translator: Translator, sentences: Sequence[str], folder: Path, *, title: str) -> list[Path]:
    """Translate sentences and write attention.png (alignments) and attention.html (every layer and head).

    Args:
        translator: its attention is shown.
        sentences: one panel and one choice of the page each.
        folder: made if it is not there.
        title: of both.

    Returns:
        The two files.

    Raises:
        DataError: a sentence is empty or too long.
        MissingExtraError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    seen = [(sentence, translator.attend(sentence)) for sentence in sentences]
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "attention.png", folder / "attention.html"
    panels = [alignment_panel(sentence, attention) for sentence, attention in seen]
    heatmap_grid(panels, title=title).savefig(picture)
    save_page(page, [page_example(sentence, attention) for sentence, attention in seen], title=title)
    return [picture, page]


def alignment_panel(sentence: str, attention: Attention) -> Panel:
    """The alignment of a translation with its source: the last layer's, averaged over its heads."""
    weights = _dense(attention.maps[attention.alignment_names[-1]]).mean(0)
    return Panel(weights, attention.target_labels, attention.source_labels, sentence)


def page_example(sentence: str, attention: Attention) -> Example:
    """Every map of a translation, the last alignment shown first."""
    maps = {name: Map(weights, *attention.labels(name)) for name, weights in attention.maps.items()}
    return Example(sentence, maps, show=attention.alignment_names[-1])


def _dense(weights: AttentionMap | Tensor) -> Tensor:
    with torch.no_grad():
        return weights.dense() if isinstance(weights, AttentionMap) else weights
