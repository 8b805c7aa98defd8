"""The commands of `regard`: each takes what was asked for, and prints what was found."""

import json
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, fields, replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Literal, cast

import torch
import tyro

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.exports import ExportFormat, export_run
from regard.generation.filters import Filter, MinP, RepetitionPenalty, Temperature, TopK, TopP
from regard.models.sizes import Size
from regard.tasks.demo import DemoResult, run_demo
from regard.tasks.language_modelling.causal import LanguageModel
from regard.tasks.language_modelling.masked import MaskedLanguageModel
from regard.tasks.pictures.save import save_pictures
from regard.tasks.registry import TASKS, Task, TaskName, task_of
from regard.tasks.runs.choose_checkpoint import choose_checkpoint as choose_model
from regard.tasks.runs.run_folder import RunFolder
from regard.tasks.runs.serialisation import from_plain, to_plain
from regard.tasks.runs.toml import read_toml
from regard.tasks.translation import translator as translators
from regard.tasks.translation.alignments import AlignmentOf
from regard.tasks.translation.bulk.lines import Gate, Work, answered, count_lines, sentence_and_prefix, whole_line
from regard.tasks.translation.bulk.progress import counting
from regard.tasks.translation.bulk.resumable_output import Unfinished, opened
from regard.tasks.translation.bulk.worker_pool import sharing, workers_for
from regard.tasks.translation.options import Options
from regard.tasks.translation.results import Translation
from regard.tasks.translation.translator import WINDOW_LINES, Translator
from regard.text.lines import STANDARD_INPUT, BadLines, Line, StrPath, raw_lines, read_lines
from regard.text.pairs import is_json_lines, read_pairs
from regard.text.references import read_judged, read_references
from regard.training.distributed.devices import Precision

Run = tyro.conf.Positional[Path]
Mean = Literal["mean"]
USES = {
    translators.TASK: "regard translate {}",
    "language-model": 'regard generate {} "a prompt"',
    "masked-language-model": 'regard view {} "a sentence"',
}


