"""`regard evaluate`, `score` and `choose`: how good a run is, and which of its models is best."""

import sys
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Literal

from regard.cli.engines import SearchCommand
from regard.cli.loading import loading
from regard.cli.progress import telling
from regard.cli.shared import (
    AnyRun,
    Command,
    Device,
    ReadingCommand,
    Run,
    below,
    print_table,
    refuse_first,
    require_task,
)
from regard.errors import ArgumentError
from regard.tasks.exports.formats import Engine, SearchPrecision
from regard.tasks.names import LANGUAGE_MODEL, TRANSLATION
from regard.tasks.registry import task_name_of, task_of
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.gate import STANDARD_INPUT
from regard.tasks.text.lines import Reader, StrPath
from regard.tasks.training.bleu import BleuTokenize

OF_TRANSLATORS = (
    *("--beam", "--length-penalty", "--references"),
    *("--engine", "--precision", "--max-length", "--bleu-tokenize"),
)
TASK_OF = {"--stride": LANGUAGE_MODEL, **dict.fromkeys(OF_TRANSLATORS, TRANSLATION)}
"""The flags for runs of one task alone."""


@dataclass(frozen=True, slots=True)
class EvaluateCommand(ReadingCommand, SearchCommand):
    """Score a run on a test set.

    The scores of a translator are BLEU, chrF, exact match and loss; of a language model loss, perplexity and bits per
    byte.
    """

    run: AnyRun
    _: KW_ONLY
    data: tuple[Path, ...]
    """the test set: pairs or text, in the forms of --data-format."""
    references: tuple[Path, ...] = ()
    """translation: files of references, one for each set; --data then has the sources alone."""
    beam: int | None = None
    """translation: hypotheses kept while searching; 5 unless given."""
    length_penalty: float = 1.0
    """translation: above 1 favours longer translations, below 1 shorter ones; as for `translate`."""
    stride: int | None = None
    """language model: tokens that each block predicts; its others are context; half a block unless given."""
    max_length: int | None = None
    """translation: the most tokens of a translation; unless given, some more than twice those of its source."""
    bleu_tokenize: BleuTokenize = "auto"
    """translation: sacrebleu's tokenizer; auto is 13a, or for a script without spaces one that fits it."""
    device: Device = "auto"
    engine: Engine | None = None
    """translation: who searches, regard or ctranslate2, as for `translate`; the loss is always regard's."""
    precision: SearchPrecision | None = None
    """translation: of the products of CTranslate2, as for `translate`."""

    @property
    def task(self) -> str:
        return task_name_of(self.run)

    def check(self) -> None:
        task = self.task
        for flag in self.given(*TASK_OF):
            if TASK_OF[flag] != task:
                raise ArgumentError(f"{flag} is not for a run of the task {task}: leave it out")
        self._refuse_contradictions()
        self.refuse_search()
        refuse_first(below("--stride", self.stride), below("--max-length", self.max_length))
        require_files(self.data, setting="--data")
        require_files(self.references, setting="--references")

    def _refuse_contradictions(self) -> None:
        references = bool(self.references)
        refuse_first(
            (references and bool(self.data_format), "--references are files of lines: leave out --data-format"),
            (
                references and len(self.data) != 1,
                f"with --references, --data is one file of sources, got {len(self.data)}",
            ),
        )

    def work(self) -> None:
        with loading():
            from regard.cli.evaluating import evaluate

        evaluate(self)


@dataclass(frozen=True, slots=True)
class ScoreCommand(ReadingCommand):
    """Print the log-probability of each pair or line, in nats, and over how many tokens it is summed.

    For a translator it is that of the target given the source, end mark included; for a language model that of the
    line.
    """

    run: Run
    _: KW_ONLY
    data: tuple[Path, ...] = ()
    """pairs or lines, in the forms of --data-format; standard input unless given."""
    device: Device = "auto"

    def check(self) -> None:
        task_of(self.run)
        require_files(self.data, setting="--data")

    def work(self) -> None:
        with loading():
            from regard.tasks.text.texts import read_texts
            from regard.tasks.translation.translator import Translator

        model = task_of(self.run).load(self.run, device=self.device)
        paths: Sequence[StrPath] = self.data or (STANDARD_INPUT,)
        of_pairs = isinstance(model, Translator)
        reader: Reader[Any] = self.pairs_in(paths) if of_pairs else read_texts(paths, **self.reading)
        tokens, unknown = 0, 0
        for one in reader.with_gaps(model.score(reader)):
            print("" if one is None else f"{one.log_probability:.4f}\t{one.tokens}")
            tokens, unknown = (tokens, unknown) if one is None else (tokens + one.tokens, unknown + one.unknown)
        if unknown:
            print(f"{unknown:,} of {tokens:,} tokens are unknown, each as probable as any such word", file=sys.stderr)
        self.tell(reader)


@dataclass(frozen=True, slots=True)
class ChooseCommand(Command):
    """Score the models that a run kept (--keep), and means of them, on its validation data; make the best its best.

    The best model by training stays in the run folder as `trained`.
    """

    run: Run
    _: KW_ONLY
    by: Literal["loss", "bleu"] = "loss"
    """the lowest loss wins, or (translators only) the highest BLEU."""
    beam: int = 5
    """hypotheses of the search for BLEU."""
    bleu_tokenize: BleuTokenize | None = None
    """sacrebleu's tokenizer for BLEU; that of the run unless given."""
    device: Device = "auto"

    def check(self) -> None:
        refuse_first(below("--beam", self.beam))
        if self.by == "bleu":
            require_task(self.run, TRANSLATION)

    def work(self) -> None:
        with loading("lightning_fabric", "sacrebleu"):
            from regard.tasks.runs.choose_checkpoint import choose_checkpoint, is_chance

        with telling() as tell:
            how: dict[str, Any] = {"beam_size": self.beam, "bleu_tokenize": self.bleu_tokenize, "device": self.device}
            candidates = choose_checkpoint(self.run, by=self.by, tell=tell, **how)
        rows = [(one.name, *(f"{name} {value:.4f}" for name, value in one.metrics.items())) for one in candidates]
        print_table(rows)
        if self.by == "bleu":
            print(f"BLEU: {candidates[0].signature}", file=sys.stderr)
        if self.by == "bleu" and is_chance(candidates):
            print("no model reaches 1 BLEU, where BLEU tells nothing: the loss decided", file=sys.stderr)
        print(f"the best model of {self.run} is now: {candidates[0].name}", file=sys.stderr)
