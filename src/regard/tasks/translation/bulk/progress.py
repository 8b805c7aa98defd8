"""Show the progress of a file as one live line in a terminal."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from regard.errors import MissingExtraError


@contextmanager
def counting(file: IO[str], *, total: int | None, done: int = 0) -> Iterator[Callable[[int], None]]:
    """A function that takes the number of lines done, and shows it on `file` if that is a terminal."""
    if not file.isatty():
        yield lambda lines: None
        return
    try:
        from rich import progress
        from rich.console import Console
    except ImportError:
        raise MissingExtraError("rich", extra="train") from None
    columns = progress.TextColumn("lines"), progress.MofNCompleteColumn(), progress.BarColumn()
    speed_and_end = progress.TextColumn("{task.fields[speed]}"), progress.TimeRemainingColumn()
    with progress.Progress(*columns, *speed_and_end, console=Console(file=file)) as bar:
        task = bar.add_task("", total=total, completed=done, speed="")

        def tell(lines: int) -> None:
            speed = bar.tasks[0].speed
            bar.update(task, completed=lines, speed="" if speed is None else f"{speed:,.0f}/s")

        yield tell
