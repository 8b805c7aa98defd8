"""Requests that are wrong, foreign, endless or slow: each is answered rightly, and the server goes on."""

import json
import logging
import socket
import time
from typing import Any

import pytest

from regard.errors import ArgumentError
from regard.serving.guard import refuse_open
from regard.serving.served import Served
from regard.tasks.translation.translation_model import TranslationOptions
from tests.serving.conftest import TRANSLATOR, WRITER, Running, serving

GOOD = {"q": "we see two cats", "source": "en", "target": "fr"}
FORM = b"q=a&source=en&target=fr"
AS_FORM: dict[str, Any] = {"content_type": "application/x-www-form-urlencoded"}


@pytest.fixture(autouse=True)
def _goes_on(server: Running) -> Any:
    yield
    assert server.json("/translate", GOOD)["translatedText"]


def raw(server: Running, head: str, *, more: bytes = b"") -> bytes:
    with socket.create_connection(("127.0.0.1", server.port), timeout=10) as one:
        one.sendall(head.replace("\n", "\r\n").encode("latin-1") + more)
        return one.recv(4_000)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:80", "127.0.0.1.evil.example", "", "localhost@evil"])
def test_a_rebound_name_is_another_server(server: Running, host: str) -> None:
    """A page of evil.example whose name has come to mean 127.0.0.1."""
    assert b" 421 " in raw(server, f"GET /v1/models HTTP/1.1\nHost: {host}\n\n")


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:1", "127.0.0.1", "[::1]:80", "example.org", "example.org."])
def test_names_of_the_server_are_answered(server: Running, host: str) -> None:
    assert b" 200 " in raw(server, f"GET /health HTTP/1.1\nHost: {host}\nConnection: close\n\n")


@pytest.mark.parametrize(
    "headers",
    [
        {"origin": "http://evil.example"}, {"origin": "null"}, {"origin": "http://127.0.0.1:1"},
        {"sec_fetch_site": "cross-site"}, {"sec_fetch_site": "same-site"},
        {"origin": "http://["}, {"origin": "http://[::1"}, {"origin": "http://a]b"}, {"origin": "http://[none]"},
        {"origin": ""}, {"origin": "://"},
    ],
)  # fmt: skip
def test_a_form_of_another_page_is_refused(server: Running, headers: dict[str, Any]) -> None:
    status, _, answered = server.ask("/translate", body=FORM, **AS_FORM, **headers)
    assert status == 403
    assert not [name for name in answered if name.lower().startswith("access-control")]
    status, _, answered = server.ask("/translate", method="OPTIONS", origin="http://evil.example")
    assert (status, answered["access-control-allow-origin"]) == (403, None)


def test_the_page_itself_may_ask(server: Running) -> None:
    own: dict[str, Any] = {"origin": server.address, "sec_fetch_site": "same-origin"}
    assert server.ask("/translate", GOOD, **own)[0] == 200


def test_a_body_of_a_gigabyte_is_not_read(server: Running) -> None:
    head = "POST /translate HTTP/1.1\nHost: localhost\nContent-Type: application/json\n"
    assert b" 413 " in raw(server, f"{head}Content-Length: {2**30}\n\n", more=b"x" * 1000)
    assert b" 413 " in raw(server, f"{head}Content-Length: {10**18}\n\n")
    chunk = b"10000\r\n" + b" " * 2**16 + b"\r\n"
    assert b" 413 " in raw(server, f"{head}Transfer-Encoding: chunked\n\n", more=chunk * 17)
    for wrong in ("-1", "1e3", "9, 8", str(10**30)):
        assert b" 400 " in raw(server, f"{head}Content-Length: {wrong}\n\n")


def test_a_body_that_trickles_ends(models: dict[str, Served]) -> None:
    with serving(models, max_seconds=1) as server:
        head = "POST /translate HTTP/1.1\nHost: localhost\nContent-Type: application/json\nContent-Length: 99\n\n{"
        assert b" 408 " in raw(server, head)


def test_odd_texts_are_translated(server: Running) -> None:
    for text in ("a\0b", "\0", "x" * 4_000, "\u202eabc", "😀" * 400, "", " \n ", "\r\n", "<b>", "\ufdd0"):
        status, body, _ = server.ask("/translate", GOOD | {"q": text})
        assert status == 200 or (status == 400 and b"tokens" in body), (text[:9], body)


