"""The clients of LibreTranslate and OpenAI, unchanged, and the questions that they send."""

import json
import shlex
from typing import Any
from urllib.error import HTTPError
from urllib.parse import quote

import openai
import pytest
from libretranslatepy import LibreTranslateAPI

from regard.serving.served import ServedLanguageModel, ServedTranslator
from regard.tasks.generation.filters import Temperature, TopK, TopP
from regard.tasks.translation import results
from tests import ROOT
from tests.serving.conftest import TRANSLATOR, WRITER, Running, serving

SENTENCE = "we see two cats"


def translated(server: Running, text: str) -> str:
    one = server.desk.models[TRANSLATOR]
    assert isinstance(one, ServedTranslator)
    return next(iter(one.translator.translate([text]))).text


def test_libretranslates_client_translates(server: Running) -> None:
    client = LibreTranslateAPI(server.address)
    assert client.translate(SENTENCE, "en", "fr") == translated(server, SENTENCE) != ""
    assert client.languages() == [{"code": "en", "name": "en", "targets": ["fr"]}]
    with pytest.raises(HTTPError, match="404"):  # nothing here tells languages
        client.detect(SENTENCE)
    with pytest.raises(HTTPError, match="400"):
        client.translate(SENTENCE, "de", "fr")


def test_lists_lines_and_alternatives_keep_their_places(server: Running) -> None:
    texts = [SENTENCE, "", "we see six trees\n\nwe see ten stars"]
    question = {"q": texts, "source": "auto", "target": "fr", "alternatives": 2}
    found = server.json("/translate", question)
    expected = ["\n".join(translated(server, line) if line else "" for line in text.split("\n")) for text in texts]
    assert found["translatedText"] == expected
    assert [len(some) for some in found["alternatives"]] == [2, 0, 2]
    assert all(other != best for best, some in zip(expected, found["alternatives"], strict=True) for other in some)
    form = b"q=we+see+two+cats&q=we+see+ten+stars&source=en&target=fr"
    _, body, _ = server.ask("/translate", body=form, content_type="application/x-www-form-urlencoded")
    assert json.loads(body)["translatedText"] == [translated(server, SENTENCE), translated(server, "we see ten stars")]


def test_text_that_the_vocabulary_lacks_is_told(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(results, "unknown_texts", lambda _, text, ids: ["six"] if "six" in text else [])
    question = {"q": [SENTENCE, "we see six trees\nsix"], "source": "en", "target": "fr"}
    assert server.json("/translate", question)["unknown"] == [[], ["six", "six"]]
    assert server.json("/translate", question | {"q": "six"})["unknown"] == ["six"]
    assert "unknown" not in server.json("/translate", question | {"q": SENTENCE})
    _, body, _ = server.ask("/regard/v1/answer", {"text": "1 \u0967 and", "model": WRITER, "max_tokens": 1})
    assert '"unknown":["\u0967"]' in body.decode().replace(": ", ":")
    asked: dict[str, Any] = {"model": WRITER, "prompt": ["1 \u0967 and", "1 and"], "max_tokens": 1}
    assert [one.get("unknown") for one in server.json("/v1/completions", asked)["choices"]] == [["\u0967"], None]


def client_of(server: Running, key: str = "none") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.address}/v1", api_key=key, max_retries=0)


def test_openais_client_completes_and_streams(server: Running) -> None:
    client, one = client_of(server), server.desk.models[WRITER]
    assert isinstance(one, ServedLanguageModel)
    assert [model.id for model in client.models.list()] == [TRANSLATOR, WRITER]
    assert client.models.retrieve(WRITER).id == WRITER
    asked: dict[str, Any] = {"model": WRITER, "prompt": "1 and", "max_tokens": 9, "temperature": 0}
    whole = client.completions.create(**asked)
    expected = "".join(one.model.generate("1 and", max_tokens=9, filters=[TopK(1)]))
    assert whole.choices[0].text == expected
    assert whole.usage is not None
    assert (whole.usage.prompt_tokens, whole.usage.completion_tokens) == (6, 9)
    pieces = list(client.completions.create(**asked, stream=True, stream_options={"include_usage": True}))
    assert "".join(choice.text for piece in pieces for choice in piece.choices) == expected
    assert len(pieces) > 5
    assert pieces[-1].usage == whole.usage
    assert whole.choices[0].finish_reason == pieces[-2].choices[0].finish_reason == "length"
    several = client.completions.create(**asked | {"prompt": ["1", "2"], "n": 2, "echo": True, "temperature": 1.0})
    assert [(choice.index, choice.text[0]) for choice in several.choices] == [(0, "1"), (1, "1"), (2, "2"), (3, "2")]
    stopped = client.completions.create(**asked | {"stop": expected[4]})
    (choice,) = stopped.choices
    assert (choice.text, choice.finish_reason) == (expected[: expected.index(expected[4])], "stop")


def test_openais_client_hears_why(server: Running) -> None:
    client = client_of(server)
    with pytest.raises(openai.NotFoundError, match="there is no model 'other'; the models are mine, book"):
        client.completions.create(model="other", prompt="x")
    with pytest.raises(openai.BadRequestError, match="mine translates"):
        client.completions.create(model=TRANSLATOR, prompt="x")
    with pytest.raises(openai.BadRequestError, match=r"`float` <= 0"):
        client.completions.create(model=WRITER, prompt="x", presence_penalty=1.0)
    with pytest.raises(openai.BadRequestError, match="max_tokens must be at most 512, got 513"):
        client.completions.create(model=WRITER, prompt="x", max_tokens=513)


