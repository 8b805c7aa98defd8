"""Completions: their seeds, their ends, and fields that are none."""

import json
from typing import Any

import pytest

from tests.serving.conftest import TRANSLATOR, WRITER, Running

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


@pytest.mark.parametrize("model", [TRANSLATOR, WRITER])
def test_an_answer_of_ours_tells_its_seed_too(server: Running, model: str) -> None:
    question = {"text": "we see two", "model": model, "temperature": 2.0, "max_tokens": 9}
    (first, seed), (_, other) = (answered(server, question) for _ in range(2))
    assert seed != other
    assert answered(server, question | {"seed": seed}) == (first, seed)
    assert answered(server, question | {"seed": 0})[1] == 0


def answered(server: Running, question: Any) -> tuple[str, int]:
    status, body, _ = server.ask("/regard/v1/answer", question)
    assert status == 200
    done = json.loads(body.decode().split("event: done\ndata: ")[1])
    return done["text"], done["seed"]


def test_a_stop_string_in_the_last_token_is_a_stop(server: Running) -> None:
    plain = DRAWN | {"temperature": 0}
    text = server.json("/v1/completions", plain)["choices"][0]["text"]
    for most in range(1, len(text) + 1):
        (choice,) = server.json("/v1/completions", plain | {"max_tokens": most, "stop": text[most - 1]})["choices"]
        assert (choice["text"], choice["finish_reason"]) == (text[: text.index(text[most - 1])], "stop")


UNKNOWN = {
    "/v1/completions": {"model": WRITER, "prompt": "1"},
    "/translate": {"q": "we see", "source": "en", "target": "fr"},
    "/regard/v1/answer": {"text": "we see"},
    "/regard/v1/attention": {"text": "we see"},
}


@pytest.mark.parametrize("path", UNKNOWN)
def test_unknown_fields_are_named(server: Running, path: str) -> None:
    for extra in ({"top_k": 0}, {"typo_temprature": None}, {"min_p": 0.5, "ignore_eos": True}):
        status, body, _ = server.ask(path, UNKNOWN[path] | extra)
        assert status == 400
        assert f"unknown fields: {', '.join(extra)}; the fields are" in body.decode()


def test_fields_of_the_senders_own_are_taken(server: Running) -> None:
    own = {"user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {}, "suffix": "", "best_of": 1}
    assert server.ask("/v1/completions", UNKNOWN["/v1/completions"] | own)[0] == 200
    refused = {"logit_bias": {"5": 1}, "stream_options": {"other": 1}, "best_of": 2, "logprobs": 0}
    for name, value in refused.items():
        status, body, _ = server.ask("/v1/completions", UNKNOWN["/v1/completions"] | {name: value})
        assert (status, name in body.decode()) == (400, True)


def test_a_form_has_each_field_once(server: Running) -> None:
    form: dict[str, Any] = {"content_type": "application/x-www-form-urlencoded"}
    status, body, _ = server.ask("/translate", body=b"q=a&q=b&source=en&source=de&target=fr", **form)
    assert (status, b"given twice: source" in body) == (400, True)
