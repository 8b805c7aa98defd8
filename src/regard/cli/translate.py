"""`regard translate`: translate a sentence, a file, or standard input."""

import json
import os
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import tyro

from regard.cli.engines import OWN, EngineFlags
from regard.cli.interpret import interpret, policy_of, refuse_policy, words_of
from regard.cli.loading import loading
from regard.cli.ranking import Ranking
from regard.cli.shared import Mean, Run, alignment_of, refuse_first, require_task
from regard.tasks.exports.formats import Engine, SearchPrecision
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.lines import STANDARD_INPUT, BadLines, Line, raw_lines, read_lines

if TYPE_CHECKING:
    from regard.tasks.translation.results import Candidate, Translation


def translate(
    run: Run,
    sentence: tyro.conf.Positional[str | None] = None,
    /,
    *,
    input: Path | None = None,
    output: Path | None = None,
    ensemble: tuple[Path, ...] = (),
    memory: tuple[Path, ...] = (),
    resume: bool = False,
    overwrite: bool = False,
    bad_lines: BadLines = "stop",
    beam: int | None = None,
    nbest: int = 1,
    length_penalty: float | None = None,
    length_reward: float | None = None,
    reverse: Path | None = None,
    reverse_weight: float | None = None,
    alignments: bool = False,
    alignment_layer: int | Mean | None = None,
    alignment_head: int | Mean | None = None,
    confidence: bool = False,
    keep_tags: bool = False,
    terms: Path | None = None,
    copy_unknown: bool = False,
    prefix: str = "",
    prefix_column: bool = False,
    vocabulary: Path | None = None,
    max_length: int | None = None,
    device: str = "auto",
    engine: Engine | None = None,
    precision: SearchPrecision | None = None,
    workers: int | None = None,
    verbose: bool = False,
    simultaneous: bool = False,
    frames: int | None = None,
    wait_k: int | None = None,
) -> None:
    """Translate a sentence, or each line of a file or of standard input.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        sentence: what to translate; without it, --input or standard input is read.
        input: a file with one sentence on each line; may be gzipped.
        output: a file to write to, instead of standard output; it has that name once it is whole.
        ensemble: other runs with the same tokenizers, whose models translate together with `run`, by the mean of their
            probabilities; alignments are those of `run`.
        memory: files of `regard remember`, one for `run` or for each run of the ensemble: at each step the most similar
            places of the text that they hold vote for the next token.
        resume: go on with an --output that was interrupted.
        overwrite: replace --output if it is there.
        bad_lines: whether a line that cannot be read or is too long ends the work or is answered by an empty line.
        beam: hypotheses kept while searching, 5 unless given; 1 takes the most probable token each time.
        nbest: translations of each sentence; above 1, each is printed after its line's number and its score.
        length_penalty: in beam search, above 1 favours longer translations, below 1 shorter ones; 1 unless given, and 0
            with --length-reward or --reverse.
        length_reward: in beam search, what each token adds to the log-probability of a translation, in nats; none
            unless given, and 0.4 with --reverse. `regard tune` finds the best.
        reverse: a translator of the other direction: how probable it finds the source, given a translation, counts in
            the choice among those of the beam.
        reverse_weight: how much that counts; 0.3 unless given, and `regard tune` finds the best.
        alignments: print JSON: tokens, scores, and how much each token attended to each token of the source.
        alignment_layer: the decoder layer whose attention that is, from 0, or from -1 backwards; or mean. Unless given,
            that of the head that was taught to align (--alignment-data of `train`), or the last.
        alignment_head: the head in that layer, or mean.
        confidence: print JSON: the probability of each token, the entropy of its attention, the attention that each
            token of the source got, and source words that were perhaps left untranslated.
        keep_tags: put the tags (<b>) and placeholders ({name}, %s) of the source back where they belong.
        terms: a file with a term of the source, a tab and its translation on each line: it stands in translations where
            the term is translated.
        copy_unknown: for each word outside the vocabulary, print the source word that it attends to most.
        prefix: what every translation must begin with.
        prefix_column: each line has a sentence, a tab, and what its translation must begin with.
        vocabulary: a file of words or sentences; translations contain their tokens alone.
        max_length: the most tokens of a line, beyond which it is a bad line; by default as many as the longest
            sentence had in training.
        device: auto, cpu, cuda, cuda:N or mps.
        engine: who searches: regard, or ctranslate2 by the run's own export, which is made once and kept in the run.
            Unless given, ctranslate2 where it is installed and can, and a line on standard error says where it cannot.
        precision: float32 unless given, or int8, which is CTranslate2's: faster, and near ties fall otherwise.
        workers: threads of CTranslate2, each with a batch of its own; unless given, one for each core.
        verbose: with CTranslate2, say on standard error at the end how it searched.
        simultaneous: translate words as they come, and print each word as soon as it is safe.
        frames: with --simultaneous: how many of the newest source words a word must not be aligned with (AlignAtt); 2
            unless given.
        wait_k: with --simultaneous, instead of --frames: read so many words first, then write one for each (wait-k).
    """
    chosen = not (alignment_layer is None and alignment_head is None)
    refuse_policy(simultaneous=simultaneous, frames=frames, wait_k=wait_k)
    for_lines = {
        "--output": output is not None,
        "--resume": resume,
        "--overwrite": overwrite,
        "--beam": beam is not None,
        "--nbest": nbest != 1,
        "--length-penalty": length_penalty is not None,
        "--length-reward": length_reward is not None,
        "--reverse": reverse is not None,
        "--alignments": alignments,
        "--confidence": confidence,
        "--keep-tags": keep_tags,
        "--terms": terms is not None,
        "--copy-unknown": copy_unknown,
        "--prefix": bool(prefix),
        "--prefix-column": prefix_column,
        "--vocabulary": vocabulary is not None,
        "--workers": workers is not None,
    }
    unused = next((flag for flag, is_given in for_lines.items() if is_given), None)
    size = 5 if beam is None else beam
    refuse_first(
        (simultaneous and unused is not None, f"--simultaneous writes word by word, greedily: leave out {unused}"),
        (
            simultaneous and chosen and wait_k is not None,
            "--wait-k looks at no attention: leave out --alignment-layer and --alignment-head",
        ),
        (sentence is not None and input is not None, "a sentence and --input were both given: give one of them"),
        (sentence is not None and output is not None, "--output is for many lines: give --input, not a sentence"),
        (output is None and (resume or overwrite), "--resume and --overwrite are for a file: give --output"),
        (resume and overwrite, "--resume goes on with a file and --overwrite replaces it: give one of them"),
        (terms is not None and vocabulary is not None, "--terms may have words that --vocabulary leaves out: give one"),
        (bool(prefix) and prefix_column, "--prefix and --prefix-column were both given: give one of them"),
        (
            chosen and not (alignments or confidence or keep_tags or terms or copy_unknown or simultaneous),
            "--alignment-layer and --alignment-head go with --alignments, --confidence, --keep-tags, --terms, "
            "--copy-unknown or --simultaneous",
        ),
        (output is not None and not output.absolute().parent.is_dir(), f"--output: there is no folder for {output}"),
        (output is not None and output.is_dir(), f"--output: {output} is a folder; name a file"),
        (
            os.environ.get("WORLD_SIZE", "1") != "1",
            "a file is translated by one process, not by the ranks of torchrun: cut it up (split), and join the "
            "translations (cat)",
        ),
        (_are_same(input, output), f"--input and --output are both {input}: name another --output"),
    )
    refuse_first(
        (size < 1, f"--beam must be at least 1, got {size}"),
        (not 1 <= nbest <= size, f"--nbest must be from 1 to --beam, got {nbest} and {size}"),
        (max_length is not None and max_length < 1, f"--max-length must be at least 1, got {max_length}"),
        (workers is not None and workers < 1, f"--workers must be at least 1, got {workers}"),
        (engine == "regard" and workers is not None, "--workers are threads of CTranslate2: leave out --engine regard"),
    )
    ranking = Ranking(
        length_penalty=length_penalty, length_reward=length_reward, reverse=reverse, reverse_weight=reverse_weight
    )
    ranking.refuse(run, size)
    search = ranking.beam(size, num_best=nbest)
    engine_flags = EngineFlags(
        engine,
        precision,
        {
            "--simultaneous": simultaneous,
            "--ensemble": bool(ensemble),
            "--memory": bool(memory),
            "--vocabulary": vocabulary is not None,
            "--terms": terms is not None,
            **ranking.asked(search),
        },
    )
    for one in (run, *ensemble):
        require_task(one, TRANSLATION)
    require_files(memory, setting="--memory")
    for flag, path in (("--input", input), ("--vocabulary", vocabulary), ("--terms", terms)):
        require_files([] if path is None else [path], setting=flag)
    with loading():
        from regard.cli.whole_file import finish_file
        from regard.tasks.exports.engine import refuse_run
        from regard.tasks.training.distributed.devices import find_device
        from regard.tasks.translation.bulk.lines import (
            BulkTranslation,
            answered,
            sentence_and_prefix,
            whole_line,
        )
        from regard.tasks.translation.options import TranslationOptions
        from regard.tasks.translation.terms import Terms, read_terms
        from regard.tasks.translation.translator import WINDOW_LINES, Translator

    search_by = engine_flags.chosen(find_device(device), partial(refuse_run, run))
    translator = Translator.load(run, device=device, ensemble=ensemble, memories=memory)
    align = alignment_of(alignment_layer, alignment_head, translator.alignment)
    if simultaneous:
        from regard.tasks.translation.simultaneous.interpreter import Interpreter

        interpreter = Interpreter(translator, policy_of(frames, wait_k), align, max_length=max_length)
        with search_by.searching(translator, run):
            interpret(interpreter, words_of(sentence, input), sys.stdout, bad_lines=bad_lines)
        return
    asked = TranslationOptions(
        beam=search,
        alignments=align if alignments or chosen else None,
        copy_unknown=copy_unknown,
        vocabulary=None if vocabulary is None else translator.vocabulary(read_lines(vocabulary)),
        max_length=max_length,
        confidence=confidence,
        keep_tags=keep_tags,
        terms=None if terms is None else Terms(read_terms(terms)),
        reverse=ranking.loaded(device),
        labels=alignments or confidence,
    )
    typed = sentence is None and input is None and output is None and sys.stdin.isatty()
    lines = raw_lines(input or STANDARD_INPUT)
    if sentence is not None:
        lines = iter([Line("the sentence", os.fsencode(sentence))])
    parse = sentence_and_prefix if prefix_column else partial(whole_line, prefix=prefix)
    windows = answered(translator, lines, asked, parse=parse, window_lines=1 if typed else WINDOW_LINES)
    is_json = alignments or confidence
    show = _as_json if is_json else _as_table if nbest > 1 else _as_text
    work = BulkTranslation(lines, windows, show, bad_lines)
    with search_by.searching(translator, run, workers) as searcher:
        if output is None:
            work.print(sys.stdout, flush=typed)
        else:
            form = {"json": is_json, "prefix": prefix, "prefix-column": prefix_column, "window": WINDOW_LINES}
            settings = {"model": translator.fingerprint(), **asked.settings(), **search_by.settings(), **form}
            finish_file(work, output, settings, input=input, resume=resume, overwrite=overwrite)
    if work.bad.lines:
        print(f"bad lines left empty: {work.bad}", file=sys.stderr)
    if work.doubted.lines:
        print(f"lines with words that were perhaps left untranslated: {work.doubted}", file=sys.stderr)
    if verbose and searcher != OWN:
        print(searcher, file=sys.stderr)


