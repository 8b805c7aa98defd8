"""`regard view`: draw what a run attends to."""

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from regard.cli.loading import loading
from regard.cli.shared import Run
from regard.errors import ArgumentError
from regard.tasks.registry import task_of

if TYPE_CHECKING:
    from regard.views.drawing import Panel


def view_run(
    run: Run,
    sentences: tyro.conf.Positional[tuple[str, ...]],
    /,
    *,
    out: Path | None = None,
    terminal: bool = False,
    scale: Literal["sqrt", "linear", "log", "row"] = "sqrt",
    device: str = "auto",
) -> None:
    """Draw what a run attends to: attention.png (alignments, or the last layer) and attention.html (all of it).

    A sentence that is empty or too long is left out, and a line on standard error says so.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        sentences: what to translate and draw, or what a language model is to read.
        out: folder for the two files, the run folder unless given; or one file that ends in .png, .svg, .pdf or .html.
        terminal: print the maps in place of writing files, in colours, or as plain tables if the output is a pipe
            or NO_COLOR is set.
        scale: which colour a weight gets in the picture and in the terminal; row: each row by its largest weight.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if not sentences:
        raise ArgumentError("there is no sentence to draw: give one or more")
    if terminal and out is not None:
        raise ArgumentError("--terminal prints and writes no file: leave out --out or --terminal")
    task = task_of(run)
    with loading("matplotlib"):
        from regard.tasks.pictures.save import PictureFiles, look_at, panel, save_pictures

    files = None if terminal else PictureFiles.at(out or run)
    seen = look_at(task.load(run, device=device), sentences, _say)
    if files is None:
        print("\n\n".join(_printed(panel(*one), scale) for one in seen))
        return
    for path in save_pictures(seen, files, title=f"What {run.resolve().name} attended to", scale=scale):
        print(path)


def _printed(shown: "Panel", scale: str) -> str:
    from regard.views.labels import printable
    from regard.views.terminal import map_text

    text = map_text(shown.weights, shown.rows, shown.columns, scale=scale)
    return f"{printable(shown.title).replace('␣', ' ')}\n{text}"


def _say(line: str) -> None:
    print(f"regard: {line}", file=sys.stderr)
