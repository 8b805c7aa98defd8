"""The work of `regard translate`."""

import json
import os
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from regard.cli.engines import OWN, SearchBy
from regard.cli.progress import showing_progress
from regard.cli.shared import alignment_of
from regard.errors import RegardError
from regard.tasks.exports.engine import refuse_run
from regard.tasks.text.lines import STANDARD_INPUT, Line, Lines, form_of
from regard.tasks.training.distributed import find_device
from regard.tasks.translation.bulk import (
    BulkTranslation,
    Unfinished,
    answered,
    as_plain_text,
    one_line,
    opened,
    sentence_and_prefix,
    whole_line,
)
from regard.tasks.translation.results import Candidate, Translation
from regard.tasks.translation.translation_model import TranslationOptions
from regard.tasks.translation.translator import WINDOW_LINES, Translator


def translate(asked: Any) -> None:
    search_by = asked.chosen_search(find_device(asked.device), partial(refuse_run, asked.run))
    translator = Translator.load(asked.run, device=asked.device)
    options = _options(asked)
    translator.check_options(options)  # before the engine exports the model into the run folder
    _translate_lines(asked, translator, options, search_by)


def _options(asked: Any) -> TranslationOptions:
    align = alignment_of(asked.alignment_layer, asked.alignment_head)
    return TranslationOptions(
        beam=asked.search,
        alignments=align if asked.alignments or asked.names_alignment else None,
        copy_unknown=asked.copy_unknown,
        max_length=asked.max_length,
        max_target_length=asked.max_length,
        labels=asked.alignments,
    )


def _translate_lines(asked: Any, translator: Translator, options: TranslationOptions, search_by: SearchBy) -> None:
    typed = not asked.sentences and asked.input is None and asked.output is None and sys.stdin.isatty()
    if asked.sentences:
        lines: Iterator[Line] = (Line(f"sentence {n}", os.fsencode(one)) for n, one in enumerate(asked.sentences, 1))
        format: Any = "text"
    else:
        path = asked.input or STANDARD_INPUT
        lines = Lines(path)
        format = "text" if asked.prefix_column else asked.data_format or form_of(path, ("text", "jsonl"))
    parse = sentence_and_prefix if asked.prefix_column else partial(whole_line, prefix=asked.prefix, format=format)
    windows = answered(translator, lines, options, parse=parse, window_lines=1 if typed else WINDOW_LINES)
    show = as_json if options.labels else as_table if asked.nbest > 1 else as_plain_text
    work = BulkTranslation(lines, windows, show, asked.bad_lines)
    with search_by.searching(translator, asked.run, asked.workers) as searcher:
        if asked.output is None:
            if asked.verbose:
                print(_engine_line(asked, translator, searcher), file=sys.stderr)
            work.print(sys.stdout, flush=typed)
        else:
            form = {"json": options.labels, "prefix": asked.prefix, "prefix-column": asked.prefix_column}
            form |= {} if format == "text" else {"data-format": format}
            settings = {"model": translator.fingerprint(), **options.settings(), **search_by.settings(), **form}
            settings["window"] = WINDOW_LINES
            with opened(asked.output, settings, resume=asked.resume, overwrite=asked.overwrite) as unfinished:
                print(_engine_line(asked, translator, searcher), file=sys.stderr)
                _finish(work, unfinished, asked.input)
    if work.bad.lines:
        print(f"bad lines left empty: {work.bad}", file=sys.stderr)
    if work.cut_off.lines:
        print(f"translations cut off by the limit of their tokens: {work.cut_off}; raise --max-length", file=sys.stderr)
    if work.unknown.lines:
        print(f"lines with text that the vocabulary lacks, read as unknown: {work.unknown}", file=sys.stderr)


def _engine_line(asked: Any, translator: Translator, searcher: str) -> str:
    if searcher != OWN:
        return f"{searcher} ({'--engine' if asked.engine else 'it is installed'})"
    why = "--engine" if asked.engine else "CTranslate2 is not installed or cannot"
    return f"regard's own search: float32 on {translator.device}, threads: {torch.get_num_threads()} ({why})"


def _finish(work: BulkTranslation, unfinished: Unfinished | None, input: Path | None) -> None:
    if unfinished is None:
        print("the file is whole: there is nothing left to do", file=sys.stderr)
        return
    unfinished.pass_over(work.lines)
    if unfinished.lines:
        print(f"going on after line {unfinished.lines:,}", file=sys.stderr)
    total = sum(1 for _ in Lines(input)) if input is not None and input.is_file() and sys.stderr.isatty() else None
    try:
        with showing_progress() as tell:
            for lines in work.written(unfinished):
                tell("lines translated", lines, total)
    except (KeyboardInterrupt, RegardError, OSError) as stop:
        stop.add_note(f"{unfinished.lines:,} lines are kept: go on with the same command and --resume")
        raise


def as_table(number: int, translation: Translation) -> str:
    return "\n".join(
        f"{number}\t{one.score:.4f}\t{one_line(one.text)}" + ("" if one.finished else "\tcut off")
        for one in translation.candidates
    )


def as_json(_number: int, translation: Translation) -> str:
    candidates = [_candidate_as_json(one) for one in translation.candidates]
    return json.dumps({"source": translation.source_labels, "translations": candidates}, ensure_ascii=False)


def _candidate_as_json(one: Candidate) -> dict[str, Any]:
    return {
        "text": one.text,
        "score": round(one.score, 4),
        "finished": one.finished,
        "tokens": one.labels,
        "alignment": [] if one.alignment is None else [[round(x, 4) for x in row] for row in one.alignment.tolist()],
    }
