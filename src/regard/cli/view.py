"""`regard view`: draw what a run attends to."""

from pathlib import Path

import tyro

from regard.cli.loading import loading
from regard.cli.shared import Run, refuse_taken_folder
from regard.errors import ArgumentError
from regard.tasks.registry import task_of


def view(
    run: Run, sentences: tyro.conf.Positional[tuple[str, ...]], /, *, out: Path | None = None, device: str = "auto"
) -> None:
    """Draw what a run attends to: attention.png (alignments, or the last layer) and attention.html (all of it).

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        sentences: what to translate and draw, or what a language model is to read.
        out: folder for the two files; the run folder unless given.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if not sentences:
        raise ArgumentError("there is no sentence to draw: give one or more")
    refuse_taken_folder(out)
    task = task_of(run)
    with loading("matplotlib"):
        from regard.tasks.pictures.save import save_pictures

    model = task.load(run, device=device)
    for path in save_pictures(model, sentences, out or run, title=f"What {run.resolve().name} attended to"):
        print(path)
