"""The ground `text`: a file as people have them is given to one command, which works or refuses it in one line."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import sacrebleu
import torch
from hypothesis import note

from regard.tasks.translation.train import train_translation
from tests.fuzz.commands import Ran, run
from tests.fuzz.drawing import Drawn
from tests.fuzz.text.files import Drawing, draw_file
from tests.tasks.small_runs import small_config

SMALL = (
    *("--size", "tiny", "--steps", "3", "--warmup-steps", "1", "--batch-tokens", "512", "--validate-every", "3"),
    *("--pictures", "0", "--device", "cpu"),
)
LONGEST = 2_000
"""Characters of the longest line on standard error."""


@cache
def _room() -> Path:
    room = Path(tempfile.mkdtemp(prefix="regard-fuzz-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    (room / "translator").mkdir()
    torch.manual_seed(0)
    train_translation(small_config(room / "translator"))
    return room


def case(drawn: Drawn) -> None:
    room = _room()
    folder = room / "files"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    use = drawn.of([_translate, _evaluate, _train_translator, _train_language_model, _view])
    use(drawn, room / "translator" / "run", folder)


def _translate(drawn: Drawn, translator: Path, folder: Path) -> None:
    drawing = _drawn(drawn, folder, 1)
    stopping = drawn.of(["stop", "skip"])
    given: tuple[str | Path, ...] = ("--input", drawing.path, "--beam", "1", "--bad-lines", stopping, *_engine(drawn))
    ran = run("translate", translator, *given, "--device", "cpu")
    _check(ran)
    if ran.status == 0 and drawing.is_plain:
        asked = len(drawing.rows)
        assert ran.out.count("\n") == asked, f"{asked} lines were asked, {ran.out.count(chr(10))} answered"


def _evaluate(drawn: Drawn, translator: Path, folder: Path) -> None:
    drawing = _drawn(drawn, folder, 2)
    given = ("--data", drawing.path, "--device", "cpu", "--bad-lines", drawn.of(["stop", "skip"]))
    evaluated = run("evaluate", translator, *given, "--beam", "1", *_engine(drawn))
    _check(evaluated)
    if evaluated.status:
        return
    figures = dict(line.split("\t")[:2] for line in evaluated.out.splitlines())
    if drawing.is_plain and int(figures["pairs"].replace(",", "")) == len(drawing.rows):
        _compare_bleu(drawing, translator, folder, evaluated.out)


def _compare_bleu(drawing: Drawing, translator: Path, folder: Path, table: str) -> None:
    sources = folder / "sources"
    sources.write_text("".join(source + "\n" for source, _ in drawing.rows), encoding="utf-8")
    ran = run("translate", translator, "--input", sources, "--beam", "1", "--device", "cpu")
    _check(ran)
    assert ran.status == 0, ran.err
    _, figure, signature = next(line for line in table.splitlines() if line.startswith("BLEU")).split("\t")
    tokenizer = next(part for part in signature.split("|") if part.startswith("tok:"))[4:]
    answers = ran.out.removesuffix("\n").split("\n")
    bleu = sacrebleu.corpus_bleu(answers, [[target for _, target in drawing.rows]], tokenize=tokenizer).score
    assert abs(bleu - float(figure)) < 0.006, f"evaluate says BLEU {figure}, its translations have {bleu}"


def _train_translator(drawn: Drawn, translator: Path, folder: Path) -> None:
    _train(drawn, folder, "translation", 2, "translate")


def _train_language_model(drawn: Drawn, translator: Path, folder: Path) -> None:
    _train(drawn, folder, "language-model", 1, "generate", "--block-length", "16")


def _train(drawn: Drawn, folder: Path, task: str, columns: int, use: str, *more: str) -> None:
    drawing, out = _drawn(drawn, folder, columns), folder / "run"
    texts = ("--tokenizer", drawn.of(["bpe", "characters", "words"]), "--bad-lines", drawn.of(["stop", "skip"]))
    ran = run("train", task, "--data", drawing.path, "--out", out, *texts, "--vocab-size", "300", *SMALL, *more)
    _check(ran, is_training=True)
    if ran.status == 0:
        used = run(use, out, "we see", "--device", "cpu")
        _check(used)
        assert used.status == 0, f"the run that was made is refused: {used.err}"
    else:
        assert not out.exists(), f"a refusal leaves {sorted(p.name for p in out.rglob('*'))}"


def _view(drawn: Drawn, translator: Path, folder: Path) -> None:
    drawing = _drawn(drawn, folder, 1)
    sentences = [row[0].replace("\0", "") for row in drawing.rows[:3]]
    sentences = [sentence for sentence in sentences if not sentence.startswith("-")]
    ran = run("view", translator, *sentences, "--out", folder / drawn.of(["a.html", "a.svg"]), "--device", "cpu")
    _check(ran)


def _drawn(drawn: Drawn, folder: Path, columns: int) -> Drawing:
    drawing = draw_file(drawn, folder, columns)
    data = drawing.path.read_bytes()
    note(f"{os.fsencode(drawing.path.name)!r}, {len(data)} bytes: {data[:400]!r}")
    return drawing


def _engine(drawn: Drawn) -> tuple[str, ...]:
    return drawn.of([("--engine", "regard"), ()])


def _check(ran: Ran, *, is_training: bool = False) -> None:
    """Exit status 0, or 2 with one line; a training has lines of progress before it."""
    note(f"status {ran.status}: {ran.err[-600:]}")
    assert ran.status in (0, 2), f"status {ran.status}: {ran.err}"
    assert "Traceback" not in ran.err, ran.err
    assert "Warning" not in ran.err, ran.err
    assert all(len(line) <= LONGEST for line in ran.errors), f"a line of {max(map(len, ran.errors))} characters"
    if ran.status == 2:
        assert ran.errors[-1].startswith("regard: "), ran.err
        assert len(ran.errors) == 1 or is_training, ran.err