def test_both_clients_bring_the_token(server: Running) -> None:
    with serving(server.desk.models, token="secret") as guarded:
        assert client_of(guarded, "secret").models.list().data
        assert LibreTranslateAPI(guarded.address, "secret").translate(SENTENCE, "en", "fr")
        assert LibreTranslateAPI(guarded.address, "secret").languages()
        with pytest.raises(openai.AuthenticationError):
            client_of(guarded, "guess").models.list()
        for client in (LibreTranslateAPI(guarded.address), LibreTranslateAPI(guarded.address, "secre")):
            with pytest.raises(HTTPError, match="401"):
                client.translate(SENTENCE, "en", "fr")
            with pytest.raises(HTTPError, match="401"):
                client.languages()
        assert [guarded.ask(path)[0] for path in ("/", "/health")] == [200, 200]
        assert [guarded.ask(path)[0] for path in ("/openapi.json", "/v1/models")] == [401, 401]


def test_the_curl_lines_of_the_page_are_answered(server: Running) -> None:
    """As they stand in the docs, at another port."""
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    lines = [shlex.split(line[2:]) for line in text.split("\n") if line.startswith("$ curl")]
    assert len(lines) == 5
    for _, *arguments, address in lines:
        path = "/" + address.split("/", 3)[3]
        if arguments[0] == "--json":
            status, body, _ = server.ask(path, json.loads(arguments[1]))
        else:
            form = "&".join(quote(pair, safe="=") for pair in arguments[1::2])
            status, body, _ = server.ask(path, body=form.encode(), content_type="application/x-www-form-urlencoded")
        assert (status, body[:9] != b"") == (200, True), (arguments, body)


DRAWN: dict[str, Any] = {"model": WRITER, "prompt": "1 and", "max_tokens": 12, "temperature": 2.0}


def test_draws_without_a_seed_differ_and_tell_theirs(server: Running) -> None:
    found = [server.json("/v1/completions", DRAWN | {"n": 2}) for _ in range(3)]
    assert len({choice["text"] for one in found for choice in one["choices"]}) > 3
    assert len({one["seed"] for one in found}) == 3
    again = server.json("/v1/completions", DRAWN | {"n": 2, "seed": found[0]["seed"]})
    assert (again["choices"], again["seed"]) == (found[0]["choices"], found[0]["seed"])
    twice = server.json("/v1/completions", DRAWN | {"prompt": ["1 and", "1 and"], "seed": found[0]["seed"]})
    assert [one["text"] for one in twice["choices"]] == [one["text"] for one in found[0]["choices"]]
    assert server.json("/v1/completions", DRAWN | {"seed": 0})["seed"] == 0


def test_every_field_reaches_the_search(server: Running) -> None:
    one: Any = server.desk.models[WRITER]
    prompts, stop, drawn = ["1 and", "2"], ["3"], list[int]()
    asked = {"model": WRITER, "prompt": prompts, "n": 2, "seed": -1, "temperature": 1.5, "top_p": 0.8, "stop": stop}
    found = server.json("/v1/completions", asked)
    assert found["seed"] == 2**32 - 1
    for index, choice in enumerate(found["choices"]):
        how: dict[str, Any] = {"filters": [Temperature(1.5), TopP(0.8)], "stop": stop, "drawn": drawn.append}
        seed = (found["seed"] + index) % 2**32
        assert choice["text"] == "".join(one.model.generate(prompts[index // 2], max_tokens=16, seed=seed, **how))
    assert found["usage"]["completion_tokens"] == len(drawn)
    lines = {"q": "we see\r\ntwo cats", "source": "en", "target": "fr"}
    told = server.json("/translate", lines)
    assert list(told) == ["translatedText"]
    assert told["translatedText"] == "\r\n".join(translated(server, line) for line in lines["q"].split("\r\n"))
    assert len(server.json("/translate", lines | {"alternatives": 1})["alternatives"]) == 1
    written, whole = done(server, {"text": "1 ", "prefix": "and", "model": WRITER}), one.model.language.prompt("1 and")
    assert written["text"] == "".join(one.model.generate("1 and", max_tokens=64, filters=[TopK(1)]))
    assert written["tokens"][: len(whole)] == whole
    assert len(done(server, {"text": SENTENCE, "max_tokens": 2})["tokens"]) == 2
    begun = done(server, {"text": SENTENCE, "prefix": "six", "max_tokens": 9})
    assert begun["text"].startswith("six")


@pytest.mark.parametrize("model", [TRANSLATOR, WRITER])
def test_an_answer_of_ours_tells_its_seed_too(server: Running, model: str) -> None:
    question = {"text": "we see two", "model": model, "temperature": 2.0, "max_tokens": 9}
    (first, seed), (_, other) = (answered(server, question) for _ in range(2))
    assert seed != other
    assert answered(server, question | {"seed": seed}) == (first, seed)
    assert answered(server, question | {"seed": 0})[1] == 0


def done(server: Running, question: Any) -> dict[str, Any]:
    _, body, _ = server.ask("/regard/v1/answer", question)
    return dict(json.loads(body.decode().split("event: done\ndata: ")[1]))


def answered(server: Running, question: Any) -> tuple[str, int]:
    found = done(server, question)
    return found["text"], found["seed"]


def test_a_stop_string_in_the_last_token_is_a_stop(server: Running) -> None:
    plain = DRAWN | {"temperature": 0}
    text = server.json("/v1/completions", plain)["choices"][0]["text"]
    for most in range(1, len(text) + 1):
        (choice,) = server.json("/v1/completions", plain | {"max_tokens": most, "stop": text[most - 1]})["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[most - 1])], "stop")
