"""`regard translate`: translate a sentence, a file, or standard input."""

import os
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

import tyro

from regard.cli.engines import SearchCommand
from regard.cli.loading import loading
from regard.cli.shared import AnyRun, Device, Mean, below, refuse_first, require_task
from regard.tasks.config import TRANSLATION
from regard.tasks.generation.config import Engine, SearchPrecision
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.lines import BadLines, RunningTextFormat


@dataclass(frozen=True, slots=True)
class TranslateCommand(SearchCommand):
    """Translate sentences, or each line of a file or of standard input."""

    run: AnyRun
    sentences: tyro.conf.Positional[tuple[str, ...]] = ()
    """the texts to translate, a line for each; without one, --input or standard input is read."""
    _: KW_ONLY
    input: Path | None = None
    """a file with one sentence on each line; may be packed."""
    data_format: RunningTextFormat | None = None
    """the form of the lines, if the name does not tell: text, or JSON objects with a `source` or `text` (jsonl)."""
    output: Path | None = None
    """a file to write to, instead of standard output; it has that name once it is whole."""
    resume: bool = False
    """go on with an --output that was interrupted."""
    overwrite: bool = False
    """replace --output if it is there."""
    bad_lines: BadLines = "stop"
    """whether a line that cannot be read or is too long ends the work or is answered by an empty line."""
    beam: int | None = None
    """hypotheses kept while searching, 5 unless given; 1 takes the most probable token each time."""
    nbest: int = 1
    """translations of each sentence; above 1, each is printed after its line's number and its score."""
    length_penalty: float = 1.0
    """in beam search, above 1 favours longer translations, below 1 shorter ones."""
    alignments: bool = False
    """print JSON: tokens, scores, and how much each token attended to each token of the source."""
    alignment_layer: int | Mean | None = None
    """the decoder layer whose attention that is, from 0, or from -1 backwards; or mean; the last unless given."""
    alignment_head: int | Mean | None = None
    """the head in that layer, or mean."""
    copy_unknown: bool = False
    """for each word outside the vocabulary, print the source word that it attends to most."""
    prefix: str = ""
    """the beginning of every translation."""
    prefix_column: bool = False
    """each line has a sentence, a tab, and the beginning of its translation."""
    max_length: int | None = None
    """the most tokens of a line, beyond which it is a bad line, and of its translation, which is cut off there; unless
    given, as many as the longest sentence had in training, and some more than twice those of the line."""
    device: Device = "auto"
    engine: Engine | None = None
    """who searches: regard, or ctranslate2 by the run's own export, which is made once and kept in the run. Unless
    given, ctranslate2 where it is installed and can, and a line on standard error says where it cannot."""
    precision: SearchPrecision | None = None
    """float32 unless given, or int8, which is CTranslate2's: faster, and near ties fall otherwise."""
    workers: int | None = None
    """threads of CTranslate2, each with a batch of its own; unless given, one for each core."""
    verbose: bool = False
    """say on standard error which engine searches, where and why; a file is always begun so."""

    @property
    def names_alignment(self) -> bool:
        return bool(self.given("--alignment-layer", "--alignment-head"))

    def check(self) -> None:
        self._refuse_contradictions()
        self._refuse_places()
        size, nbest, workers = self.size, self.nbest, self.workers
        self.refuse_search()
        refuse_first(
            (not 1 <= nbest <= size, f"--nbest must be from 1 to --beam, got {nbest} and {size}"),
            below("--max-length", self.max_length),
            below("--workers", workers),
            (
                self.engine == "regard" and workers is not None,
                "--workers are threads of CTranslate2: leave out --engine regard",
            ),
        )
        require_task(self.run, TRANSLATION)
        require_files([] if self.input is None else [self.input], setting="--input")

    def _refuse_contradictions(self) -> None:
        sentences, output, resume, overwrite = self.sentences, self.output, self.resume, self.overwrite
        users = ("--alignments", "--copy-unknown")
        refuse_first(
            (bool(sentences and self.input), "a sentence and --input were both given: give one of them"),
            (bool(sentences and output), "--output is for many lines: give --input, not a sentence"),
            (output is None and (resume or overwrite), "--resume and --overwrite are for a file: give --output"),
            (resume and overwrite, "--resume goes on with a file and --overwrite replaces it: give one of them"),
            (
                bool(self.prefix) and self.prefix_column,
                "--prefix and --prefix-column were both given: give one of them",
            ),
            (
                self.names_alignment and not self.given(*users),
                f"--alignment-layer and --alignment-head go with {' or '.join(users)}",
            ),
        )

    def _refuse_places(self) -> None:
        input, output = self.input, self.output
        is_same = bool(input and output and input.exists() and output.exists() and input.samefile(output))
        folder = None if output is None else output.absolute().parent
        refuse_first(
            (folder is not None and not folder.is_dir(), f"--output: there is no folder for {output}"),
            (output is not None and output.is_dir(), f"--output: {output} is a folder; name a file"),
            (
                os.environ.get("WORLD_SIZE", "1") != "1",
                "a file is translated by one process, not by the ranks of torchrun: cut it up (split), and join the "
                "translations (cat)",
            ),
            (is_same, f"--input and --output are both {input}: name another --output"),
        )

    def work(self) -> None:
        with loading():
            from regard.cli.translating import translate

        translate(self)