SEEN = {"text": "we see"}
WRITTEN = {"model": WRITER, "prompt": "1"}
ATTENTION, ANSWER, VIEW, WEIGHTS = (f"/regard/v1/{name}" for name in ("attention", "answer", "view", "view/weights"))
TRANSLATE, COMPLETIONS = "/translate", "/v1/completions"
KNOWN = {COMPLETIONS: WRITTEN, TRANSLATE: GOOD, ANSWER: SEEN, ATTENTION: SEEN}
UNKNOWN: list[dict[str, Any]] = [{"top_k": 0}, {"typo_temprature": None}, {"min_p": 0.5, "ignore_eos": True}]
QUESTIONS: list[tuple[str, dict[str, Any], int, str]] = [
    (TRANSLATE, GOOD | {"q": 5}, 400, ""),
    (TRANSLATE, GOOD | {"alternatives": 11}, 400, ""),
    (TRANSLATE, GOOD | {"target": "de"}, 400, ""),
    (TRANSLATE, GOOD | {"q": "x" * 100_000}, 400, ""),
    (TRANSLATE, GOOD | {"q": ["x"] * 1_001}, 400, ""),
    (TRANSLATE, GOOD | {"format": "html"}, 400, 'format must be \\"text\\": HTML is not translated'),
    (ATTENTION, {"text": "we see two cats", "maps": ["decoder.9"]}, 400, ""),
    (ATTENTION, {"text": "we see two cats", "heads": [2]}, 400, ""),
    (ATTENTION, {"text": "we see two cats", "rows": [99]}, 400, ""),
    (ATTENTION, {"text": "we see two cats", "tokens": [999_999]}, 400, ""),
    (ATTENTION, {"text": "we see two cats", "tokens": [7] * 600}, 400, ""),
    (ATTENTION, {"text": "", "top_keys": 1}, 400, ""),
    (ATTENTION, {"text": "x", "model": WRITER, "alignment": True}, 400, ""),
    (ATTENTION, {"text": "x", "model": WRITER, "tokens": [999_999]}, 400, ""),
    (ATTENTION, {"text": "x", "model": "../../etc/passwd"}, 404, "there is no model"),
    (ANSWER, {"text": "we see", "edits": [{"map": "decoder.0.cross", "head": 9}]}, 400, ""),
    (ANSWER, {"text": "we see", "edits": [{"map": "target_embedding", "head": 0}]}, 400, ""),
    (ANSWER, {"text": "1 " * 2_000, "model": WRITER}, 400, ""),
    (VIEW, {"subjects": []}, 400, ""),
    (WEIGHTS, {"subjects": [{"text": "we see"}], "question": {"ask": "all"}}, 400, ""),
    (WEIGHTS, {"subjects": [{"text": "we see"}], "question": {"ask": "row", "at": "x"}}, 400, ""),
    (COMPLETIONS, {"model": WRITER, "prompt": "1 " * 300}, 400, ""),
    (COMPLETIONS, WRITTEN | {"stop": [""]}, 400, ""),
    (COMPLETIONS, WRITTEN | {"n": 16, "max_tokens": 1, "stop": "x" * 9}, 200, ""),
    (COMPLETIONS, WRITTEN | {"logit_bias": {"5": 1}}, 400, "logit_bias"),
    (COMPLETIONS, WRITTEN | {"stream_options": {"other": 1}}, 400, "stream_options"),
    (COMPLETIONS, WRITTEN | {"best_of": 2}, 400, "best_of"),
    (COMPLETIONS, WRITTEN | {"logprobs": 0}, 400, "logprobs"),
    (COMPLETIONS, WRITTEN | {"user": "me", "metadata": {"a": "b"}, "store": False, "logit_bias": {}}, 200, ""),
    (COMPLETIONS, WRITTEN | {"suffix": "", "best_of": 1}, 200, ""),
    *(
        (path, question | extra, 400, f"unknown fields: {', '.join(extra)}; the fields are")
        for path, question in KNOWN.items()
        for extra in UNKNOWN
    ),
]


@pytest.mark.parametrize(("path", "question", "expected", "said"), QUESTIONS)
def test_a_wrong_question_is_told_why(
    server: Running, path: str, question: dict[str, Any], expected: int, said: str
) -> None:
    status, answer, _ = server.ask(path, question)
    assert (status, said in answer.decode(), b"failed" in answer) == (expected, True, False), answer
    assert len(answer) > 33


