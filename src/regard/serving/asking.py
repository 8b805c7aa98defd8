"""The desk that all addresses share: the models with their threads, the limits, and the way to an answer."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import msgspec
from starlette.requests import Request

from regard.serving.answering import Ending, HttpAnswer
from regard.serving.guard import Guard
from regard.serving.recent_views import RecentViews
from regard.serving.served import Served
from regard.serving.settings import RequestLimits
from regard.serving.ticket import Refused, Ticket
from regard.serving.worker import RequestWork, SharedWork, Worker

S = TypeVar("S", bound=msgspec.Struct)


def body_type(request: Request) -> str:
    """The type of a body, without its parameters; "" if it has none."""
    return request.headers.get("content-type", "").partition(";")[0].strip().lower()


def question_of(found: Any, kind: type[S], *, strict: bool = True) -> S:
    """The fields of a body as a question; without `strict` numbers and bools may be written as texts.

    Raises:
        Refused: a field is none of the question's: what it asks for would be passed over.
        msgspec.ValidationError: a field is absent, or has another type.
    """
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
        """The model of a name; the first one without a name."""
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
