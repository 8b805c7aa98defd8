"""The threads of a model: they take works from a bounded queue, run some together, and others step by step in turn.

A ticket is a request while it is worked on: events go from a worker's thread to it, and its end goes back.
"""

import asyncio
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

from regard.errors import RegardError


class Refused(RegardError):
    def __init__(self, status: int, message: str, *, retry_after: int | None = None) -> None:
        super().__init__(message)
        self.status, self.retry_after = status, retry_after


class ClientGone(Exception):
    """Raised in a worker's thread at the first step after the request has ended: its client has left, or was told."""


class _LastEvent(NamedTuple):
    error: Exception | None


ENDED = object()
"""Comes after the last event."""


class Ticket:
    """One request, made in its event loop; a worker's thread tells it events and looks whether it is wanted."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = threading.Event()

    def leave(self) -> None:
        self._gone.set()

    # -- in the thread of a worker -----------------------------------------------------------------------

    def is_wanted(self) -> bool:
        return not self._gone.is_set()

    def check(self) -> None:
        if self._gone.is_set():
            raise ClientGone

    def tell(self, event: Any) -> None:
        with suppress(RuntimeError):  # its loop has ended
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

    def end(self, error: Exception | None = None) -> None:
        self.tell(_LastEvent(error))

    # -- in the event loop -------------------------------------------------------------------------------

    async def next(self) -> Any:
        """The next event, or `ENDED`; raises the error of a work that failed."""
        event = await self._events.get()
        if not isinstance(event, _LastEvent):
            return event
        if event.error is not None:
            raise event.error
        return ENDED


CURRENT_TICKET = threading.local()
"""Its `ticket` is that of the request for which a thread works."""


def check_current_ticket(*_: Any) -> None:
    """Raise `ClientGone` if the request is over that this thread works for. It may be called as a hook of a module."""
    if (ticket := getattr(CURRENT_TICKET, "ticket", None)) is not None:
        ticket.check()


GATHER_SECONDS = 0.005
"""How long the first of several works that can run together waits for others."""
TOGETHER = 64
"""The most works that run together."""
IN_TURN = 16
"""The most works that run step by step in turn; further ones wait."""


@dataclass(frozen=True, slots=True, eq=False)
class RequestWork:
    ticket: Ticket
    steps: Callable[[], Iterator[Any]]
    """Does the work: each `next` is one step, and gives an event for the ticket or None."""
    alone: bool = False
    """Whether no other work of the model may run between its steps: it changes the model until its end."""


@dataclass(frozen=True, slots=True, eq=False)
class SharedWork:
    """A work that runs in one go with others of the same key."""

    ticket: Ticket
    asked: Any
    key: Hashable
    run: Callable[[Sequence[Any]], Sequence[Any]]
    """From the questions of several works, to an answer or an exception for each."""


class Worker:
    """One thread, in which all work of a model is done; more of them where an engine searches beside the model.

    A search in batches ends with its longest batch, and the other cores would wait for it. The further threads take
    only works that run together, and none while works of single steps run: these change the model, or hook into it.

    >>> worker = Worker("one", most_waiting=3)
    >>> worker.close()
    """

    def __init__(self, name: str, *, most_waiting: int, searches: int = 1) -> None:
        self._most_waiting = most_waiting
        self._waiting: deque[RequestWork | SharedWork] = deque()
        self._changed = threading.Condition()
        self._is_closed = False
        self._seconds = 1.0
        self._is_stepping, self._beside = False, 0
        targets = [self._serve, *[self._serve_beside] * (searches - 1)]
        self._threads = [threading.Thread(target=one, name=f"regard {name}", daemon=True) for one in targets]
        for thread in self._threads:
            thread.start()

    def submit(self, work: RequestWork | SharedWork) -> None:
        with self._changed:
            if self._is_closed:
                raise Refused(503, "the server ends")
            self._waiting = deque(one for one in self._waiting if one.ticket.is_wanted())
            if len(self._waiting) >= self._most_waiting:
                wait = max(1, round(self._seconds))
                raise Refused(429, f"{self._most_waiting} requests wait already: come again", retry_after=wait)
            self._waiting.append(work)
            self._changed.notify_all()

    def close(self) -> None:
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join(timeout=10)

    # -- in the threads -----------------------------------------------------------------------------------

    def _serve(self) -> None:
        running: deque[tuple[RequestWork, Iterator[Any]]] = deque()
        while True:
            for one in self._taken(running):
                running.append((one, one.steps()))
            if self._is_closed:
                for left in [*(work for work, _ in running), *self._waiting]:
                    left.ticket.end(Refused(503, "the server ends"))
                return
            if running:
                work, steps = running.popleft()
                if self._step(work, steps):
                    (running.appendleft if work.alone else running.append)((work, steps))

    def _taken(self, running: Sequence[Any]) -> list[RequestWork]:
        """The next works that run step by step; shared ones have been run. It waits only if nothing is running."""
        if running and running[0][0].alone:
            return []
        with self._changed:
            if self._is_stepping and not running:
                self._is_stepping = False
                self._changed.notify_all()
            while not (self._waiting or running or self._is_closed):
                self._changed.wait()
            first = self._waiting[0] if self._waiting else None
            if first is None or self._is_closed:
                return []
            if isinstance(first, RequestWork):
                return [] if len(running) >= IN_TURN else [self._take_steps()]
            shared = self._take_shared(0.0 if running else GATHER_SECONDS)
        self._run_together(shared)
        return []

    def _take_steps(self) -> Any:
        work, self._is_stepping = self._take(0), True
        while self._beside:
            self._changed.wait()
        return work

    def _serve_beside(self) -> None:
        while True:
            with self._changed:
                while not self._is_closed and (
                    self._is_stepping or not self._waiting or isinstance(self._waiting[0], RequestWork)
                ):
                    self._changed.wait()
                if self._is_closed:
                    return
                self._beside += 1
                shared = self._take_shared(GATHER_SECONDS)
            try:
                self._run_together(shared)
            finally:
                with self._changed:
                    self._beside -= 1
                    self._changed.notify_all()

    def _take_shared(self, seconds: float) -> list[SharedWork]:
        """The works that run together with the first, if that is such a work, once others have had time to come."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0 and len(self._waiting) < TOGETHER and not self._is_closed:
            self._changed.wait(left)
        first = self._waiting[0] if self._waiting else None
        if not isinstance(first, SharedWork):
            return []
        same = [n for n, one in enumerate(self._waiting) if isinstance(one, SharedWork) and one.key == first.key]
        return [self._take(n) for n in reversed(same[:TOGETHER])][::-1]

    def _take(self, place: int) -> Any:
        work = self._waiting[place]
        del self._waiting[place]
        return work

    def _run_together(self, works: Sequence[SharedWork]) -> None:
        wanted = [one for one in works if one.ticket.is_wanted()]
        if not wanted:
            return
        begun = time.monotonic()
        CURRENT_TICKET.ticket = None  # each of its lines knows its own request
        try:
            answers = wanted[0].run([one.asked for one in wanted])
        except Exception as error:  # whatever it is, each request gets it
            answers = [error] * len(wanted)
        self._seconds = time.monotonic() - begun
        for one, answer in zip(wanted, answers, strict=True):
            if isinstance(answer, Exception):
                one.ticket.end(answer)
            else:
                one.ticket.tell(answer)
                one.ticket.end()

    def _step(self, work: RequestWork, steps: Iterator[Any]) -> bool:
        try:
            work.ticket.check()
            CURRENT_TICKET.ticket = work.ticket
            event = next(steps)
        except Exception as error:
            getattr(steps, "close", lambda: None)()
            work.ticket.end(None if isinstance(error, StopIteration | ClientGone) else error)
            return False
        if event is not None:
            work.ticket.tell(event)
        return True
