"""`regard align`: links between the words of given pairs."""

from dataclasses import KW_ONLY, dataclass
from itertools import tee
from pathlib import Path

from regard.cli.loading import loading
from regard.cli.shared import AnyRun, Device, Mean, ReadingCommand, alignment_of, refuse_first, require_task
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.links import as_line


@dataclass(frozen=True, slots=True)
class AlignCommand(ReadingCommand):
    """Print links between the words of pairs, a line for each pair (`0-0 1-2`, source and target from 0).

    Each target word is linked with the source word that it attends to most. With a translator of the other direction,
    the links of both are brought together. `regard train --alignment-data` takes such a file.
    """

    run: AnyRun
    _: KW_ONLY
    data: tuple[Path, ...]
    """pairs, in the forms of --data-format."""
    reverse: Path | None = None
    """a translator from the target's language to the source's."""
    alignment_layer: int | Mean | None = None
    """the decoder layer whose attention aligns, or mean; unless given, that of the head that was taught to align, or
    the last."""
    alignment_head: int | Mean | None = None
    """the head in that layer, or mean."""
    reverse_layer: int | Mean | None = None
    """the same for --reverse."""
    reverse_head: int | Mean | None = None
    """the same for --reverse."""
    device: Device = "auto"

    def check(self) -> None:
        is_lone = self.reverse is None and self.given("--reverse-layer", "--reverse-head")
        refuse_first((bool(is_lone), "--reverse-layer and --reverse-head go with --reverse"))
        for folder in (self.run, *(() if self.reverse is None else (self.reverse,))):
            require_task(folder, TRANSLATION)
        require_files(self.data, setting="--data")

    def work(self) -> None:
        with loading():
            from regard.tasks.translation.alignment_error import symmetrised, words_aligned
            from regard.tasks.translation.translator import Translator

        translator = Translator.load(self.run, device=self.device)
        which = alignment_of(self.alignment_layer, self.alignment_head, translator.alignment)
        reader = self.pairs_in(self.data)
        pairs, again = (reader, reader) if self.reverse is None else tee(reader)
        found = words_aligned(translator, pairs, which)
        if self.reverse is not None:
            other = Translator.load(self.reverse, device=self.device)
            which = alignment_of(self.reverse_layer, self.reverse_head, other.alignment)
            turned = words_aligned(other, ((target, source) for source, target in again), which)
            both = zip(found, turned, strict=True)
            found = (symmetrised(links, frozenset((word, of) for of, word in back)) for links, back in both)
        for links in reader.with_gaps(found):
            print("" if links is None else as_line(links))
        self.tell(reader)
