"""`regard evaluate`, `score` and `choose`: how good a run is, and which of its models is best."""

import sys
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from regard.cli.engines import EngineFlags, OwnSearch
from regard.cli.interpret import FRAMES, policy_of, refuse_policy
from regard.cli.loading import loading
from regard.cli.progress import telling
from regard.cli.ranking import Ranking
from regard.cli.shared import Mean, Run, alignment_of, lines_of, print_table, refuse_first, require_task
from regard.errors import ArgumentError
from regard.tasks.exports.formats import Engine, SearchPrecision
from regard.tasks.generation.config import Beam
from regard.tasks.names import LANGUAGE_MODEL, MASKED_LANGUAGE_MODEL, TRANSLATION
from regard.tasks.registry import TASKS, task_name_of, task_of
from regard.tasks.runs.refusals import require_files
from regard.tasks.telling import Tell
from regard.tasks.text.lines import STANDARD_INPUT, StrPath
from regard.tasks.text.pairs import is_json_lines, read_pairs
from regard.tasks.text.references import read_judged, read_references

if TYPE_CHECKING:
    from regard.tasks.translation.alignments import AlignmentOf
    from regard.tasks.translation.reverse import Reverse
    from regard.tasks.translation.simultaneous.interpreter import Interpreter
    from regard.tasks.translation.translator import Translator


