"""A request while it is worked on: the way of events from a worker's thread to the request, and of its end back."""

import asyncio
import threading
from contextlib import suppress
from typing import Any, NamedTuple

from regard.errors import RegardError


class Refused(RegardError):
    """A request that is not answered as it was asked for."""

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
    """One request, made in its event loop; a worker's thread tells it events and looks whether it is wanted. A work
    without a request is not heard."""

    def __init__(self, *, is_heard: bool = True) -> None:
        self._loop = asyncio.get_running_loop() if is_heard else None
        self._events: asyncio.Queue[Any] = asyncio.Queue()
        self._gone = threading.Event()

    def leave(self) -> None:
        self._gone.set()

    # -- in the thread of a worker -----------------------------------------------------------------------

    def is_wanted(self) -> bool:
        return not self._gone.is_set()

    def check(self) -> None:
        """Raise `ClientGone` after the end of the request."""
        if self._gone.is_set():
            raise ClientGone

    def tell(self, event: Any) -> None:
        if self._loop is None:
            return
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
