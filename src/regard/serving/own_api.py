"""Our own addresses: answers as they are written, and the attention behind them."""

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from regard.serving.asking import Desk, json_answer, sse
from regard.serving.recent_views import RecentViews, reply_bytes
from regard.serving.served import AnswerPiece, Done, Served
from regard.serving.shapes import AnswerQuestion, AttentionQuestion, LookedAt, ViewQuestion, WeightsQuestion
from regard.serving.worker import RequestWork, Ticket


class OwnApi:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def answer(self, request: Request) -> Any:
        """Translate or continue a text; events `piece`, then `done`."""
        asked = await self._desk.asked(request, AnswerQuestion)
        self._desk.check_text(asked.text, asked.prefix)
        served, ticket = self._desk.model(asked.model), Ticket()
        work = RequestWork(ticket, lambda: served.answer(asked), alone=bool(asked.edits))
        return self._desk.answered(served, work, event=_event)

    async def attention(self, request: Request) -> Any:
        asked = await self._desk.asked(request, AttentionQuestion)
        served = self._checked(asked)
        looks = self._desk.recent[served.name]
        return self._desk.once(served, lambda: looks.numbers(asked), render=lambda events: json_answer(events[0]))

    async def view(self, request: Request) -> Any:
        asked = await self._desk.asked(request, ViewQuestion)
        served, looks = self._recent(asked)
        return self._desk.once(served, lambda: looks.view(asked.subjects), render=lambda events: json_answer(events[0]))

    async def weights(self, request: Request) -> Any:
        """Weights of a view: rows, columns and tiles, when the page asks for them."""
        asked = await self._desk.asked(request, WeightsQuestion)
        served, looks = self._recent(asked)

        def render(events: list[Any]) -> Response:
            return Response(events[0], media_type="application/octet-stream")

        return self._desk.once(
            served, lambda: reply_bytes(looks.weights(asked.subjects, asked.question)), render=render
        )  # fmt: skip

    def _recent(self, asked: ViewQuestion) -> tuple[Served, RecentViews]:
        served, *_ = [self._checked(one) for one in asked.subjects]
        return served, self._desk.recent[served.name]

    def _checked(self, asked: LookedAt) -> Served:
        """The model of a subject, whose name is then in it."""
        served = self._desk.model(asked.model)
        asked.model = served.name
        self._desk.check_text(asked.text, asked.target or "")
        return served


def _event(event: AnswerPiece | Done) -> list[bytes]:
    if isinstance(event, AnswerPiece):
        return sse({"text": event.text}, "piece")
    done = {
        "text": event.text,
        "tokens": event.tokens,
        "labels": event.labels,
        "is_cut": event.is_cut,
        "seed": event.seed,
        "unknown": event.unknown,
    }
    return sse(done, "done")
