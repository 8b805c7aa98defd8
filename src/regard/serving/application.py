"""The application: every address in one table, of which the routes and the OpenAPI document are made."""

import re
from collections.abc import Callable
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from regard.serving import shapes
from regard.serving.addresses import CompletionsApi, OwnApi, TranslateApi
from regard.serving.asking import Desk
from regard.serving.guard import Guard, refusal
from regard.serving.settings import Entrance
from regard.serving.worker import Refused
from regard.views.html.page import one_module, resource, script
from regard.views.widget.skeleton import live_sources

JSON, FORM, STREAM, BYTES = (
    "application/json", "application/x-www-form-urlencoded", "text/event-stream", "application/octet-stream",
)  # fmt: skip


class Address(NamedTuple):
    path: str
    act: Callable[[Request], Any]
    summary: str
    takes: Any = None
    gives: Any = None
    takes_as: tuple[str, ...] = (JSON,)
    gives_as: tuple[str, ...] = (JSON,)

    @property
    def method(self) -> str:
        return "GET" if self.takes is None else "POST"


def served_addresses(desk: Desk) -> list[Address]:
    translate, completions, own = TranslateApi(desk), CompletionsApi(desk), OwnApi(desk)
    s = shapes
    return [
        Address("/translate", translate.translate, "Translate", s.TranslateQuestion, s.Translated, (JSON, FORM)),
        Address("/languages", translate.languages, "The languages", None, list[s.Language]),
        Address("/health", translate.health, "Whether the server answers", None, s.Health),
        Address("/v1/models", completions.models, "The models", None, s.ModelCards),
        Address("/v1/models/{name}", completions.one_model, "A model", None, s.ModelCard),
        Address(
            "/v1/completions", completions.complete, "Continue prompts", s.Complete, s.Completion, (JSON,),
            (JSON, STREAM),
        ),
        Address("/regard/v1/answer", own.answer, "An answer as it is written", s.AnswerQuestion, gives_as=(STREAM,)),
        Address("/regard/v1/attention", own.attention, "Numbers of heads", s.AttentionQuestion, s.AttentionNumbers),
        Address("/regard/v1/view", own.view, "Data of the page", s.ViewQuestion, dict[str, Any]),
        Address("/regard/v1/view/weights", own.weights, "Weights of a view", s.WeightsQuestion, gives_as=(BYTES,)),
    ]  # fmt: skip


def application(desk: Desk, entrance: Entrance) -> Guard:
    every = served_addresses(desk)
    described = msgspec.json.encode(openapi(every, desk.version))

    async def document(_: Request) -> Response:
        return Response(described, media_type=JSON)

    routes = [Route(one.path, _speaking(one), methods=[one.method]) for one in every]
    routes += [Route("/openapi.json", document), *(Route(path, one) for path, one in _page().items())]
    app = Starlette(routes=routes, exception_handlers={HTTPException: _told, Refused: _told, Exception: _failed})
    desk.guard = Guard(app, entrance, desk.limits)
    return desk.guard


def _speaking(address: Address) -> Callable[[Request], Any]:
    is_openai = address.path.startswith("/v1/")

    async def act(request: Request) -> Any:
        try:
            return await address.act(request)
        except Refused as error:
            return refusal(error, openai=is_openai)
        except (msgspec.ValidationError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            return refusal(Refused(400, f"the body cannot be read: {error}"), openai=is_openai)

    return act


async def _told(request: Request, error: Any) -> Response:
    given = (
        error if isinstance(error, Refused) else Refused(error.status_code, f"{request.method} here: {error.detail}")
    )
    answer = refusal(given, openai=request.url.path.startswith("/v1/"))
    answer.headers.update(getattr(error, "headers", None) or {})
    return answer


async def _failed(request: Request, _: Exception) -> Response:
    return refusal(Refused(500, "the server failed"), openai=request.url.path.startswith("/v1/"))


# -- OpenAPI ------------------------------------------------------------------------------------------------


def openapi(every: list[Address], version: str) -> dict[str, Any]:
    kinds = [kind for one in every for kind in (one.takes, one.gives, _problem(one)) if kind is not None]
    kinds = list(dict.fromkeys([*kinds, shapes.Problem]))
    found, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    schema, paths = dict(zip(kinds, found, strict=True)), dict[str, Any]()
    for one in every:
        paths.setdefault(one.path, {})[one.method.lower()] = _operation(one, schema)
    return {
        "openapi": "3.1.0",
        "info": {"title": "regard serve", "version": version, "description": "Models and their attention."},
        "paths": paths,
        "components": {"schemas": components, "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}}},
        "security": [{}, {"token": []}],
    }


def _problem(one: Address) -> Any:
    return shapes.OpenAIProblem if one.path.startswith("/v1/") else shapes.Problem


def _operation(one: Address, schema: dict[Any, Any]) -> dict[str, Any]:
    def content(kind: Any, forms: tuple[str, ...]) -> dict[str, Any]:
        return {form: {"schema": schema[kind] if kind is not None and form in (JSON, FORM) else {}} for form in forms}

    words = {400: "a wrong question", 401: "no token", 403: "another origin", 404: "no such model",
             408: "too slow", 413: "too long", 415: "another type of body", 421: "another host",
             429: "too many wait", 501: "a library is missing", 503: "too late, or the server ends"}  # fmt: skip
    answers: dict[str, Any] = {"200": {"description": "the answer", "content": content(one.gives, one.gives_as)}}
    problem = {form: {"schema": schema[_problem(one)]} for form in (JSON,)}
    answers |= {str(status): {"description": word, "content": problem} for status, word in words.items()}
    made: dict[str, Any] = {"summary": one.summary, "responses": answers}
    if one.takes is not None:
        made["requestBody"] = {"required": True, "content": content(one.takes, one.takes_as)}
    if names := re.findall(r"\{(\w+)\}", one.path):
        made["parameters"] = [
            {"name": name, "in": "path", "required": True, "schema": {"type": "string"}} for name in names
        ]
    return made


# -- the page -----------------------------------------------------------------------------------------------


def _page() -> dict[str, Callable[[Request], Any]]:
    def serving(make: Callable[[], str], kind: str) -> Callable[[Request], Any]:
        async def act(_: Request) -> Response:
            return Response(make(), media_type=kind)

        return act

    return {
        "/": serving(lambda: _own("live.html"), "text/html"),
        "/live.css": serving(lambda: f"{resource('page.css')}\n{_own('live.css')}", "text/css"),
        "/live.js": serving(live_script, "text/javascript"),
    }


@cache
def live_script() -> str:
    """The JavaScript of the live page as one module: that of the page, of the view in notebooks, and its own.

    >>> "import " in live_script()
    False
    """
    return one_module([script(), *live_sources(), _own("live_answer.js"), _own("live.js")])


def _own(name: str) -> str:
    return files("regard.serving.live").joinpath(name).read_text(encoding="utf-8").rstrip("\n")