JSON, FORMS, PLAIN = "application/json", "application/x-www-form-urlencoded", "text/plain"
BODIES: list[tuple[str, bytes, str, int, str]] = [
    (TRANSLATE, b'{"q": "\\ud800", "source": "en", "target": "fr"}', JSON, 400, ""),
    (TRANSLATE, b'{"q": "\xff\xfe", "source": "en", "target": "fr"}', JSON, 400, ""),
    *((TRANSLATE, body, JSON, 400, "") for body in (b"", b'["q"]', b'{"q": NaN}', b"[" * 100_000)),
    (TRANSLATE, b"q=%ed%a0%80&source=en&target=fr", FORMS, 400, ""),
    *((TRANSLATE, body, FORMS, 400, "") for body in (b"q=%ff", b"q=\xff", b"a&" * 2_000)),
    (TRANSLATE, b"q=a&q=b&source=en&source=de&target=fr", FORMS, 400, "given twice: source"),
    (TRANSLATE, FORM, PLAIN, 415, ""),
    *((path, b"{}", PLAIN, 415, "") for path in (ATTENTION, VIEW, WEIGHTS, COMPLETIONS)),  # a form of another page
    *((path, b"{}", JSON, 400, "") for path in (ATTENTION, VIEW, WEIGHTS, COMPLETIONS)),
]


@pytest.mark.parametrize(("path", "body", "kind", "expected", "said"), BODIES)
def test_a_wrong_body_is_told_why(server: Running, path: str, body: bytes, kind: str, expected: int, said: str) -> None:
    status, answer, _ = server.ask(path, body=body, content_type=kind)
    assert (status, said in answer.decode()) == (expected, True), answer
    assert path != TRANSLATE or len(json.loads(answer)["error"]) > 20


def test_every_answer_has_the_strict_headers(server: Running) -> None:
    for path in ("/", "/live.js", "/v1/models", "/nothing", "/%00", "/../../etc/passwd", "/openapi.json"):
        _, _, headers = server.ask(path)
        assert "default-src 'none'; script-src 'self'" in headers["content-security-policy"]
        assert "unsafe" not in headers["content-security-policy"]
        assert (headers["x-content-type-options"], headers["cache-control"]) == ("nosniff", "no-store")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.4", "example.org"])
def test_another_address_wants_a_token(host: str) -> None:
    with pytest.raises(ArgumentError, match="token_file"):
        refuse_open(host, None)
    refuse_open(host, "secret")
    for own in ("127.0.0.1", "127.9.9.9", "::1", "localhost"):
        refuse_open(own, None)


def test_nothing_of_a_request_is_printed(
    server: Running, capfd: pytest.CaptureFixture[str], logged: list[logging.LogRecord]
) -> None:
    server.ask("/translate", GOOD | {"q": "a private text"})
    server.ask("/regard/v1/attention", {"text": "a private text", "maps": ["none"]})
    with socket.create_connection(("127.0.0.1", server.port)) as one:  # a client that leaves in the midst of its body
        one.sendall(b"POST /translate HTTP/1.1\r\nHost: localhost\r\nContent-Length: 99\r\n\r\na private text")
    assert server.ask("/health")[0] == 200
    time.sleep(0.05)
    assert (capfd.readouterr(), [one for one in logged if one.levelname == "ERROR"]) == (("", ""), [])
    assert TRANSLATOR in server.desk.models


def test_a_sentence_longer_than_those_of_training_is_refused_at_every_door(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `translate` refuses it: the limit of a server is no other one."""
    text = "we see two cats and stars"
    served: Any = server.desk.models[TRANSLATOR]
    longest = len(served.translator.source_tokenizer.encode_batch([text])[0])
    monkeypatch.setattr(served.translator, "longest", longest)
    (said,) = {one.problem for one in served.translator.translate_window([text], TranslationOptions())}
    look = {"text": text, "model": TRANSLATOR}
    asked = {"/translate": GOOD | {"q": text}, "/regard/v1/attention": look, "/regard/v1/view": {"subjects": [look]}}
    for path, question in asked.items():
        status, body, _ = server.ask(path, question)
        assert (status, json.loads(body)["error"]) == (400, said), path
    assert said.encode() in server.ask("/regard/v1/answer", look)[1]
    monkeypatch.setattr(served.translator, "longest", longest + 1)
    assert server.ask("/regard/v1/attention", look)[0] == 200
