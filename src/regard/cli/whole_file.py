"""Write a file of translations to its end, alone or with the other ranks that `torchrun` started."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError, RendezvousError
from regard.tasks.translation.bulk.lines import BulkTranslation, count_lines
from regard.tasks.translation.bulk.progress import counting
from regard.tasks.translation.bulk.resumable_output import Unfinished, opened
from regard.tasks.translation.bulk.shared_file import SharedFile
from regard.text.lines import raw_lines
from regard.training.distributed.rendezvous import common_store, own_rank, world_size


def shared_file(window_lines: int) -> SharedFile | None:
    """The windows that this process shares with the other ranks; None if it is alone.

    Raises:
        RendezvousError: the others did not come within half an hour.
    """
    if world_size() == 1:
        return None
    with store_errors():
        return SharedFile(common_store(), own_rank(), world_size(), window_lines=window_lines)


def finish_file(
    work: BulkTranslation,
    output: Path,
    settings: Mapping[str, Any],
    *,
    input: Path | None,
    shared: SharedFile | None,
    resume: bool,
    overwrite: bool,
) -> None:
    """Write the translations, and show the progress; of several ranks the first writes and speaks.

    Args:
        work: the lines of this process.
        output: the file to make.
        settings: what decides the answers.
        input: the file of all lines; None for standard input.
        shared: the windows that ranks share.
        resume: as for `opened`.
        overwrite: as for `opened`.
    """
    with store_errors():
        if shared is not None and shared.rank:
            _follow(work, shared)
            return
        with opened(output, settings, resume=resume, overwrite=overwrite) as unfinished:
            if unfinished is not None:
                _write(work, unfinished, input, shared)
                return
            if shared is not None:
                shared.nothing_to_do()
            print("the file is whole: there is nothing left to do", file=sys.stderr)


def _follow(work: BulkTranslation, shared: SharedFile) -> None:
    try:
        if shared.begin():
            shared.translate(work)
    except (RegardError, OSError, RuntimeError, MemoryError) as error:
        shared.fail(error)
        raise


def _write(work: BulkTranslation, unfinished: Unfinished, input: Path | None, shared: SharedFile | None) -> None:
    lines = work.lines if shared is None or input is None else raw_lines(input)
    unfinished.pass_over(lines)
    if unfinished.lines:
        print(f"going on after line {unfinished.lines:,}", file=sys.stderr)
    total = count_lines(input) if input is not None and input.is_file() and sys.stderr.isatty() else None
    try:
        with counting(sys.stderr, total=total, done=unfinished.lines) as tell:
            if shared is None:
                work.finish(unfinished, tell)
            else:
                shared.lead(work, unfinished, lines, tell)
    except (KeyboardInterrupt, RegardError, OSError) as stop:
        stop.add_note(f"{unfinished.lines:,} lines are kept: go on with the same command and --resume")
        raise


@contextmanager
def store_errors() -> Iterator[None]:
    """Say in one line that the ranks lost one another.

    Raises:
        RendezvousError: the store of `torchrun` cannot be reached.
    """
    try:
        yield
    except torch.distributed.DistError as error:
        raise RendezvousError(
            f"the ranks lost one another ({type(error).__name__}): start them again with --resume"
        ) from None