def evaluate(
    run: Run,
    /,
    *,
    data: tuple[Path, ...],
    references: tuple[Path, ...] = (),
    ensemble: tuple[Path, ...] = (),
    memory: tuple[Path, ...] = (),
    beam: int | None = None,
    length_penalty: float | None = None,
    length_reward: float | None = None,
    reverse: Path | None = None,
    reverse_weight: float | None = None,
    stride: int | None = None,
    singly: int | None = None,
    simultaneous: bool = False,
    frames: int | None = None,
    wait_k: int | None = None,
    alignment_layer: int | Mean | None = None,
    alignment_head: int | Mean | None = None,
    try_heads: bool = False,
    alignment_data: Path | None = None,
    device: str = "auto",
    engine: Engine | None = None,
    precision: SearchPrecision | None = None,
) -> None:
    """Score a run on a test set.

    The scores of a translator are BLEU, chrF, exact match and loss; of a language model loss, perplexity and bits per
    byte; of a masked language model loss and accuracy on masked tokens, and pseudo-perplexity.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        data: the test set: pairs (one file of two tab-separated columns or JSON lines, or two aligned files), or text.
        references: translation: files of references, one for each set; --data then has the sources alone.
        ensemble: translation: other runs that translate together with `run`, as for `translate`.
        memory: translation: files of `regard remember`, as for `translate`.
        beam: translation: hypotheses kept while searching; 5 unless given.
        length_penalty: translation: above 1 favours longer translations, below 1 shorter ones; as for `translate`.
        length_reward: translation: what each token adds to the score of a translation, as for `translate`.
        reverse: translation: a translator of the other direction, as for `translate`.
        reverse_weight: translation: how much that one counts, as for `translate`.
        stride: language model: tokens that each block predicts; its others are context; half a block unless given.
        singly: masked language model: tokens, evenly spread over the text, that are masked one at a time for the
            pseudo-perplexity, in a forward pass each; at most 250 unless given, and the standard error is printed.
        simultaneous: translation: translate word by word, and say how many source words the translation lags behind.
        frames: with --simultaneous, as for `translate`.
        wait_k: with --simultaneous, as for `translate`.
        alignment_layer: with --simultaneous or --alignment-data: the decoder layer whose attention aligns, or mean.
            Unless given, that of the head that was taught to align (--alignment-data of `train`), or the last.
        alignment_head: the head in that layer, or mean.
        try_heads: translation: compare all layers and heads as the alignment of --simultaneous; for validation pairs.
        alignment_data: translation: a file with the links of words in each pair of --data (`0-0 1-2 3?4`, source and
            target from 0, `?` for possible ones): prints the alignment error rate too.
        device: auto, cpu, cuda, cuda:N or mps.
        engine: translation: who searches, regard or ctranslate2, as for `translate`; the loss is always regard's.
        precision: translation: of the products of CTranslate2, as for `translate`.
    """
    task = task_name_of(run)
    given = (
        ("--beam", beam, TRANSLATION),
        ("--length-penalty", length_penalty, TRANSLATION),
        ("--length-reward", length_reward, TRANSLATION),
        ("--reverse", reverse, TRANSLATION),
        ("--reverse-weight", reverse_weight, TRANSLATION),
        ("--stride", stride, LANGUAGE_MODEL),
        ("--references", references or None, TRANSLATION),
        ("--ensemble", ensemble or None, TRANSLATION),
        ("--memory", memory or None, TRANSLATION),
        ("--singly", singly, MASKED_LANGUAGE_MODEL),
        ("--simultaneous", simultaneous or None, TRANSLATION),
        ("--try-heads", try_heads or None, TRANSLATION),
        ("--alignment-data", alignment_data, TRANSLATION),
        ("--engine", engine, TRANSLATION),
        ("--precision", precision, TRANSLATION),
    )
    for flag, value, kind in given:
        if value is not None and task != kind:
            raise ArgumentError(f"{flag} is not for a run of the task {task}: leave it out")
    interprets = simultaneous or try_heads
    refuse_policy(simultaneous=interprets, frames=frames, wait_k=wait_k)
    names_head = not (alignment_layer is None and alignment_head is None)
    refuse_first(
        (simultaneous and try_heads, "--simultaneous and --try-heads were both given: give one of them"),
        (interprets and beam is not None, "--simultaneous and --try-heads search greedily: leave out --beam"),
        *(
            (interprets and value is not None, f"--simultaneous and --try-heads search greedily: leave out {flag}")
            for flag, value in (
                ("--length-penalty", length_penalty),
                ("--length-reward", length_reward),
                ("--reverse", reverse),
            )
        ),
        (interprets and bool(references), "--simultaneous and --try-heads take one reference: leave out --references"),
        (try_heads and wait_k is not None, "--wait-k looks at no attention: leave out --try-heads"),
        (interprets and alignment_data is not None, "--alignment-data is for whole sentences: leave it out"),
        (
            alignment_data is not None and bool(references),
            "--alignment-data links one target to each source: leave out --references",
        ),
        (
            names_head and (wait_k is not None or not (simultaneous or alignment_data)),
            "--alignment-layer and --alignment-head go with --alignment-data, or with --simultaneous and --frames",
        ),
    )
    if references and len(data) != 1:
        raise ArgumentError(f"with --references, --data is one file of sources, got {len(data)}")
    refuse_first(
        (beam is not None and beam < 1, f"--beam must be at least 1, got {beam}"),
        (stride is not None and stride < 1, f"--stride must be at least 1, got {stride}"),
        (singly is not None and singly < 1, f"--singly must be at least 1, got {singly}"),
    )
    size = Beam().size if beam is None else beam
    ranking = Ranking(
        length_penalty=length_penalty, length_reward=length_reward, reverse=reverse, reverse_weight=reverse_weight
    )
    ranking.refuse(run, size)
    chosen = ranking.beam(size)
    for one in ensemble:
        require_task(one, TRANSLATION)
    require_files(data, setting="--data")
    require_files(references, setting="--references")
    require_files(memory, setting="--memory")
    require_files([] if alignment_data is None else [alignment_data], setting="--alignment-data")
    engine_flags = EngineFlags(
        engine,
        precision,
        {
            "--simultaneous": simultaneous,
            "--try-heads": try_heads,
            "--ensemble": bool(ensemble),
            "--memory": bool(memory),
            **ranking.asked(chosen),
        },
    )
    with loading():
        from regard.tasks.exports.engine import refuse_run
        from regard.tasks.language_modelling.causal import LanguageModel
        from regard.tasks.language_modelling.masked import SINGLE_MASKS, MaskedLanguageModel
        from regard.tasks.training.distributed.devices import find_device
        from regard.tasks.translation.simultaneous.evaluation import ANY_LENGTH
        from regard.tasks.translation.simultaneous.interpreter import Interpreter
        from regard.tasks.translation.translator import Translator

    search_by = (
        engine_flags.chosen(find_device(device), partial(refuse_run, run)) if task == TRANSLATION else OwnSearch()
    )
    together: dict[str, Any] = {"ensemble": ensemble, "memories": memory} if ensemble or memory else {}
    model = Translator.load(run, device=device, **together) if together else TASKS[task].load(run, device=device)
    with telling() as tell:
        match model:
            case Translator() if interprets:
                align = alignment_of(alignment_layer, alignment_head, model.alignment)
                pairs = list(read_pairs(list(data)))
                with search_by.searching(model, run):
                    if try_heads:
                        rows = _tried_heads(model, pairs, FRAMES if frames is None else frames, tell)
                    else:
                        interpreter = Interpreter(model, policy_of(frames, wait_k), align, max_length=ANY_LENGTH)
                        rows = _simultaneous_scores(interpreter, pairs, tell)
            case Translator():
                align = alignment_of(alignment_layer, alignment_head, model.alignment)
                back = ranking.loaded(device)
                aligned = [] if alignment_data is None else [_alignment_row(model, data, alignment_data, align)]
                with search_by.searching(model, run):
                    rows = [*_translation_scores(model, _judged(data, references), chosen, back, tell), *aligned]
            case LanguageModel():
                found = model.evaluate(lines_of(data), stride=stride, tell=tell)
                rows = [
                    ("tokens", str(found.tokens)),
                    ("loss", f"{found.loss:.4f}", "nats a token"),
                    ("perplexity", f"{found.perplexity:.3f}", "a token"),
                    ("bits per byte", f"{found.bits_per_byte:.4f}", f"{found.text_bytes} bytes"),
                ]
            case MaskedLanguageModel():
                row = model.row(lines_of(data))
                filled = model.fill(row, tell=tell)
                print(f"loss\t{filled.loss:.4f}\tnats a masked token")
                print(f"masked accuracy\t{filled.accuracy:.2f}\tpercent of {filled.masked} masked tokens", flush=True)
                most = SINGLE_MASKS if singly is None else singly
                filled = filled.with_singles(model.fill_singly(row, most=most, tell=tell))
                sample = f"{filled.singly} tokens masked singly, standard error {filled.pseudo_perplexity_error:.1%}"
                rows = [("pseudo-perplexity", f"{filled.pseudo_perplexity:.3f}", sample)]
    print_table(rows)


