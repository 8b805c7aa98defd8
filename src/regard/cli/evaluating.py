"""The work of `regard evaluate`."""

import sys
from functools import partial
from typing import Any

from regard.cli.engines import OwnSearch, SearchBy
from regard.cli.progress import showing_progress
from regard.cli.shared import print_table
from regard.files.model_folder import OnProgress
from regard.tasks.config import TRANSLATION
from regard.tasks.exports.engine import refuse_run
from regard.tasks.language_modelling.causal import LanguageModel, TextEvaluation
from regard.tasks.language_modelling.likelihood import MOST_UNKNOWN
from regard.tasks.registry import TASKS
from regard.tasks.text.forms import RunningText
from regard.tasks.text.lines import Reader
from regard.tasks.text.pairs import read_judged, read_references
from regard.tasks.training.distributed import find_device
from regard.tasks.training.metrics import bleu_caution
from regard.tasks.translation.translator import Translator

ScoreRow = tuple[str, ...]


def evaluate(asked: Any) -> None:
    task = asked.task
    search_by: SearchBy = OwnSearch()
    if task == TRANSLATION:
        search_by = asked.chosen_search(find_device(asked.device), partial(refuse_run, asked.run))
    load: Any = TASKS[task].load
    model = load(asked.run, device=asked.device)
    with showing_progress() as tell:
        rows = _translations(asked, model, search_by, tell) if task == TRANSLATION else _next_tokens(asked, model, tell)
    print_table(rows)


def _translations(asked: Any, model: Translator, search_by: SearchBy, tell: OnProgress) -> list[ScoreRow]:
    reader: Reader[Any] = (
        read_references(asked.data[0], asked.references, bad_lines=asked.bad_lines)
        if asked.references
        else read_judged(asked.data, **asked.reading)
    )
    judged: list[Any] = list(reader)  # read once: it may be a pipe
    with search_by.searching(model, asked.run):
        found = model.evaluate(
            judged,
            beam=asked.search,
            max_length=asked.max_length,
            bleu_tokenize=asked.bleu_tokenize,
            tell=tell,
        )
    asked.tell(reader)
    references = [text for _, texts in judged for text in ([texts] if isinstance(texts, str) else texts)]
    if caution := bleu_caution(references, asked.bleu_tokenize):
        print(caution, file=sys.stderr)
    limited = "translations, by the limit of their tokens: raise --max-length"
    return [
        ("pairs", str(found.pairs)),
        ("BLEU", f"{found.bleu.value:.2f}", found.bleu.signature),
        ("chrF", f"{found.chrf.value:.2f}", found.chrf.signature),
        ("exact match", f"{found.exact_match:.2f}", "percent"),
        ("loss", f"{found.loss:.4f}", "nats a token"),
        *_unknown(found.unknown, "of the references' tokens"),
        *([("cut off", str(found.cut_off), limited)] if found.cut_off else []),
    ]


def _unknown(share: float, of: str) -> list[ScoreRow]:
    return [("unknown", f"{100 * share:.2f}", f"percent {of}: the loss counts them as one word")] if share else []


def _next_tokens(asked: Any, model: LanguageModel, tell: OnProgress) -> list[ScoreRow]:
    found = model.evaluate(text := RunningText(asked.data, **asked.reading), stride=asked.stride, tell=tell)
    asked.tell(text)
    return [
        ("tokens", str(found.tokens)),
        ("loss", f"{found.loss:.4f}", "nats a token"),
        ("perplexity", f"{found.perplexity:.3f}", "a token"),
        *_unknown(found.unknown, "of the tokens"),
        ("bits per byte", *_bits(found)),
    ]


def _bits(found: TextEvaluation) -> ScoreRow:
    if found.bits_per_byte is not None:
        return f"{found.bits_per_byte:.4f}", f"{found.text_bytes} bytes"
    return "none", f"it tells nothing where more than {100 * MOST_UNKNOWN:g} percent of the tokens are unknown"
