"""LibreTranslate's addresses."""

import re
from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from regard.serving.asking import Desk, body_type, json_answer, question_of
from regard.serving.guard import unknown
from regard.serving.served import Sentences, ServedTranslator
from regard.serving.shapes import Health, Language, Translated, TranslateQuestion
from regard.serving.worker import Refused, SharedWork, Ticket
from regard.tasks.translation.results import Translation
from regard.tasks.translation.translation_model import Request as TranslationRequest

LINE_END = re.compile(r"(\r\n|\n|\r)")
CutText = list[str | TranslationRequest]
"""A text in order: each line as a request, each line end as it is."""


class TranslateApi:
    """Translation as LibreTranslate's clients ask for it. There is no `/detect`: nothing here tells languages."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def translate(self, request: Request) -> Any:
        is_json = body_type(request) == "application/json"
        asked = question_of(await self._fields(request), TranslateQuestion, strict=is_json)
        self._admit(request, asked.api_key)
        if asked.format == "html":
            raise Refused(400, 'format must be "text": HTML is not translated')
        texts = [asked.q] if isinstance(asked.q, str) else asked.q
        self._desk.check_text(*texts)
        served = self._model(asked)
        if asked.alternatives + 1 > self._desk.limits.max_beam:
            raise Refused(400, f"alternatives must be below {self._desk.limits.max_beam}, got {asked.alternatives}")
        cuts, ticket = [cut_text(text) for text in texts], Ticket()
        flat = [one for cut in cuts for one in cut if isinstance(one, TranslationRequest)]
        sentences = Sentences(flat, asked.alternatives, ticket)
        key = (served, asked.alternatives)

        def render(events: list[Any]) -> Response:
            found = iter(events[0])
            wholes = [_joined(cut, found, asked.alternatives) for cut in cuts]
            is_one = isinstance(asked.q, str)
            bests, others, strange = ([one[n] for one in wholes] for n in range(3))
            answer = Translated(translatedText=bests[0] if is_one else bests)
            if asked.alternatives:
                answer.alternatives = [*others[0]] if is_one else [*others]
            if any(strange):
                answer.unknown = strange[0] if is_one else strange
            return json_answer(answer)

        return self._desk.answered(served, SharedWork(ticket, sentences, key, served.translate), render=render)

    async def languages(self, request: Request) -> Response:
        fields = {} if self._desk.knows(request) else await self._fields(request)
        self._admit(request, fields.get("api_key"))
        targets: dict[str, list[str]] = {}
        for one in self._translators():
            targets.setdefault(one.languages[0], []).append(one.languages[1])
        return json_answer([Language(code=code, name=code, targets=some) for code, some in targets.items()])

    async def health(self, _: Request) -> Response:
        return json_answer(Health(status="ok"))

    def _translators(self) -> list[ServedTranslator]:
        return [one for one in self._desk.models.values() if isinstance(one, ServedTranslator)]

    def _model(self, asked: TranslateQuestion) -> ServedTranslator:
        found = [one for one in self._translators() if one.languages[1] == asked.target]
        found = [one for one in found if asked.source in ("auto", one.languages[0])]
        if len({one.languages[0] for one in found}) > 1:
            raise Refused(400, "source must be a language: nothing here tells languages, and several models would do")
        if not found:
            pairs = ", ".join("-".join(one.languages) for one in self._translators()) or "none"
            raise Refused(400, f"{asked.source}-{asked.target} is not served; the pairs are {pairs}")
        return found[0]

    def _admit(self, request: Request, key: Any) -> None:
        if not (self._desk.knows(request) or self._desk.guard.knows(str(key or ""))):
            raise unknown()

    async def _fields(self, request: Request) -> dict[str, Any]:
        body, kind = await request.body(), body_type(request)
        if kind == "application/json":
            found = msgspec.json.decode(body)
            if not isinstance(found, dict):
                raise Refused(400, "the body must be an object of JSON")
            return found
        if kind not in ("", "application/x-www-form-urlencoded"):
            raise Refused(415, f"bodies are application/json or application/x-www-form-urlencoded; got {kind:.100}")
        try:
            pairs = parse_qsl(body.decode("ascii"), keep_blank_values=True, errors="strict", max_num_fields=1_010)
        except ValueError:
            raise Refused(400, "the form is not in UTF-8, or has too many fields") from None
        fields: dict[str, Any] = {}
        for name, text in pairs:
            fields.setdefault(name, []).append(text)
        if twice := [name for name, texts in fields.items() if len(texts) > 1 and name != "q"]:
            raise Refused(400, f"fields that are given twice: {', '.join(twice):.200}; only q may be")
        return {name: texts if len(texts) > 1 else texts[0] for name, texts in fields.items()}


def cut_text(text: str) -> CutText:
    r"""The lines of a text, and its line ends.

    >>> [one if isinstance(one, str) else one.source for one in cut_text("we see\r\ntwo")]
    ['we see', '\r\n', 'two']
    """
    return [part if number % 2 else TranslationRequest(part) for number, part in enumerate(LINE_END.split(text))]


def put_together(cut: CutText, translations: Sequence[str]) -> str:
    left = iter(translations)
    return "".join(one if isinstance(one, str) else next(left) for one in cut)


def _joined(cut: CutText, found: Iterator[Translation], alternatives: int) -> tuple[Any, Any, Any]:
    """The best translation of a text, others (of several lines, those of each line at its rank), and unknown texts."""
    lines = [next(found) for one in cut if isinstance(one, TranslationRequest)]
    best = put_together(cut, [one.text for one in lines])
    most = max((len(one.candidates) for one in lines), default=1)
    ranked = [[one.candidates[min(n, len(one.candidates) - 1)].text for one in lines] for n in range(1, most)]
    others = list(dict.fromkeys(put_together(cut, some) for some in ranked))
    unknown = [text for one in lines for text in one.unknown]
    return best, [one for one in others if one != best][:alternatives], unknown
