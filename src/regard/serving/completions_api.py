"""OpenAI's addresses: the models, and completions of language models."""

import time
from collections.abc import Iterator
from secrets import token_hex
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from regard.serving.asking import Desk, json_answer, sse
from regard.serving.served import AnswerPiece, Done, ServedLanguageModel, drawn_seed
from regard.serving.shapes import Complete, Completion, CompletionChoice, ModelCard, ModelCards, Usage
from regard.serving.worker import Refused, RequestWork, Ticket

USUAL_TOKENS = 16
"""OpenAI's own default of `max_tokens`."""


class CompletionsApi:
    def __init__(self, desk: Desk) -> None:
        self._desk, self._made = desk, int(time.time())

    async def models(self, _: Request) -> Response:
        return json_answer(ModelCards(data=[self._card(name) for name in self._desk.models]))

    async def one_model(self, request: Request) -> Response:
        return json_answer(self._card(self._desk.model(request.path_params["name"]).name))

    async def complete(self, request: Request) -> Any:
        asked = await self._desk.asked(request, Complete)
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

    def _card(self, name: str) -> ModelCard:
        one = self._desk.models[name]
        languages = None if one.languages is None else list(one.languages)
        return ModelCard(
            id=name, created=self._made, task=one.task, maps=one.maps, heads=one.heads, languages=languages,
            examples=one.examples,
        )  # fmt: skip


def _steps(
    served: ServedLanguageModel, prompts: list[str], asked: Complete, seed: int
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
    def __init__(self, model: str, prompts: list[str], asked: Complete, seed: int) -> None:
        self._model, self._prompts, self._asked, self._seed = model, prompts, asked, seed
        self._id, self._created = f"cmpl-{token_hex(12)}", int(time.time())
        self._usage = Usage(prompt_tokens=0, completion_tokens=0, total_tokens=0)
        self._echoed, self._ended = set[int](), 0

    def _completion(self, choices: list[CompletionChoice], usage: Usage | None = None) -> Completion:
        return Completion(
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
        choices = [
            CompletionChoice(text=self._echo(one.place) + one.text, index=one.place, finish_reason=_reason(one))
            for one in done
        ]
        return json_answer(self._completion(choices, self._usage))

    def events(self, event: AnswerPiece | Done) -> list[bytes]:
        text = self._echo(event.place)
        if isinstance(event, AnswerPiece):
            return sse(self._completion([CompletionChoice(text=text + event.text, index=event.place)]))
        self._count(event)
        self._ended += 1
        found = sse(self._completion([CompletionChoice(text=text, index=event.place, finish_reason=_reason(event))]))
        options = self._asked.stream_options
        if options is not None and options.include_usage and self._ended == len(self._prompts) * (self._asked.n or 1):
            found += sse(self._completion([], self._usage))
        return found


def _reason(done: Done) -> Any:
    return "length" if done.is_cut else "stop"
