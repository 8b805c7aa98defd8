"""Write a file of translations to its end, and show the progress."""

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from regard.errors import RegardError
from regard.tasks.translation.bulk.lines import BulkTranslation, count_lines
from regard.tasks.translation.bulk.progress import counting
from regard.tasks.translation.bulk.resumable_output import Unfinished, opened


def finish_file(
    work: BulkTranslation,
    output: Path,
    settings: Mapping[str, Any],
    *,
    input: Path | None,
    resume: bool,
    overwrite: bool,
) -> None:
    """Write the translations, and show the progress.

    Args:
        work: the lines and their translations.
        output: the file to make.
        settings: what decides the answers.
        input: the file of all lines; None for standard input.
        resume: as for `opened`.
        overwrite: as for `opened`.
    """
    with opened(output, settings, resume=resume, overwrite=overwrite) as unfinished:
        if unfinished is None:
            print("the file is whole: there is nothing left to do", file=sys.stderr)
        else:
            _write(work, unfinished, input)


def _write(work: BulkTranslation, unfinished: Unfinished, input: Path | None) -> None:
    unfinished.pass_over(work.lines)
    if unfinished.lines:
        print(f"going on after line {unfinished.lines:,}", file=sys.stderr)
    total = count_lines(input) if input is not None and input.is_file() and sys.stderr.isatty() else None
    try:
        with counting(sys.stderr, total=total, done=unfinished.lines) as tell:
            work.finish(unfinished, tell)
    except (KeyboardInterrupt, RegardError, OSError) as stop:
        stop.add_note(f"{unfinished.lines:,} lines are kept: go on with the same command and --resume")
        raise
