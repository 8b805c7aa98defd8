"""The way from a work to its HTTP answer: whole, or as server-sent events. It ends the work when the client leaves."""

import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import anyio
import msgspec
from starlette.responses import Response

from regard.errors import EngineError, MissingExtraError, RegardError
from regard.serving.guard import refusal
from regard.serving.ticket import ENDED, Refused, Ticket

Render = Callable[[list[Any]], Response]
"""From all events of a work to the answer."""
ToEvents = Callable[[Any], list[bytes]]
"""From an event of a work to lines of an event stream."""


class Ending:
    def __init__(self) -> None:
        self.at = float("inf")

    def within(self, seconds: float) -> None:
        self.at = min(self.at, time.monotonic() + seconds)


class HttpAnswer:
    """An answer as an ASGI application.

    Args:
        ticket: of the work, which has been submitted.
        render: makes a whole answer of its events.
        event: makes a stream of them instead.
        seconds: until the answer is whole.
        ending: the end of the server.
        openai: whether errors have OpenAI's form.
    """

    def __init__(
        self, ticket: Ticket, *, render: Render | None = None, event: ToEvents | None = None, seconds: float,
        ending: Ending, openai: bool = False,
    ) -> None:  # fmt: skip
        self._ticket, self._render, self._event, self._openai = ticket, render, event, openai
        self._ends_at, self._seconds, self._ending = time.monotonic() + seconds, seconds, ending

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        try:
            async with anyio.create_task_group() as tasks:
                tasks.start_soon(self._until_left, receive, tasks.cancel_scope)
                await (self._whole if self._event is None else self._stream)(scope, receive, send)
                tasks.cancel_scope.cancel()
        finally:
            self._ticket.leave()

    async def _until_left(self, receive: Any, scope: anyio.CancelScope) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._ticket.leave()
        scope.cancel()

    async def _events(self) -> AsyncIterator[Any]:
        while True:
            event = None
            try:
                with anyio.move_on_after(0.5):  # to look at the time
                    event = await self._ticket.next()
            except Exception as error:
                raise refused(error) from error
            if event is ENDED:
                return
            if event is not None:
                yield event
            if time.monotonic() > self._ends_at:
                raise Refused(503, f"the answer took longer than {self._seconds:g} seconds")
            if time.monotonic() > self._ending.at:
                raise Refused(503, "the server ends")

    async def _whole(self, scope: Any, receive: Any, send: Any) -> None:
        assert self._render is not None
        try:
            response = self._render([event async for event in self._events()])
        except Refused as error:
            response = refusal(error, openai=self._openai)
        await response(scope, receive, send)

    async def _stream(self, scope: Any, receive: Any, send: Any) -> None:
        """Send events as they come. An error before the first is an answer; a later one is an event."""
        assert self._event is not None
        has_begun = False

        async def write(*parts: bytes, last: bool = False) -> None:
            nonlocal has_begun
            if not has_begun:
                headers = [(b"content-type", b"text/event-stream; charset=utf-8"), (b"x-accel-buffering", b"no")]
                await send({"type": "http.response.start", "status": 200, "headers": headers})
                has_begun = True
            await send({"type": "http.response.body", "body": b"".join(parts), "more_body": not last})

        try:
            async for event in self._events():
                if parts := self._event(event):
                    await write(*parts)
        except Refused as error:
            answer = refusal(error, openai=self._openai)
            if not has_begun:
                await answer(scope, receive, send)
                return
            await write(b"event: error\ndata: ", bytes(answer.body), b"\n\n", last=True)
            return
        await write(*([b"data: [DONE]\n\n"] if self._openai else []), last=True)


def refused(error: Exception) -> Refused:
    """An error of a work as a refusal: wrong questions are the client's, and others are not explained."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, EngineError):
        return Refused(500, "the engine failed")
    if isinstance(error, MissingExtraError):
        return Refused(501, str(error))
    return Refused(400, str(error)) if isinstance(error, RegardError) else Refused(500, "the server failed")


def sse(content: Any, event: str = "") -> list[bytes]:
    return [f"event: {event}\n".encode() if event else b"", b"data: ", msgspec.json.encode(content), b"\n\n"]


def json_answer(content: Any, status: int = 200) -> Response:
    return Response(msgspec.json.encode(content), status, media_type="application/json")
