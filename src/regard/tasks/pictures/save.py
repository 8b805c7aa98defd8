"""Save what a trained model attended to, as a picture and as a page."""

from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from regard.maps.attention_map import AttentionMap
from regard.storage.atomic import replacing
from regard.storage.own_files import refuse_links
from regard.tasks.pictures.token_maps import TextMaps
from regard.views.drawing import Panel
from regard.views.heatmap import heatmap_grid
from regard.views.html.page import Example, Map, save_page


class Attends(Protocol):
    """A trained model that shows what it attends to: a `Translator`, `LanguageModel` or `MaskedLanguageModel`."""

    def attend(self, sentence: str) -> TextMaps:
        """Use the model on a sentence, and return its attention maps."""
        ...


def save_pictures(model: Attends, sentences: Sequence[str], folder: Path, *, title: str) -> list[Path]:
    """Use a model on sentences and write attention.png (one map each) and attention.html (every layer and head).

    Args:
        model: the model whose attention is shown.
        sentences: each becomes a panel of the picture and a choice on the page.
        folder: where the files go; it is made if it does not exist.
        title: the title of both files.

    Returns:
        The two files.

    Raises:
        DataError: a sentence is empty or too long.
        RunFolderError: one of the two files is a link.
        MissingExtraError: matplotlib is not installed.
        OSError: a file cannot be written.
    """
    seen = [(sentence, model.attend(sentence)) for sentence in sentences]
    folder.mkdir(parents=True, exist_ok=True)
    picture, page = folder / "attention.png", folder / "attention.html"
    refuse_links(picture, page)
    panels = [panel(sentence, attention) for sentence, attention in seen]
    with replacing(picture) as file:
        heatmap_grid(panels, title=title).savefig(file, format="png")
    save_page(page, [page_example(sentence, attention) for sentence, attention in seen], title=title)
    return [picture, page]


def panel(sentence: str, attention: TextMaps) -> Panel:
    """The map to show first, averaged over its heads: a translation's alignment, or a text's last layer."""
    weights = _dense(attention.maps[attention.shown]).mean(0)
    return Panel(weights, *attention.labels(attention.shown), sentence)


def page_example(sentence: str, attention: TextMaps) -> Example:
    """Every map of a text."""
    maps = {name: Map(weights, *attention.labels(name)) for name, weights in attention.maps.items()}
    return Example(sentence, maps, show=attention.shown)


def _dense(weights: AttentionMap | Tensor) -> Tensor:
    with torch.no_grad():
        return weights.dense() if isinstance(weights, AttentionMap) else weights
