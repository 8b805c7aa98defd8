"""The ranks that `torchrun` started translate one file: each takes a window, whenever it has finished one.

They meet in the store of `torchrun`, whatever machines they are on. It holds

    begin          how many lines were answered before, as the first rank says
    next           the number of the window that nobody has taken yet
    answer/17      the answers to window 17, until the first rank has written them
    written        how many windows it has written
    failed, told   an error of another rank, and that the first rank knows of it

Every rank reads the whole input and passes over the windows of others. The first rank translates too, and alone
writes the output, in order, with the record of `Unfinished`: after any interruption any number of ranks can go on. A
rank takes no window that is far ahead of the one to be written next, so that the store never holds more than a few.
"""

import json
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from datetime import timedelta
from hashlib import blake2b
from itertools import islice
from typing import Any

from regard.errors import DataError, RendezvousError, WorkerError
from regard.tasks.translation.bulk.lines import BulkTranslation, RenderedWindow
from regard.tasks.translation.bulk.resumable_output import Unfinished
from regard.text.lines import Line

AHEAD = 4
"""How many windows for each rank may be taken before the first of them is written."""
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for another before it gives up."""
FAREWELL = timedelta(seconds=10)
"""How long a rank that failed waits for the first one to say so."""
PAUSE_SECONDS = 0.01
"""The pause between two looks into the store."""


class SharedFile:
    """The windows of a file that ranks share.

    Args:
        store: a `torch.distributed.Store` that they share.
        rank: the number of this process.
        world_size: the number of processes.
        window_lines: how many lines a window has.
    """

    def __init__(self, store: Any, rank: int, world_size: int, *, window_lines: int) -> None:
        self._store, self.rank, self._ahead, self._size = store, rank, AHEAD * world_size, window_lines
        self._begun_after = self._written = 0
        self._taken: deque[int] = deque()
        self._meanwhile: Callable[[], object] = lambda: None

    # -- every rank --------------------------------------------------------------------------------------------

    def picked(self, lines: Iterable[Line]) -> Iterator[Line]:
        """The lines of the windows that this rank takes, one window after the other."""
        iterator, place = iter(lines), 0
        for _ in islice(iterator, self._begun_after):
            pass
        while True:
            number = self._take()
            for _ in islice(iterator, (number - place) * self._size):
                pass
            window, place = list(islice(iterator, self._size)), number + 1
            if not window:
                return
            self._taken.append(number)
            yield from window
            if len(window) < self._size:
                return

    def translate(self, work: BulkTranslation) -> None:
        """Translate the windows of this rank; the lines of `work` are those that it picked."""
        for window in work.windows:
            number = self._taken.popleft()
            rendered = work.render(window, after=self._begun_after + number * self._size)
            answer = {"rank": self.rank, "lines": _digest(one.line for one in window), "answer": rendered}
            self._store.set(f"answer/{number}", json.dumps(answer))
            self._meanwhile()

    def _take(self) -> int:
        """The number of the next window, as soon as it is not too far ahead."""
        number = int(self._store.add("next", 1)) - 1

        def is_near() -> bool:
            self._meanwhile()
            return number < int(self._store.get("written")) + self._ahead

        self._wait_until(is_near, "the windows before its own")
        return number

    # -- the first rank ----------------------------------------------------------------------------------------

    def lead(
        self, work: BulkTranslation, unfinished: Unfinished, lines: Iterator[Line], tell: Callable[[int], None]
    ) -> None:
        """Translate with the others, and write all answers in order.

        Args:
            work: the lines that this rank picked.
            unfinished: the output.
            lines: the lines of the input again, from the first that is not answered yet.
            tell: is called with the number of lines answered so far.

        Raises:
            DataError: a line is bad, and the work is to end there; or another rank reads another input.
            WorkerError: another rank failed.
            RendezvousError: another rank did not answer for half an hour.
            OSError: the disk is full.
        """
        self._begun_after = unfinished.lines
        self._store.set("written", "0")
        self._store.set("begin", json.dumps(unfinished.lines))
        next_lines: list[Line] = []

        def write(*, wait: bool = False) -> None:
            """Write the answers that are there; with `wait`, all of them."""
            while next_lines or (window := list(islice(lines, self._size))):
                next_lines[:] = next_lines or window
                self._refuse_failures()
                if not wait and not self._store.check([self._key]):
                    return
                unfinished.add(next_lines, work.take(self._answer(next_lines)))
                next_lines.clear()
                self._forget()
                tell(unfinished.lines)

        self._meanwhile = write
        self.translate(work)
        write(wait=True)
        unfinished.finish()

    def nothing_to_do(self) -> None:
        """Tell the others that the output is whole."""
        self._store.set("begin", json.dumps(None))

    def _answer(self, lines: Iterable[Line]) -> RenderedWindow:
        """The answers to the window that is to be written next."""
        after = self._begun_after + self._written * self._size
        self._wait_until(lambda: self._store.check([self._key]), f"the answers to the lines after {after:,}")
        found = json.loads(self._store.get(self._key))
        if found["lines"] != _digest(lines):
            raise DataError(
                f"rank {found['rank']} reads other lines after line {after:,}: give every rank the same --input"
            )
        return RenderedWindow(*found["answer"])

    @property
    def _key(self) -> str:
        """The place of the answers that are to be written next."""
        return f"answer/{self._written}"

    def _forget(self) -> None:
        self._store.delete_key(self._key)
        self._written += 1
        self._store.set("written", str(self._written))

    def _refuse_failures(self) -> None:
        if self.rank == 0 and self._store.check(["failed"]):
            self._store.set("told", "")
            raise WorkerError(self._store.get("failed").decode())

    # -- the others --------------------------------------------------------------------------------------------

    def begin(self) -> bool:
        """Wait until the first rank has opened the output; return whether there is anything to do.

        Raises:
            RendezvousError: it did not for half an hour.
        """
        self._wait_until(lambda: self._store.check(["begin"]), "the first rank")
        lines = json.loads(self._store.get("begin"))
        self._begun_after = lines or 0
        return lines is not None

    def fail(self, error: BaseException) -> None:
        """Let the first rank say why this one ends: `torchrun` lets only that one speak."""
        self._store.set("failed", f"rank {self.rank}: {error}")
        try:
            self._store.wait(["told"], FAREWELL)
        except Exception:  # it ended before: it has nothing more to say
            return

    def _wait_until(self, is_so: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + PATIENCE.total_seconds()
        while not is_so():
            self._refuse_failures()
            if time.monotonic() > deadline:
                raise RendezvousError(
                    f"rank {self.rank} waited {PATIENCE} for {what}: start the ranks again with --resume"
                )
            time.sleep(PAUSE_SECONDS)


def _digest(lines: Iterable[Line]) -> str:
    digest = blake2b(digest_size=16)
    for line in lines:
        digest.update(line.raw + b"\n")
    return digest.hexdigest()
