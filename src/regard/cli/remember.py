"""`regard remember`: a memory of pairs for a translator."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path

from regard.cli.loading import loading
from regard.cli.progress import telling
from regard.cli.shared import AnyRun, Device, ReadingCommand, refuse_first, require_task
from regard.tasks.names import TRANSLATION
from regard.tasks.runs.refusals import require_files


@dataclass(frozen=True, slots=True)
class RememberCommand(ReadingCommand):
    """Read pairs once, and keep what the translator read and wrote at each place: `translate --memory` asks it.

    Nothing is trained. How much the memory has to say is chosen on validation pairs, which should not be among the
    pairs that are remembered. A model that is trained further, or chosen anew, needs a new memory.
    """

    run: AnyRun
    _: KW_ONLY
    data: tuple[Path, ...] = ()
    """the pairs, in the forms of --data-format; unless given, those that the run was trained on."""
    valid: tuple[Path, ...] = ()
    """pairs by which to choose how much the memory has to say; unless given, those of the run."""
    out: Path | None = None
    """the file to write; unless given, memory.safetensors in the run folder."""
    overwrite: bool = False
    """replace the file if it is there."""
    device: Device = "auto"

    @property
    def target(self) -> Path:
        from regard.tasks.translation.memory_file import FILE

        return self.run / FILE if self.out is None else self.out

    def check(self) -> None:
        target, overwrite = self.target, self.overwrite
        require_task(self.run, TRANSLATION)
        require_files(self.data, setting="--data")
        require_files(self.valid, setting="--valid")
        refuse_first(
            (target.is_dir(), f"--out: {target} is a folder; name a file"),
            (not target.absolute().parent.is_dir(), f"--out: there is no folder for {target}"),
            (target.exists() and not overwrite, f"{target} is there already: give --overwrite to replace it, or --out"),
        )

    def work(self) -> None:
        with loading():
            from regard.models.key_lists import LOOKED_AT
            from regard.tasks.translation.memory_file import write_memory
            from regard.tasks.translation.remember import remember_for
            from regard.tasks.translation.translator import Translator

        translator = Translator.load(self.run, device=self.device)
        data, valid = (self.pairs_in(paths) if paths else None for paths in (self.data, self.valid))
        with telling() as tell:
            found = remember_for(translator, self.run, data=data, valid=valid, tell=tell)
        self.tell(*filter(None, (data, valid)))
        write_memory(self.target, found)
        before, after = found.figures["without"], found.figures["with"]
        print(f"{len(found.memory):,} places of text are in {self.target}", file=sys.stderr)
        if (lists := found.memory.lists) is not None:
            print(f"of its {len(lists.sizes):,} lists a search on the CPU looks at {LOOKED_AT}", file=sys.stderr)
        print(f"loss on the validation pairs: {after:.4f} nats a token with it, {before:.4f} without", file=sys.stderr)
        if after >= before:
            print("leave it out: the loss is no better with it", file=sys.stderr)
            return
        print(f"use it: regard translate {self.run} --memory {self.target}", file=sys.stderr)
