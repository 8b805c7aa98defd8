"""`regard evaluate`: how good a run is."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from regard.cli.engines import SearchCommand
from regard.cli.loading import loading
from regard.cli.shared import (
    AnyRun,
    Device,
    ReadingCommand,
    below,
    refuse_first,
)
from regard.errors import ArgumentError
from regard.tasks.config import LANGUAGE_MODEL, TRANSLATION
from regard.tasks.generation.config import Engine, SearchPrecision
from regard.tasks.registry import task_name_of
from regard.tasks.runs.refusals import require_files
from regard.tasks.training.metrics import BleuTokenize

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
        references = bool(self.references)
        refuse_first(
            (references and bool(self.data_format), "--references are files of lines: leave out --data-format"),
            (
                references and len(self.data) != 1,
                f"with --references, --data is one file of sources, got {len(self.data)}",
            ),
        )
        self.refuse_search()
        refuse_first(below("--stride", self.stride), below("--max-length", self.max_length))
        require_files(self.data, setting="--data")
        require_files(self.references, setting="--references")

    def work(self) -> None:
        with loading():
            from regard.cli.evaluating import evaluate

        evaluate(self)
