"""The desk that all addresses share: the models with their threads, the limits, and the way to an answer.

An answer is whole, or server-sent events. It ends the work when the client leaves.
"""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from typing import Any, TypeVar

import anyio
import msgspec
from starlette.requests import Request
from starlette.responses import Response

from regard.errors import EngineError, MissingExtraError, RegardError
from regard.serving.guard import Guard, refusal
from regard.serving.recent_views import RecentViews
from regard.serving.served import Served
from regard.serving.settings import RequestLimits
from regard.serving.worker import ENDED, Refused, RequestWork, SharedWork, Ticket, Worker

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
    """An answer as an ASGI application: whole by `render`, or a stream by `event`."""

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
    if isinstance(error, Refused):
        return error
    if isinstance(error, EngineError):
        return Refused(500, "the engine failed")
    if isinstance(error, MissingExtraError):
        return Refused(501, str(error))
    return Refused(400, str(error)) if isinstance(error, RegardError) else Refused(500, "the server failed")


def sse(content: Any, event: str = "") -> list[bytes]:
    return [f"event: {event}\n".encode() if event else b"", b"data: ", msgspec.json.encode(content), b"\n\n"]


def json_answer(content: Any) -> Response:
    return Response(msgspec.json.encode(content), media_type="application/json")


S = TypeVar("S", bound=msgspec.Struct)


def body_type(request: Request) -> str:
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def question_of(found: Any, kind: type[S], *, strict: bool = True) -> S:
    """The fields of a body as a question; without `strict` numbers and bools may be written as texts."""
    known = kind.__struct_fields__
    if isinstance(found, dict) and (unknown := [name for name in found if name not in known]):
        raise Refused(400, f"unknown fields: {', '.join(unknown):.200}; the fields are {', '.join(known)}")
    return msgspec.convert(found, kind, strict=strict)


class Desk:
    guard: Guard
    """Set by the application that it stands before."""

    def __init__(self, models: Mapping[str, Served], limits: RequestLimits, *, version: str) -> None:
        self.models, self.limits, self.ending, self.version = dict(models), limits, Ending(), version
        self.workers = {
            name: Worker(name, most_waiting=limits.max_waiting, searches=one.searches) for name, one in models.items()
        }
        self.recent = {name: RecentViews(self.models) for name in models}

    def close(self) -> None:
        for worker in self.workers.values():
            worker.close()

    def knows(self, request: Request) -> bool:
        return bool(request.state.is_known)

    async def asked(self, request: Request, kind: type[S]) -> S:
        given = body_type(request)
        if given != "application/json":
            raise Refused(415, f"the body must be application/json, got {given or 'no type':.100}")
        return question_of(msgspec.json.decode(await request.body()), kind)

    def model(self, name: str | None) -> Served:
        if name is None:
            return next(iter(self.models.values()))
        if name not in self.models:
            raise Refused(404, f"there is no model {name!r:.100}; the models are {', '.join(self.models)}")
        return self.models[name]

    def check_text(self, *texts: str) -> None:
        if (length := sum(map(len, texts))) > self.limits.max_text:
            raise Refused(400, f"texts have at most {self.limits.max_text:,} characters, got {length:,}")

    def answered(self, served: Served, work: RequestWork | SharedWork, **how: Any) -> HttpAnswer:
        self.workers[served.name].submit(work)
        return HttpAnswer(work.ticket, seconds=self.limits.max_seconds, ending=self.ending, **how)

    def once(self, served: Served, do: Callable[[], Any], **how: Any) -> HttpAnswer:
        def steps() -> Iterator[Any]:
            yield do()

        return self.answered(served, RequestWork(Ticket(), steps), **how)
