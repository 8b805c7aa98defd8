"""`regard view`: draw the attention of a run, or of any model that transformers loads."""

import sys
from contextlib import suppress
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import tyro

from regard.cli.loading import loading
from regard.cli.progress import reading
from regard.cli.shared import Command, Device, PositionalPath, refuse_first, say
from regard.errors import DataError
from regard.files.model_folder import OnProgress, check_texts, family_of, is_huggingface
from regard.tasks.registry import task_name_of, task_of
from regard.tasks.viewing.view_input import ViewInput, said_of_unknown

if TYPE_CHECKING:
    from regard.tasks.viewing.foreign_model import ForeignModel
    from regard.tasks.viewing.own_model import OwnModel
    from regard.views.drawing import Panel
    from regard.views.scales import ScaleName

AnyModel = Annotated[
    PositionalPath,
    tyro.conf.arg(help="the folder that `regard train` made, or any that transformers loads, with its weights."),
]


@dataclass(frozen=True, slots=True)
class ViewCommand(Command):
    """Draw what a model attends to: attention.png (alignments, the last layer, or an image) and attention.html (all).

    A run of ours, or any folder that transformers loads: decoders, encoders, encoder-decoders, and models of images and
    sounds. Nothing is downloaded, and no code of the folder is run. A sentence that is empty or too long is left out,
    and a line on standard error says so.
    """

    run: AnyModel
    sentences: tyro.conf.Positional[tuple[str, ...]]
    """the texts to read and draw. A translator translates it, unless --target says what it writes."""
    _: KW_ONLY
    input: Path | None = None
    """a file with one text of any length; - is standard input, which is read too if no other input is given."""
    target: str | None = None
    """the text that an encoder-decoder is to write for one sentence."""
    image: Path | None = None
    """a picture; a sentence beside it is for a model that reads both."""
    audio: Path | None = None
    """a sound, WAV with PCM."""
    tokens: tuple[int, ...] = ()
    """ids of tokens in place of a sentence, such as 5 17 3."""
    ids: Path | None = None
    """a file of numpy (.npy) with such ids."""
    layers: tuple[int, ...] = ()
    """the layers to show, from 0, or from -1 backwards; all unless given."""
    heads: tuple[int, ...] = ()
    """the heads to show, likewise."""
    sequence: int = 0
    """which sequence of the batch that the model makes of an input: a window, a tile of an image."""
    out: Path | None = None
    """folder for the two files, the model's unless given; or one file that ends in .png, .svg, .pdf, .html, or .json
    (the weights as numbers)."""
    terminal: bool = False
    """print the maps, and write no files: in colours, or as plain tables for a pipe and where NO_COLOR is set."""
    scale: Literal["sqrt", "linear", "log", "row"] = "sqrt"
    """which colour a weight gets in the picture and in the terminal; row: each row by its largest weight."""
    device: Device = "auto"

    def check(self) -> None:
        texts = bool(self.sentences) + (self.input is not None)
        others = bool(self.tokens) + (self.ids is not None) + (self.audio is not None)
        given = texts or others or self.image is not None
        refuse_first(
            (
                not given and (sys.stdin.isatty() or not sys.stdin.readable()),
                "there is no sentence to draw: give one or more, or --input, --tokens, --ids, --image or --audio",
            ),
            (texts + others > 1 or (self.image is not None and others > 0), "give one kind of input"),
            (self.target is not None and len(self.sentences) > 1, "--target goes with one sentence"),
            (
                self.terminal and self.out is not None,
                "--terminal prints and writes no file: leave out --out or --terminal",
            ),
            *(
                (not path.is_file(), f"{path} is no {kind} that can be read: there is no such file")
                for path, kind in ((self.image, "picture"), (self.audio, "sound"))
                if path is not None
            ),
        )
        if not is_huggingface(self.run):
            task_of(self.run)
        elif not others and self.image is None:
            check_texts(self.run, "give ids of tokens by --tokens 5 17 or --ids FILE, or --image or --audio")

    def work(self) -> None:
        asked, foreign = self._asked(), is_huggingface(self.run)
        with reading(self.run if foreign else None) as tell:
            with loading("matplotlib", *["transformers"] * foreign):
                from regard.tasks.pictures.save import PictureFiles, look_at, panel, save_pictures
                from regard.tasks.viewing.places import Choice

            files = None if self.terminal else PictureFiles.at(self.out or self.run)
            model = self._model(tell)
        seen = look_at(model, asked, say, choice=Choice(self.layers, self.heads))
        if asked[0].text is not None and model.doubt:
            say(model.doubt)
        if (unknown := model.unknown_id) is not None:
            for number, one in enumerate(asked, 1):
                with suppress(DataError):  # it is told already that this one is not shown
                    tokens = model.tokens(one.text or "")
                    if count := tokens.count(unknown):
                        say(f"sentence {number}: {said_of_unknown(count, len(tokens))}")
        if files is None:
            print("\n\n".join(_printed(panel(*one), self.scale) for one in seen))
            return
        kind = family_of(self.run) if foreign else task_name_of(self.run)
        title = f"Attention of {self.run.resolve().name} ({kind})"
        for path in save_pictures(seen, files, title=title, scale=self.scale):
            print(path)

    def _model(self, tell: OnProgress) -> "ForeignModel | OwnModel":
        from regard.tasks.viewing.foreign_model import ForeignModel
        from regard.tasks.viewing.own_model import OwnModel

        if not is_huggingface(self.run):
            return OwnModel(task_of(self.run).load(self.run, device=self.device), sequence=self.sequence)
        return ForeignModel(self.run, device=self.device, sequence=self.sequence, tell=tell)

    def _asked(self) -> list[ViewInput]:
        from regard.tasks.viewing.view_input import read_ids, read_text

        texts: list[str | None] = [*self.sentences]
        if self.input is not None or not (texts or self.tokens or self.ids or self.image or self.audio):
            texts = [read_text(self.input or "-")]
        tokens = self.tokens or (None if self.ids is None else read_ids(self.ids))
        return [ViewInput(text, tokens or None, self.target, self.image, self.audio) for text in texts or [None]]


def _printed(shown: "Panel", scale: "ScaleName") -> str:
    from regard.views.labels import printable
    from regard.views.terminal import map_text

    text = map_text(shown.weights, shown.rows, shown.columns, scale=scale)
    return f"{printable(shown.title).replace('␣', ' ')}\n{text}"
