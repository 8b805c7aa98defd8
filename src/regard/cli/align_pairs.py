"""`regard align`: links between the words of given pairs."""

from pathlib import Path

from regard.cli.loading import loading
from regard.cli.shared import Mean, Run, alignment_of, refuse_first, require_task
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files
from regard.tasks.text.links import as_line
from regard.tasks.text.pairs import read_pairs


def align_pairs(
    run: Run,
    /,
    *,
    data: tuple[Path, ...],
    reverse: Path | None = None,
    alignment_layer: int | Mean | None = None,
    alignment_head: int | Mean | None = None,
    reverse_layer: int | Mean | None = None,
    reverse_head: int | Mean | None = None,
    device: str = "auto",
) -> None:
    """Print links between the words of pairs, a line for each pair (`0-0 1-2`, source and target from 0).

    Each target word is linked with the source word that it attends to most. With a translator of the other direction,
    the links of both are brought together. `regard train --alignment-data` takes such a file.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        data: pairs: one file of two tab-separated columns or JSON lines, or two aligned files.
        reverse: a translator from the target's language to the source's.
        alignment_layer: the decoder layer whose attention aligns, or mean; unless given, that of the head that was
            taught to align, or the last.
        alignment_head: the head in that layer, or mean.
        reverse_layer: the same for --reverse.
        reverse_head: the same for --reverse.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    is_lone = reverse is None and not (reverse_layer is None and reverse_head is None)
    refuse_first((is_lone, "--reverse-layer and --reverse-head go with --reverse"))
    for folder in (run, *(() if reverse is None else (reverse,))):
        require_task(folder, TRANSLATION)
    require_files(data, setting="--data")
    with loading():
        from regard.tasks.translation.alignment_error import symmetrised, words_aligned
        from regard.tasks.translation.translator import Translator

    translator = Translator.load(run, device=device)
    which = alignment_of(alignment_layer, alignment_head, translator.alignment)
    found = words_aligned(translator, read_pairs(list(data)), which)
    if reverse is None:
        for links in found:
            print(as_line(links))
        return
    other = Translator.load(reverse, device=device)
    which = alignment_of(reverse_layer, reverse_head, other.alignment)
    turned = words_aligned(other, ((target, source) for source, target in read_pairs(list(data))), which)
    for links, back in zip(found, turned, strict=True):
        print(as_line(symmetrised(links, frozenset((word, of) for of, word in back))))
