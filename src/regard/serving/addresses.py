"""The addresses: LibreTranslate's, OpenAI's, and our own, with answers as they are written and the attention behind."""

import re
import time
from collections.abc import Iterator, Sequence
from secrets import token_hex
from typing import Any
from urllib.parse import parse_qsl

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from regard.serving import shapes
from regard.serving.asking import Desk, body_type, json_answer, question_of, sse
from regard.serving.guard import unknown
from regard.serving.recent_views import RecentViews, reply_bytes
from regard.serving.served import (
    AnswerPiece,
    Done,
    Sentences,
    Served,
    ServedLanguageModel,
    ServedTranslator,
    drawn_seed,
)
from regard.serving.shapes import CompletionChoice
from regard.serving.worker import Refused, RequestWork, SharedWork, Ticket
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
        asked = question_of(await self._fields(request), shapes.TranslateQuestion, strict=is_json)
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
            answer = shapes.Translated(translatedText=bests[0] if is_one else bests)
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
        return json_answer([shapes.Language(code=code, name=code, targets=some) for code, some in targets.items()])

    async def health(self, _: Request) -> Response:
        return json_answer(shapes.Health(status="ok"))

    def _translators(self) -> list[ServedTranslator]:
        return [one for one in self._desk.models.values() if isinstance(one, ServedTranslator)]

    def _model(self, asked: shapes.TranslateQuestion) -> ServedTranslator:
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


USUAL_TOKENS = 16
"""OpenAI's own default of `max_tokens`."""


class CompletionsApi:
    def __init__(self, desk: Desk) -> None:
        self._desk, self._made = desk, int(time.time())

    async def models(self, _: Request) -> Response:
        return json_answer(shapes.ModelCards(data=[self._card(name) for name in self._desk.models]))

    async def one_model(self, request: Request) -> Response:
        return json_answer(self._card(self._desk.model(request.path_params["name"]).name))

    async def complete(self, request: Request) -> Any:
        asked = await self._desk.asked(request, shapes.Complete)
        served = self._desk.model(asked.model)
        if not isinstance(served, ServedLanguageModel):
            raise Refused(400, f"{asked.model} translates: /translate has it")
        prompts = [asked.prompt] if isinstance(asked.prompt, str) else asked.prompt
        self._desk.check_text(*prompts)
        many = len(prompts) * (asked.n or 1)
        if many > self._desk.limits.max_beam:
            raise Refused(400, f"texts of a request are at most {self._desk.limits.max_beam}, got {many}")
        ticket = Ticket()
        seed = drawn_seed() if asked.seed is None else asked.seed % 2**32
        form = _Form(asked.model, prompts, asked, seed)
        work = RequestWork(ticket, lambda: _steps(served, prompts, asked, seed))
        how: dict[str, Any] = {"event": form.events} if asked.stream else {"render": form.whole}
        return self._desk.answered(served, work, openai=True, **how)

    def _card(self, name: str) -> shapes.ModelCard:
        one = self._desk.models[name]
        languages = None if one.languages is None else list(one.languages)
        return shapes.ModelCard(
            id=name, created=self._made, task=one.task, maps=one.maps, heads=one.heads, languages=languages,
            examples=one.examples,
        )  # fmt: skip