def _are_same(input: Path | None, output: Path | None) -> bool:
    return input is not None and output is not None and input.exists() and output.exists() and input.samefile(output)


def _as_text(_number: int, translation: "Translation") -> str:
    return _one_line(translation.text)


def _as_table(number: int, translation: "Translation") -> str:
    return "\n".join(
        f"{number}\t{one.score:.4f}\t{_one_line(one.text)}" + ("" if one.finished else "\tcut off")
        for one in translation.candidates
    )


def _as_json(_number: int, translation: "Translation") -> str:
    candidates = [_candidate_as_json(one) for one in translation.candidates]
    return json.dumps({"source": translation.source_labels, "translations": candidates}, ensure_ascii=False)


def _candidate_as_json(one: "Candidate") -> dict[str, Any]:
    known: dict[str, Any] = {
        "text": one.text,
        "score": round(one.score, 4),
        "finished": one.finished,
        "tokens": one.labels,
        "alignment": [] if one.alignment is None else [_rounded(row) for row in one.alignment.tolist()],
    }
    if one.terms is not None:
        known["terms"] = [
            {"source": term.source, "target": term.target, "tokens": [term.first, term.last]} for term in one.terms
        ]
    if one.confidence is not None:
        probabilities, entropies, coverage, untranslated = one.confidence
        known |= {"probabilities": _rounded(probabilities), "entropies": _rounded(entropies)}
        known |= {"coverage": _rounded(coverage), "untranslated": untranslated}
    return known


def _rounded(numbers: Sequence[float]) -> list[float]:
    return [round(number, 4) for number in numbers]


def _one_line(text: str) -> str:
    """Replace line breaks, which a model may write: each line of the output answers one line of the input."""
    return " ".join(text.splitlines())
