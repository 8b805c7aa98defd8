"""`regard view`: draw the attention of a run."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import tyro

from regard.cli.loading import loading
from regard.cli.shared import AnyRun, Command, Device, refuse_first
from regard.tasks.registry import task_name_of, task_of

if TYPE_CHECKING:
    from regard.views.drawing import Panel


@dataclass(frozen=True, slots=True)
class ViewCommand(Command):
    """Draw what a run attends to: attention.png (alignments, or the last layer) and attention.html (all of it).

    A sentence that is empty or too long is left out, and a line on standard error says so.
    """

    run: AnyRun
    sentences: tyro.conf.Positional[tuple[str, ...]]
    """what to translate and draw, or what a language model is to read."""
    _: KW_ONLY
    out: Path | None = None
    """folder for the two files, the run folder unless given; or one file that ends in .png, .svg, .pdf or .html."""
    terminal: bool = False
    """print the maps in place of writing files, in colours, or as plain tables if the output is a pipe or NO_COLOR is
    set."""
    scale: Literal["sqrt", "linear", "log", "row"] = "sqrt"
    """which colour a weight gets in the picture and in the terminal; row: each row by its largest weight."""
    device: Device = "auto"

    def check(self) -> None:
        refuse_first(
            (not self.sentences, "there is no sentence to draw: give one or more"),
            (
                self.terminal and self.out is not None,
                "--terminal prints and writes no file: leave out --out or --terminal",
            ),
        )
        task_of(self.run)

    def work(self) -> None:
        with loading("matplotlib"):
            from regard.tasks.pictures.save import PictureFiles, look_at, panel, save_pictures

        files = None if self.terminal else PictureFiles.at(self.out or self.run)
        seen = look_at(task_of(self.run).load(self.run, device=self.device), self.sentences, _say)
        if files is None:
            print("\n\n".join(_printed(panel(*one), self.scale) for one in seen))
            return
        title = f"Attention of {self.run.resolve().name} ({task_name_of(self.run)})"
        for path in save_pictures(seen, files, title=title, scale=self.scale):
            print(path)


def _printed(shown: "Panel", scale: str) -> str:
    from regard.views.labels import printable
    from regard.views.terminal import map_text

    text = map_text(shown.weights, shown.rows, shown.columns, scale=scale)
    return f"{printable(shown.title).replace('␣', ' ')}\n{text}"


def _say(line: str) -> None:
    print(f"regard: {line}", file=sys.stderr)
