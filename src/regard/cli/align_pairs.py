"""`regard align`: links between the words of given pairs."""

from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from regard.cli.loading import loading
from regard.cli.shared import AnyRun, Device, Mean, ReadingCommand, alignment_of, require_task
from regard.tasks.config import TRANSLATION
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.pairs import read_pairs


@dataclass(frozen=True, slots=True)
class AlignCommand(ReadingCommand):
    """Print links between the words of pairs, a line for each pair (`0-0 1-2`, source and target from 0).

    Each target word is linked with the source word that it attends to most.
    """

    run: AnyRun
    _: KW_ONLY
    data: tuple[Path, ...]
    """pairs, in the forms of --data-format."""
    alignment_layer: int | Mean | None = None
    """the decoder layer whose attention aligns, or mean; the last unless given."""
    alignment_head: int | Mean | None = None
    """the head in that layer, or mean."""
    device: Device = "auto"

    def check(self) -> None:
        require_task(self.run, TRANSLATION)
        require_files(self.data, setting="--data")

    def work(self) -> None:
        with loading():
            from regard.tasks.translation.aligned_words import as_line, words_aligned
            from regard.tasks.translation.translator import Translator

        translator = Translator.load(self.run, device=self.device)
        pairs = read_pairs(self.data, **self.reading)
        found = words_aligned(translator, pairs, alignment_of(self.alignment_layer, self.alignment_head))
        for links in pairs.with_gaps(found):
            print("" if links is None else as_line(links))
        self.tell(pairs)