def train_command(arguments: Sequence[str]) -> Callable[..., None]:
    """The command `train`: its flags are the settings of the task that the arguments name.

    Their defaults are those of the run that is resumed, of the file that --config names, or the task's own.
    """
    name, defaults = _task_and_defaults(arguments)
    chosen, named = TASKS[name], cast(TaskName, name)

    def train(
        settings: Any = defaults,
        *,
        task: TaskName = named,
        size: Size | None = None,
        config: Path | None = None,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        """Train a model on your own text: a translator, or with --task a language model.

        Args:
            settings: what to train.
            task: what the model learns; `regard train --task language-model --help` shows that task's settings.
            size: a model of the size that a paper names so; flags for its parts go before it.
            config: a TOML file of settings, such as run.toml in a run folder; flags go before it.
            resume: go on with the run in --out, or begin it if there is none; settings that are not given stay as
                they were.
            overwrite: replace the run in --out, once the new data have been read.
        """
        if resume and overwrite:
            raise ArgumentError("--resume goes on with a run and --overwrite replaces it: give one of them")
        try:
            chosen.run(settings, resume=resume, overwrite=overwrite, progress=sys.stderr)
        except KeyboardInterrupt as stop:
            if RunFolder(settings.out).holds_a_run():
                stop.add_note(f"go on with: regard train --out {settings.out} --resume")
            raise
        if os.environ.get("RANK", "0") == "0":  # one rank speaks for all
            print(f"the best model is in {settings.out}: {USES[name].format(settings.out)}", file=sys.stderr)

    train.__annotations__["settings"] = Annotated[chosen.config, tyro.conf.arg(name="")]
    return train


def translate(
    run: Run,
    sentence: tyro.conf.Positional[str | None] = None,
    /,
    *,
    input: Path | None = None,
    output: Path | None = None,
    resume: bool = False,
    overwrite: bool = False,
    bad_lines: BadLines = "stop",
    beam: int = 5,
    nbest: int = 1,
    length_penalty: float = 1.0,
    alignments: bool = False,
    alignment_layer: int | Mean = -1,
    alignment_head: int | Mean = "mean",
    copy_unknown: bool = False,
    prefix: str = "",
    prefix_column: bool = False,
    vocabulary: Path | None = None,
    device: str = "auto",
    precision: Precision = "float32",
    workers: int | None = None,
) -> None:
    """Translate a sentence, a file, or standard input, a line each.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        sentence: what to translate; without it, --input or standard input is read.
        input: a file of one sentence a line; may be gzipped.
        output: a file to write to, instead of standard output; it has that name once it is whole.
        resume: go on with an --output that was interrupted.
        overwrite: replace --output if it is there.
        bad_lines: whether a line that cannot be read or is too long ends the work, or is answered by an empty line.
        beam: hypotheses kept while searching; 1 takes the most probable token each time.
        nbest: translations of each sentence; above 1, each is printed after its line's number and its score.
        length_penalty: of beam search: above 1 favours longer translations, below 1 shorter ones.
        alignments: print JSON: tokens, scores, and what each token looked at among the source's.
        alignment_layer: the decoder's layer whose attention that is, from 0, or from -1 backwards; or mean.
        alignment_head: the head in it, or mean.
        copy_unknown: print the source's word that is looked at most for each word outside the vocabulary.
        prefix: what every translation must begin with.
        prefix_column: what each translation must begin with stands in its line, after the sentence and a tab.
        vocabulary: a file of words or sentences; translations are made of their tokens alone.
        device: auto, cpu, cuda, cuda:N or mps.
        precision: float32, bf16, or bf16 where the processor multiplies it faster (auto).
        workers: processes of one thread each that share the work on the CPU; unless given, one for each core where
            --input has many lines.
    """
    align = AlignmentOf(layer=_or_none(alignment_layer), head=_or_none(alignment_head))
    chosen = align != AlignmentOf()
    _refuse(
        (sentence is not None and input is not None, "a sentence and --input were both given: give one of them"),
        (sentence is not None and output is not None, "--output is for many lines: give --input, not a sentence"),
        (output is None and (resume or overwrite), "--resume and --overwrite are for a file: give --output"),
        (resume and overwrite, "--resume goes on with a file and --overwrite replaces it: give one of them"),
        (bool(prefix) and prefix_column, "--prefix and --prefix-column were both given: give one of them"),
        (
            chosen and not (alignments or copy_unknown),
            "--alignment-layer and --alignment-head go with --alignments or --copy-unknown",
        ),
        (_are_same(input, output), f"--input and --output are both {input}: name another --output"),
    )
    translator = Translator.load(run, device=device, precision=precision)
    asked = Options(
        beam_size=beam,
        num_best=nbest,
        length_penalty=length_penalty,
        alignments=align if alignments or chosen else None,
        copy_unknown=copy_unknown,
        vocabulary=None if vocabulary is None else translator.vocabulary(read_lines(vocabulary)),
    )
    typed = sentence is None and input is None and output is None and sys.stdin.isatty()
    lines = raw_lines(input or STANDARD_INPUT)
    if sentence is not None:
        lines = iter([Line("the sentence", os.fsencode(sentence))])
    parse = sentence_and_prefix if prefix_column else partial(whole_line, prefix=prefix)
    windows = answered(translator, lines, asked, parse=parse, window_lines=1 if typed else WINDOW_LINES)
    work = Work(lines, windows, _as_json if alignments else _as_table if nbest > 1 else _as_text, Gate(bad_lines))
    with sharing(translator, run, workers_for(input, workers, translator.device)):
        if output is None:
            work.print(sys.stdout, flush=typed)
        else:
            form = {"json": alignments, "prefix": prefix, "prefix-column": prefix_column, "window": WINDOW_LINES}
            form["precision"] = precision
            settings = {"model": translator.fingerprint(), **asked.settings(), **form}
            with opened(output, settings, resume=resume, overwrite=overwrite) as unfinished:
                _finish(work, unfinished, input)
    if work.gate.skipped:
        print(f"bad lines left empty: {work.gate.skipped:,}; the first: {work.gate.first}", file=sys.stderr)


def _finish(work: Work, unfinished: Unfinished | None, input: Path | None) -> None:
    """Write a file of translations to its end, and show how far it has come."""
    if unfinished is None:
        print("the file is whole: there is nothing left to do", file=sys.stderr)
        return
    unfinished.pass_over(work.lines)
    if unfinished.lines:
        print(f"going on after line {unfinished.lines:,}", file=sys.stderr)
    total = count_lines(input) if input is not None and input.is_file() and sys.stderr.isatty() else None
    try:
        with counting(sys.stderr, total=total, done=unfinished.lines) as tell:
            work.finish(unfinished, tell)
    except (KeyboardInterrupt, DataError, OSError) as stop:
        stop.add_note(f"{unfinished.lines:,} lines are kept: go on with the same command and --resume")
        raise


def generate(
    run: Run,
    prompt: tyro.conf.Positional[str] = "",
    /,
    *,
    max_tokens: int = 200,
    samples: int = 1,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    repetition_penalty: float = 1.0,
    stop: tuple[str, ...] = (),
    seed: int = 0,
    device: str = "auto",
) -> None:
    """Let a language model write on after a prompt; what it writes is printed as it comes.

    Args:
        run: the folder that `regard train --task language-model` made, or GPT-2's or Llama's in Hugging Face's format.
        prompt: what the text begins with; printed too.
        max_tokens: the most tokens to write.
        samples: how many texts to write; several are drawn together and printed when whole, --- between them.
        temperature: below 1 the likely becomes likelier; 0 takes the most probable token each time.
        top_k: draw from so many most probable tokens; 0 from all.
        top_p: draw from the fewest most probable tokens that come to this probability.
        min_p: draw from tokens at least so many times as probable as the most probable one.
        repetition_penalty: above 1, tokens that the text has already become less likely.
        stop: strings at which the text ends, before them.
        seed: everything random follows from it.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if samples < 1:
        raise ArgumentError(f"samples must be at least 1, got {samples}")
    filters = _filters(temperature, top_k, top_p, min_p, repetition_penalty)
    writer = LanguageModel.load(run, device=device)
    limits: dict[str, Any] = {"max_tokens": max_tokens, "filters": filters, "stop": stop, "seed": seed}
    if samples > 1:
        for number, text in enumerate(writer.samples(prompt, count=samples, **limits)):
            print(*(["---"] if number else []), prompt + text, sep="\n", flush=True)
        return
    sys.stdout.write(prompt)
    for piece in writer.generate(prompt, **limits):
        sys.stdout.write(piece)
        sys.stdout.flush()
    print(flush=True)


def evaluate(
    run: Run,
    /,
    *,
    data: tuple[Path, ...],
    references: tuple[Path, ...] = (),
    beam: int | None = None,
    length_penalty: float | None = None,
    stride: int | None = None,
    device: str = "auto",
) -> None:
    """Score a run on a test set.

    A translator: BLEU, chrF, exact match and loss. A language model: loss, perplexity and bits per byte. A masked
    language model: loss and accuracy on masked tokens, and pseudo-perplexity.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        data: the test set: pairs (one file of two tab-separated columns or JSON lines, or two aligned files), or text.
        references: translation: files of reference translations, one a set, for --data, which is then sources alone.
        beam: translation: hypotheses kept while searching; 5 unless given.
        length_penalty: translation: above 1 favours longer translations, below 1 shorter ones; 1 unless given.
        stride: language model: tokens that each block predicts, the others being context; half a block unless given.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    model = task_of(run).load(run, device=device)
    given = (
        ("--beam", beam, Translator),
        ("--length-penalty", length_penalty, Translator),
        ("--stride", stride, LanguageModel),
        ("--references", references or None, Translator),
    )
    for flag, value, kind in given:
        if value is not None and not isinstance(model, kind):
            raise ArgumentError(f"{flag} is not for a run of the task {RunFolder(run).task()}: leave it out")
    match model:
        case Translator():
            how = {"beam_size": beam, "length_penalty": length_penalty}
            how = {name: value for name, value in how.items() if value is not None}
            _print_table(_translation_scores(model, data, references, how))
        case LanguageModel():
            found = model.evaluate(_lines(data), stride=stride)
            _print_table(
                [
                    ("tokens", str(found.tokens)),
                    ("loss", f"{found.loss:.4f}", "nats a token"),
                    ("perplexity", f"{found.perplexity:.3f}", "a token"),
                    ("bits per byte", f"{found.bits_per_byte:.4f}", f"{found.text_bytes} bytes"),
                ]
            )
        case MaskedLanguageModel():
            filled = model.evaluate(_lines(data))
            _print_table(
                [
                    ("loss", f"{filled.loss:.4f}", "nats a masked token"),
                    ("masked accuracy", f"{filled.accuracy:.2f}", f"percent of {filled.masked} masked tokens"),
                    ("pseudo-perplexity", f"{filled.pseudo_perplexity:.3f}", f"{filled.singly} tokens masked singly"),
                ]
            )


def score(run: Run, /, *, data: tuple[Path, ...] = (), device: str = "auto") -> None:
    """Print the log-probability of each pair or line, in nats, and how many tokens it is the sum of.

    A translator: of the target given the source, end mark included. A language model: of the line. A masked language
    model: its pseudo-log-likelihood, the sum over tokens that are masked one at a time.

    Args:
        run: the folder that `regard train` made.
        data: pairs or lines, in the forms that `evaluate` takes; standard input unless given.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    model = task_of(run).load(run, device=device)
    paths: Sequence[StrPath] = data or (STANDARD_INPUT,)
    found = model.score(read_pairs(list(paths))) if isinstance(model, Translator) else model.score(_lines(paths))
    for likelihood in found:
        print(f"{likelihood.log_probability:.4f}\t{likelihood.tokens}")


def choose(run: Run, /, *, by: Literal["loss", "bleu"] = "loss", beam: int = 5, device: str = "auto") -> None:
    """Score the models that a run kept (--keep) and means of them on its validation data; the winner becomes its best.

    The best model by training stays in the run folder as `trained`.

    Args:
        run: the folder that `regard train` made.
        by: the lowest loss, or for translators the highest BLEU.
        beam: hypotheses of the search for BLEU.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    candidates = choose_model(run, by=by, beam_size=beam, device=device)
    rows = [(one.name, *(f"{name} {value:.4f}" for name, value in one.metrics.items())) for one in candidates]
    _print_table(rows)
    print(f"the best model of {run} is now: {candidates[0].name}", file=sys.stderr)


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
    model = task_of(run).load(run, device=device)
    for path in save_pictures(model, sentences, out or run, title=f"What {run.resolve().name} attended to"):
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


def export(run: Run, /, *, to: ExportFormat, out: Path) -> None:
    """Write a run's translator for another runtime: Hugging Face transformers, CTranslate2 or ONNX.

    Args:
        run: the folder that `regard train` made.
        to: whose format.
        out: a folder to make.
    """
    for path in export_run(run, to=to, out=out):
        print(path)


COMMANDS = (translate, generate, evaluate, score, choose, view, export, demo)


def _task_and_defaults(arguments: Sequence[str]) -> tuple[str, Any]:
    """The task that `train` is for, and its settings before any flag.

    Those of the run in --out if --resume is asked for, so that only changes need be given; or those of --config.
    """
    if "train" not in arguments[:1]:
        return translators.TASK, tyro.MISSING_NONPROP
    given = _given(arguments, "--task", "--out", "--config", "--size", "--data")
    settings: dict[str, Any] = {}
    source, in_file = Path(given.get("--config", "")), None
    if "--config" in given:
        in_file, settings = read_toml(source)
    run = RunFolder(Path(given.get("--out", "")))
    if "--resume" in arguments and "--out" in given and (run.holds_a_run() or not {"--data", "--config"} & set(given)):
        name = _known_task(given.get("--task") or in_file or run.task())
        saved = run.read_config(name, TASKS[name].config)
        return name, _sized(TASKS[name], _changed(saved, settings, source), given.get("--size"))
    if in_file is not None and given.get("--task", in_file) != in_file:
        raise ArgumentError(f"{source} is for the task {in_file!r}, and --task says {given['--task']!r}")
    name = _known_task(given.get("--task") or in_file or translators.TASK)
    defaults = _with_holes(TASKS[name], settings, source)
    return name, _sized(TASKS[name], defaults, given.get("--size"))


def _given(arguments: Sequence[str], *names: str) -> dict[str, str]:
    """The values of some flags, read before the flags that depend on them are known."""
    found = {name: value for name, value in pairwise(arguments) if name in names}
    with_sign = (argument.split("=", 1) for argument in arguments if "=" in argument)
    return found | {name: value for name, value in with_sign if name in names}


def _known_task(name: Any) -> str:
    if name not in TASKS:
        raise ArgumentError(f"the task must be one of {', '.join(TASKS)}, got {name!r}")
    return str(name)


def _with_holes(task: Task, settings: dict[str, Any], source: Path) -> Any:
    """Settings from a file, in which those that it lacks and that have no default are asked of the command line."""
    required = {field.name for field in fields(task.config) if MISSING is field.default is field.default_factory}
    holes = required - set(settings)
    placeholders: dict[str, Any] = {"data": [], "out": ""}
    try:
        config = from_plain(task.config, settings | {name: placeholders[name] for name in holes}, source=source)
    except RunFolderError as error:
        raise ArgumentError(str(error)) from None
    return replace(config, **dict.fromkeys(holes, tyro.MISSING))


def _changed(config: Any, settings: dict[str, Any], source: Path) -> Any:
    """Settings with those of a file in their place."""
    return from_plain(type(config), to_plain(config) | settings, source=source) if settings else config


def _sized(task: Task, config: Any, size: str | None) -> Any:
    if size is None:
        return config
    if size not in task.sizes:
        raise ArgumentError(f"the size must be one of {', '.join(task.sizes)}, got {size!r}")
    return task.sized(config, cast(Size, size))


def _or_none(chosen: int | Mean) -> int | None:
    return None if chosen == "mean" else chosen


def _refuse(*wrongs: tuple[bool, str]) -> None:
    """Say the first thing that is wrong."""
    for is_wrong, message in wrongs:
        if is_wrong:
            raise ArgumentError(message)


def _are_same(input: Path | None, output: Path | None) -> bool:
    return input is not None and output is not None and input.exists() and output.exists() and input.samefile(output)


def _lines(paths: Sequence[StrPath]) -> Iterable[str]:
    return (line for path in paths for line in read_lines(path))


def _filters(temperature: float, top_k: int, top_p: float, min_p: float, repetition_penalty: float) -> list[Filter]:
    """Those that were asked for, in the order in which they are applied."""
    filters: list[Filter] = []
    if repetition_penalty != 1.0:
        filters.append(RepetitionPenalty(repetition_penalty))
    if temperature == 0.0:
        return [*filters, TopK(1)]
    if temperature != 1.0:
        filters.append(Temperature(temperature))
    if top_k:
        filters.append(TopK(top_k))
    if top_p != 1.0:
        filters.append(TopP(top_p))
    if min_p:
        filters.append(MinP(min_p))
    return filters


def _translation_scores(
    model: Translator, data: tuple[Path, ...], references: tuple[Path, ...], how: dict[str, Any]
) -> list[tuple[str, ...]]:
    if references and len(data) != 1:
        raise ArgumentError(f"with --references, --data is one file of sources, got {len(data)}")
    found = model.evaluate(_judged(data, references), **how)
    return [
        ("pairs", str(found.pairs)),
        ("BLEU", f"{found.bleu.value:.2f}", found.bleu.signature),
        ("chrF", f"{found.chrf.value:.2f}", found.chrf.signature),
        ("exact match", f"{found.exact_match:.2f}", "percent"),
        ("loss", f"{found.loss:.4f}", "nats a token"),
    ]


def _judged(data: Sequence[Path], references: Sequence[Path]) -> Iterable[tuple[str, str | Sequence[str]]]:
    """Sources and their references, in the forms that there are."""
    if references:
        return read_references(data[0], references)
    if len(data) == 1 and is_json_lines(data[0]):
        return read_judged(data[0])
    return read_pairs(list(data))


def _print_table(rows: Iterable[tuple[str, ...]]) -> None:
    for row in rows:
        print("\t".join(row))


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
