"""Save the attention of a trained model, as a picture and as a page."""

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

from regard.errors import ArgumentError, DataError
from regard.files.atomic import file_errors
from regard.files.own_files import refuse_links
from regard.maps.attention_map import AttentionMap
from regard.tasks.pictures.token_maps import TextMaps
from regard.views.drawing import Panel
from regard.views.figures import save_figure
from regard.views.heatmap import heatmap_grid
from regard.views.html.contents import Example, Map
from regard.views.html.page import save_page
from regard.views.scales import ColourScale

PICTURES, PAGES = (".png", ".svg", ".pdf"), (".html", ".htm")
"""The endings of files written."""
OTHER_PICTURES = (".jpg", ".jpeg", ".gif", ".webp", ".tif", ".tiff", ".bmp", ".eps", ".ps")
"""The endings of pictures that are not."""


class Attends(Protocol):
    """A trained model that shows its attention: a `Translator`, `LanguageModel` or `MaskedLanguageModel`."""

    def attend(self, sentence: str) -> TextMaps:
        """Use the model on a sentence, and return its attention maps."""
        ...


class SeenText(NamedTuple):
    """A sentence, and the model's attention to it."""

    sentence: str
    attention: TextMaps


class PictureFiles(NamedTuple):
    """The files to write; None for one that is not wanted."""

    picture: Path | None
    page: Path | None

    @classmethod
    def at(cls, out: Path) -> "PictureFiles":
        """The files that a path means: one file if it ends as a picture or a page does, else both in a folder.

        Raises:
            ArgumentError: it ends as a picture does that is not written here.

        >>> PictureFiles.at(Path("out/v.svg"))
        PictureFiles(picture=PosixPath('out/v.svg'), page=None)
        """
        ending = out.suffix.lower()
        if not out.is_dir() and ending in PICTURES:
            return cls(out, None)
        if not out.is_dir() and ending in PAGES:
            return cls(None, out)
        if not out.is_dir() and ending in OTHER_PICTURES:
            raise ArgumentError(
                f"files that end in {', '.join([*PICTURES, *PAGES])} are written, or a folder; got {out}"
            )
        return cls(out / "attention.png", out / "attention.html")

    @property
    def paths(self) -> list[Path]:
        """The files wanted."""
        return [path for path in self if path is not None]


def look_at(model: Attends, sentences: Sequence[str], skipped: Callable[[str], None]) -> list[SeenText]:
    """Use a model on sentences, and go on past those at which it cannot look.

    Args:
        model: the model whose attention is shown.
        sentences: the sentences.
        skipped: is called with a line about each sentence that is empty or too long, if there are others.

    Raises:
        DataError: the model can look at none of them; the message is that of the first.
    """
    seen, problems = [], []
    for number, sentence in enumerate(sentences, 1):
        try:
            seen.append(SeenText(sentence, model.attend(sentence)))
        except DataError as error:
            problems.append((number, error))
    if not seen and problems:
        raise problems[0][1]
    for number, problem in problems:
        skipped(f"sentence {number} of {len(sentences)} is not shown: {problem}")
    return seen


def save_pictures(
    seen: Sequence[SeenText], files: PictureFiles, *, title: str, scale: str | ColourScale = "sqrt"
) -> list[Path]:
    """Write a picture (one map for each sentence) and a page (every layer and head).

    Args:
        seen: sentences and a model's attention to them; each becomes a panel of the picture and a choice on the page.
        files: where they go; a folder is made if it does not exist.
        title: the title of both files.
        scale: which colour a weight gets in the picture, as in `regard.views.heatmap`.

    Returns:
        The files written.

    Raises:
        RunFolderError: a file is a link.
        MissingExtraError: matplotlib is not installed.
        FileError: a file cannot be written; an older one stays as it was.
    """
    refuse_links(*files.paths)
    for path in files.paths:
        with file_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
    if files.picture is not None:
        save_figure(heatmap_grid([panel(*one) for one in seen], title=title, scale=scale), files.picture)
    if files.page is not None:
        save_page(files.page, [page_example(*one) for one in seen], title=title)
    return files.paths


def panel(sentence: str, attention: TextMaps) -> Panel:
    """The map to show first, averaged over its heads: a translation's alignment, or a text's last layer."""
    weights = attention.maps[attention.shown]
    mean = weights.average() if isinstance(weights, AttentionMap) else weights.mean(0)
    return Panel(mean, *attention.labels(attention.shown), sentence)


def page_example(sentence: str, attention: TextMaps) -> Example:
    """Every map of a text."""
    maps = {
        name: Map(weights, *attention.labels(name), attention.alternatives(name))
        for name, weights in attention.maps.items()
    }
    return Example(sentence, maps, show=attention.shown)
