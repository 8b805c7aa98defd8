"""`regard measure` and `regard atlas`: statistics of every head of a model over a corpus, and a look at them."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.loading import loading, speaks
from regard.cli.progress import showing_progress
from regard.cli.shared import Command, Device, PositionalPath, refuse_first
from regard.corpus.settings import USUAL_STATISTICS, CorpusEngine, CorpusJob, MeasureSettings, extra_package
from regard.errors import ArgumentError
from regard.files.model_folder import is_huggingface, no_progress

MeasuredModel = Annotated[
    PositionalPath,
    tyro.conf.arg(help="the run of a language model, or any folder that transformers loads, with its weights."),
]


@dataclass(frozen=True, slots=True)
class MeasureCommand(Command):
    """Measure every head of a model on the documents of a corpus, into a folder of Parquet files.

    heads/ has a row for each head of each document; totals/ has counts, sums and histograms; examples/ the documents in
    which a head is strongest, with the place. A document that cannot be read is a row with an error. The bytes are the
    same on any number of workers, on the ranks of torchrun, and after an interruption with --resume. To look at them:
    `regard atlas`; the heads that changed between two folders: `regard measure --compare A B`.
    """

    model: MeasuredModel
    _: KW_ONLY
    data: tuple[str, ...]
    """files, folders or patterns such as 'shards/*.parquet': Parquet, Arrow (a folder of `datasets`), JSON lines, or
    text with a document on each line; packed or not."""
    out: Path
    """a folder to make."""
    resume: bool = False
    """go on with a folder that was begun with the same settings."""
    statistics: tuple[str, ...] = USUAL_STATISTICS
    """of entropy, distance, self, previous, first, induction, duplicate, top_weight, received, top_keys, or
    module:function, a function of the weights (H, T, S) and the tokens."""
    text: str = "text"
    """the column of the texts."""
    id: str = "id"
    """the column of the ids; in files without it an id is the file's name and the number of the row or line."""
    layers: tuple[int, ...] = ()
    """the layers to measure, from 0, or from -1 backwards; all unless given."""
    heads: tuple[int, ...] = ()
    """the heads to measure, likewise."""
    max_tokens: int | None = None
    """longer documents are cut; unless given, a document too long for the model is an error."""
    keys: int = 8
    """how many keys top_keys has."""
    examples: int = 5
    """the documents kept in examples/ for each head and statistic."""
    shard_documents: int = 500
    """the most documents of a shard. An interruption loses one at most; a file of heads/ holds one."""
    max_errors: int | None = None
    """stop when more documents than that cannot be measured; unless given, never."""
    workers: int | None = None
    """processes, each with the model; unless given, one for each core, or one on a GPU."""
    engine: CorpusEngine = "processes"
    """processes, or ray: Ray shares out the shards, here or on the cluster of RAY_ADDRESS, and repeats those whose
    process or machine dies."""
    threads: int = 1
    """threads of each process; another number may change the last bits."""
    device: Device = "auto"

    @property
    def measure(self) -> MeasureSettings:
        return self.part(MeasureSettings, model=str(self.model))

    @property
    def job(self) -> CorpusJob:
        return self.part(CorpusJob, measure=self.measure)

    def check(self) -> None:
        self.job.check()

    def work(self) -> None:
        with loading("regard.corpus.engine", *["transformers"] * is_huggingface(self.model)):
            from regard.corpus.engine import run_job

        with showing_progress() as tell:
            found = run_job(self.job, tell if speaks() else no_progress)
        if not speaks():
            return
        print(self.out)
        print(found, file=sys.stderr)


Stats = Annotated[PositionalPath, tyro.conf.arg(help="a folder of statistics that `regard measure` has made.")]
Other = Annotated[
    tyro.conf.Positional[Path | None],
    tyro.conf.arg(
        help="another, of a second checkpoint or corpus: the heads that changed are printed, with intervals."
    ),
]


@dataclass(frozen=True, slots=True)
class AtlasCommand(Command):
    """Look at the heads of a model over a corpus, and see which ones changed between two.

    --out writes one page that works offline: a table of heads, sorted and filtered by a statistic; for each head the
    distribution over documents and its strongest examples. Of two folders the heads that changed are printed:
    `regard measure --compare A B` does the same. The intervals of all differences hold together, at 95 %; documents
    with one id are pairs.
    """

    stats: Stats
    other: Other = None
    _: KW_ONLY
    out: Path | None = None
    """the page to write, an .html file."""
    csv: Path | None = None
    """write the table to this file too; - is standard output, where nothing else is then printed."""

    def check(self) -> None:
        refuse_first(
            (
                self.other is None and self.out is None and self.csv is None,
                "give --out page.html, --csv FILE, or a second folder to compare with",
            ),
            *((one is not None and one.is_dir(), f"{one} is a folder; name a file") for one in (self.out, self.csv)),
        )
        if self.other is not None and self.other.suffix in (".html", ".csv") and not self.other.is_dir():
            raise ArgumentError(f"{self.other} is no folder: name a file to write by --out or --csv")
        extra_package("pyarrow", extra="measure")

    def work(self) -> None:
        with loading():
            from regard.corpus.atlas_page import atlas

        made, is_piped = atlas(self.stats, self.other), self.csv == Path("-")
        if self.csv is not None and not is_piped:
            made.save_csv(self.csv)
        if self.out is not None:
            made.save(self.out)
        if is_piped:
            sys.stdout.write(made.csv())
        elif made.changes is not None:
            print(made.changes)
        else:
            print(*(path for path in (self.out, self.csv) if path is not None), sep="\n")
