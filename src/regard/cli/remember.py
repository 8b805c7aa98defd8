"""`regard remember`: a memory of pairs for a translator."""

import sys
from pathlib import Path

from regard.cli.loading import loading
from regard.cli.progress import telling
from regard.cli.shared import Run, refuse_first, require_task
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files


def remember_pairs(
    run: Run,
    /,
    *,
    data: tuple[Path, ...] = (),
    valid: tuple[Path, ...] = (),
    out: Path | None = None,
    overwrite: bool = False,
    device: str = "auto",
) -> None:
    """Read pairs once, and keep what the translator read and wrote at each place: `translate --memory` asks it.

    Nothing is trained. How much the memory has to say is chosen on validation pairs, which should not be among the
    pairs that are remembered. A model that is trained further, or chosen anew, needs a new memory.

    Args:
        run: the folder that `regard train` made, or a translator's in Hugging Face's format.
        data: the pairs: one file of two tab-separated columns or JSON lines, or two aligned files; unless given, those
            that the run was trained on.
        valid: pairs by which to choose how much the memory has to say; unless given, those of the run.
        out: the file to write; unless given, memory.safetensors in the run folder.
        overwrite: replace the file if it is there.
        device: auto, cpu, cuda, cuda:N or mps.
    """
    from regard.tasks.translation.memory_file import FILE

    target = run / FILE if out is None else out
    require_task(run, TRANSLATION)
    require_files(data, setting="--data")
    require_files(valid, setting="--valid")
    refuse_first(
        (target.is_dir(), f"--out: {target} is a folder; name a file"),
        (not target.absolute().parent.is_dir(), f"--out: there is no folder for {target}"),
        (target.exists() and not overwrite, f"{target} is there already: give --overwrite to replace it, or --out"),
    )
    with loading():
        from regard.models.key_lists import LOOKED_AT
        from regard.tasks.translation.memory_file import write_memory
        from regard.tasks.translation.remember import remember_for
        from regard.tasks.translation.translator import Translator

    translator = Translator.load(run, device=device)
    with telling() as tell:
        found = remember_for(translator, run, data=data, valid=valid, tell=tell)
    write_memory(target, found)
    before, after = found.figures["without"], found.figures["with"]
    print(f"{len(found.memory):,} places of text are in {target}", file=sys.stderr)
    if found.memory.lists is not None:
        print(
            f"of its {len(found.memory.lists.sizes):,} lists a search on the CPU looks at {LOOKED_AT}", file=sys.stderr
        )
    print(f"loss on the validation pairs: {after:.4f} nats a token with it, {before:.4f} without", file=sys.stderr)
    print(f"use it: regard translate {run} --memory {target}", file=sys.stderr)
