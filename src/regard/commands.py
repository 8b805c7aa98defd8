"""The commands of `regard`: each takes what was asked for, and prints what was found."""

import json
import os
import sys
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro

from regard.errors import ArgumentError
from regard.exports import Format, export_run
from regard.tasks.config import TranslationConfig
from regard.tasks.demo import DemoResult, run_demo
from regard.tasks.pictures import save_pictures
from regard.tasks.run_folder import RunFolder
from regard.tasks.translation import train as train_translator
from regard.tasks.translator import TASK, WINDOW_LINES, Translation, Translator
from regard.text.lines import STANDARD_INPUT, read_lines
from regard.text.pairs import read_pairs
from regard.training.interrupts import TrainingInterrupted

Settings = Annotated[TranslationConfig, tyro.conf.arg(name="")]
Run = tyro.conf.Positional[Path]


def train_command(arguments: Sequence[str]) -> Callable[..., None]:
    """The command `train`; its defaults are the settings of the run that is resumed, if one is."""
    defaults = _settings_to_resume(arguments)

    def train(config: Settings = defaults, *, resume: bool = False, overwrite: bool = False) -> None:
        """Train a translator on your own text.

        Args:
            config: what to train.
            resume: go on with the run in --out; settings that are not given stay as they were.
            overwrite: replace the run in --out.
        """
        if resume and overwrite:
            raise ArgumentError("--resume goes on with a run and --overwrite replaces it: give one of them")
        try:
            train_translator(config, resume=resume, overwrite=overwrite, progress=sys.stderr)
        except TrainingInterrupted as stop:
            stop.add_note(f"go on with: regard train --out {config.out} --resume")
            raise
        if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
            print(f"the best model is in {config.out}: regard translate {config.out}", file=sys.stderr)

    return train


def translate(
    run: Run,
    sentence: tyro.conf.Positional[str | None] = None,
    /,
    *,
    input: Path | None = None,
    beam: int = 5,
    nbest: int = 1,
    alignments: bool = False,
    device: str = "auto",
) -> None:
    """Translate a sentence, a file, or standard input, a line each.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        sentence: what to translate; without it, --input or standard input is read.
        input: a file of one sentence a line; may be gzipped.
        beam: hypotheses kept while searching; 1 takes the most probable token each time.
        nbest: translations of each sentence; above 1, each is printed after its line's number and its score.
        alignments: print JSON: tokens, scores, and what each token looked at among the source's.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if sentence is not None and input is not None:
        raise ArgumentError("a sentence and --input were both given: give one of them")
    translator = Translator.load(run, device=device)
    lines = [sentence] if sentence is not None else read_lines(input or STANDARD_INPUT)
    typed = sentence is None and input is None and sys.stdin.isatty()
    found = translator.translate(
        lines,
        beam_size=beam,
        num_best=nbest,
        alignments=alignments,
        window_lines=1 if typed else WINDOW_LINES,
    )
    show = _as_json if alignments else _as_table if nbest > 1 else _as_text
    for number, translation in enumerate(found, start=1):
        print(show(number, translation), flush=typed)


def evaluate(run: Run, /, *, data: tuple[Path, ...], beam: int = 5, device: str = "auto") -> None:
    """Score a run's translations of a test set: BLEU, chrF, exact match and loss.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        data: the test set: one file of two tab-separated columns or JSON lines, or two aligned files.
        beam: hypotheses kept while searching.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    translator = Translator.load(run, device=device)
    found = translator.evaluate(read_pairs(list(data)), beam_size=beam)
    print(f"pairs\t{found.pairs}")
    print(f"BLEU\t{found.bleu.value:.2f}\t{found.bleu.signature}")
    print(f"chrF\t{found.chrf.value:.2f}\t{found.chrf.signature}")
    print(f"exact match\t{found.exact_match:.2f}\tpercent")
    print(f"loss\t{found.loss:.4f}\tnats a token")


def view(
    run: Run, sentences: tyro.conf.Positional[tuple[str, ...]], /, *, out: Path | None = None, device: str = "auto"
) -> None:
    """Draw what a run attends to: attention.png (alignments) and attention.html (every layer and head).

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        sentences: what to translate and draw.
        out: folder for the two files; the run folder unless given.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if not sentences:
        raise ArgumentError("there is no sentence to draw: give one or more")
    translator = Translator.load(run, device=device)
    for path in save_pictures(translator, sentences, out or run, title=f"What {run.resolve().name} attended to"):
        print(path)


def demo(*, out: Path = Path("demo"), seed: int = 0, device: str = "auto") -> None:
    """Learn to read dates in 25 languages, before your eyes, and show what was looked at.

    Args:
        out: folder for the data, the run and the pictures.
        seed: everything random follows from it.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    # Matrices this small gain little from a second thread, and a busy neighbour makes waiting for it cost sevenfold.
    torch.set_num_threads(1)
    result = run_demo(out, seed=seed, device=device, progress=sys.stderr)
    _print_demo(result)


def export(run: Run, /, *, to: Format, out: Path) -> None:
    """Write a run's translator for another runtime: Hugging Face transformers, CTranslate2 or ONNX.

    Args:
        run: the folder that `regard train` made.
        to: whose format.
        out: a folder to make.
    """
    for path in export_run(run, to=to, out=out):
        print(path)


COMMANDS = (translate, evaluate, view, export, demo)


def _settings_to_resume(arguments: Sequence[str]) -> Any:
    """The settings of the run in --out if --resume is asked for, so that only changes need be given."""
    given = [argument.replace("_", "-", 1) if argument.startswith("--") else argument for argument in arguments]
    folder = next((value for name, value in pairwise(given) if name == "--out"), None)
    folder = next((value.removeprefix("--out=") for value in given if value.startswith("--out=")), folder)
    if "train" not in given[:1] or "--resume" not in given or folder is None:
        return tyro.MISSING_NONPROP
    return RunFolder(Path(folder)).read_config(TASK, TranslationConfig)


def _as_text(_number: int, translation: Translation) -> str:
    return _one_line(translation.text)


def _as_table(number: int, translation: Translation) -> str:
    return "\n".join(f"{number}\t{one.score:.4f}\t{_one_line(one.text)}" for one in translation.candidates)


def _as_json(_number: int, translation: Translation) -> str:
    candidates = [
        {
            "text": one.text,
            "score": round(one.score, 4),
            "tokens": one.labels,
            "alignment": []
            if one.alignment is None
            else [[round(w, 4) for w in row] for row in one.alignment.tolist()],
        }
        for one in translation.candidates
    ]
    return json.dumps({"source": translation.source_labels, "translations": candidates}, ensure_ascii=False)


def _rounded(rows: list[list[float]]) -> list[list[float]]:
    return [[round(weight, 4) for weight in row] for row in rows]


def _one_line(text: str) -> str:
    """A model may write a line break; the lines of the output are those of the input."""
    return " ".join(text.splitlines())


def _print_demo(result: DemoResult) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("held-out date", "answer", "", title=f"{len(result.shown)} dates that were never seen in training")
    for pair, answer in result.shown:
        table.add_row(pair.source, answer, "✓" if answer == pair.target else f"✗ {pair.target}")
    console = Console(file=sys.stdout, highlight=False)
    console.print(table)
    console.print(f"exact match on {result.held_out:,} held-out dates: {result.exact_match:.2f} %")
    for path in result.files:
        console.print(str(path), soft_wrap=True)