def score(run: Run, /, *, data: tuple[Path, ...] = (), device: str = "auto") -> None:
    """Print the log-probability of each pair or line, in nats, and over how many tokens it is summed.

    For a translator it is that of the target given the source, end mark included; for a language model that of the
    line; for a masked language model the pseudo-log-likelihood, the sum over tokens that are masked one at a time.

    Args:
        run: the folder that `regard train` made.
        data: pairs or lines, in the forms that `evaluate` takes; standard input unless given.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    task = task_of(run)
    require_files(data, setting="--data")
    with loading():
        from regard.tasks.translation.translator import Translator

    model = task.load(run, device=device)
    paths: Sequence[StrPath] = data or (STANDARD_INPUT,)
    found = model.score(read_pairs(list(paths))) if isinstance(model, Translator) else model.score(lines_of(paths))
    for likelihood in found:
        print(f"{likelihood.log_probability:.4f}\t{likelihood.tokens}")


def choose(run: Run, /, *, by: Literal["loss", "bleu"] = "loss", beam: int = 5, device: str = "auto") -> None:
    """Score the models that a run kept (--keep), and means of them, on its validation data; make the best its best.

    The best model by training stays in the run folder as `trained`.

    Args:
        run: the folder that `regard train` made.
        by: the lowest loss wins, or (translators only) the highest BLEU.
        beam: hypotheses of the search for BLEU.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    if beam < 1:
        raise ArgumentError(f"--beam must be at least 1, got {beam}")
    if by == "bleu":
        require_task(run, TRANSLATION)
    with loading("lightning_fabric", "sacrebleu"):
        from regard.tasks.runs.choose_checkpoint import choose_checkpoint, is_chance

    with telling() as tell:
        candidates = choose_checkpoint(run, by=by, beam_size=beam, device=device, tell=tell)
    rows = [(one.name, *(f"{name} {value:.4f}" for name, value in one.metrics.items())) for one in candidates]
    print_table(rows)
    if by == "bleu" and is_chance(candidates):
        print("no model reaches 1 BLEU, where BLEU tells nothing: the loss decided", file=sys.stderr)
    print(f"the best model of {run} is now: {candidates[0].name}", file=sys.stderr)