def _steps(
    served: ServedLanguageModel, prompts: list[str], asked: shapes.Complete, seed: int
) -> Iterator[AnswerPiece | Done | None]:
    stop = [asked.stop] if isinstance(asked.stop, str) else asked.stop or []
    if not all(stop):
        raise Refused(400, "stop strings must have a character")
    most, each = served.limit(asked.max_tokens, USUAL_TOKENS), asked.n or 1
    temperature = 1.0 if asked.temperature is None else asked.temperature
    top_p = 1.0 if asked.top_p is None else asked.top_p
    for index in range(len(prompts) * each):
        yield from served.write(
            prompts[index // each], most=most, temperature=temperature,
            top_p=top_p, seed=(seed + index) % 2**32, stop=stop, place=index,
        )  # fmt: skip


class _Form:
    def __init__(self, model: str, prompts: list[str], asked: shapes.Complete, seed: int) -> None:
        self._model, self._prompts, self._asked, self._seed = model, prompts, asked, seed
        self._id, self._created = f"cmpl-{token_hex(12)}", int(time.time())
        self._usage = shapes.Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        self._echoed, self._ended = set[int](), 0

    def _completion(self, choices: list[CompletionChoice], usage: shapes.Usage | None = None) -> shapes.Completion:
        return shapes.Completion(
            id=self._id, created=self._created, model=self._model, choices=choices, usage=usage, seed=self._seed
        )  # fmt: skip

    def _count(self, done: Done) -> None:
        use = self._usage
        use.prompt_tokens += done.read if done.place % (self._asked.n or 1) == 0 else 0
        use.completion_tokens += done.drawn
        use.total_tokens = use.prompt_tokens + use.completion_tokens

    def _echo(self, index: int) -> str:
        if not self._asked.echo or index in self._echoed:
            return ""
        self._echoed.add(index)
        return self._prompts[index // (self._asked.n or 1)]

    def whole(self, events: list[Any]) -> Response:
        done = [one for one in events if isinstance(one, Done)]
        for one in done:
            self._count(one)
        choices = [_choice(self._echo(one.place) + one.text, one) for one in done]
        return json_answer(self._completion(choices, self._usage))

    def events(self, event: AnswerPiece | Done) -> list[bytes]:
        text = self._echo(event.place)
        if isinstance(event, AnswerPiece):
            return sse(self._completion([CompletionChoice(text=text + event.text, index=event.place)]))
        self._count(event)
        self._ended += 1
        found = sse(self._completion([_choice(text, event)]))
        options = self._asked.stream_options
        if options is not None and options.include_usage and self._ended == len(self._prompts) * (self._asked.n or 1):
            found += sse(self._completion([], self._usage))
        return found


def _choice(text: str, done: Done) -> CompletionChoice:
    reason: Any = "length" if done.is_cut else "stop"
    unknown = [*done.unknown] or msgspec.UNSET
    return CompletionChoice(text=text, index=done.place, finish_reason=reason, unknown=unknown)


class OwnApi:
    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    async def answer(self, request: Request) -> Any:
        """Translate or continue a text; events `piece`, then `done`."""
        asked = await self._desk.asked(request, shapes.AnswerQuestion)
        self._desk.check_text(asked.text, asked.prefix)
        served, ticket = self._desk.model(asked.model), Ticket()
        work = RequestWork(ticket, lambda: served.answer(asked), alone=bool(asked.edits))
        return self._desk.answered(served, work, event=_event)

    async def attention(self, request: Request) -> Any:
        asked = await self._desk.asked(request, shapes.AttentionQuestion)
        served = self._checked(asked)
        looks = self._desk.recent[served.name]
        return self._desk.once(served, lambda: looks.numbers(asked), render=lambda events: json_answer(events[0]))

    async def view(self, request: Request) -> Any:
        asked = await self._desk.asked(request, shapes.ViewQuestion)
        served, looks = self._recent(asked)
        return self._desk.once(served, lambda: looks.view(asked.subjects), render=lambda events: json_answer(events[0]))

    async def weights(self, request: Request) -> Any:
        """Weights of a view: rows, columns and tiles, when the page asks for them."""
        asked = await self._desk.asked(request, shapes.WeightsQuestion)
        served, looks = self._recent(asked)

        def render(events: list[Any]) -> Response:
            return Response(events[0], media_type="application/octet-stream")

        return self._desk.once(
            served, lambda: reply_bytes(looks.weights(asked.subjects, asked.question)), render=render
        )  # fmt: skip

    def _recent(self, asked: shapes.ViewQuestion) -> tuple[Served, RecentViews]:
        served, *_ = [self._checked(one) for one in asked.subjects]
        return served, self._desk.recent[served.name]

    def _checked(self, asked: shapes.LookedAt) -> Served:
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