def _translation_scores(
    model: "Translator",
    judged: Iterable[tuple[str, str | Sequence[str]]],
    beam: Beam,
    reverse: "Reverse | None",
    tell: Tell,
) -> list[tuple[str, ...]]:
    found = model.evaluate(judged, beam=beam, reverse=reverse, tell=tell)
    return [
        ("pairs", str(found.pairs)),
        ("BLEU", f"{found.bleu.value:.2f}", found.bleu.signature),
        ("chrF", f"{found.chrf.value:.2f}", found.chrf.signature),
        ("exact match", f"{found.exact_match:.2f}", "percent"),
        ("loss", f"{found.loss:.4f}", "nats a token"),
    ]


def _alignment_row(model: "Translator", data: Sequence[Path], links: Path, align: "AlignmentOf") -> tuple[str, ...]:
    from regard.tasks.text.links import read_links
    from regard.tasks.translation.alignment_error import error_of

    rate = error_of(model, list(read_pairs(list(data))), read_links(links), align)
    return ("AER", f"{rate:.2f}", f"percent, {align}")


def _simultaneous_scores(
    interpreter: "Interpreter", pairs: Sequence[tuple[str, str]], tell: Tell
) -> list[tuple[str, ...]]:
    from regard.tasks.translation.simultaneous.evaluation import evaluate_interpreter

    found = evaluate_interpreter(interpreter, pairs, tell=tell)
    return [
        ("pairs", str(found.pairs)),
        ("policy", str(interpreter.policy)),
        ("BLEU", f"{found.bleu.value:.2f}", found.bleu.signature),
        ("AL", f"{found.al:.3f}", "source words"),
        ("LAAL", f"{found.laal:.3f}", "source words"),
    ]


def _tried_heads(
    model: "Translator", pairs: Sequence[tuple[str, str]], frames: int, tell: Tell
) -> list[tuple[str, ...]]:
    from regard.tasks.translation.simultaneous.evaluation import try_heads

    rows = [("layer", "head", "BLEU", "LAAL", "BLEU above wait-k at that LAAL")]
    for one in try_heads(model, pairs, frames=frames, tell=tell):
        head = "mean" if one.alignment.head is None else str(one.alignment.head)
        rows.append((str(one.alignment.layer), head, f"{one.bleu:.2f}", f"{one.laal:.3f}", f"{one.gain:+.2f}"))
    return list(rows)


def _judged(data: Sequence[Path], references: Sequence[Path]) -> Iterable[tuple[str, str | Sequence[str]]]:
    """Read sources and their references, in any of the forms."""
    if references:
        return read_references(data[0], references)
    if len(data) == 1 and is_json_lines(data[0]):
        return read_judged(data[0])
    return read_pairs(list(data))
