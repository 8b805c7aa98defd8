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
from regard.tasks.translation.options import TranslationOptions
from tests.serving.conftest import TRANSLATOR, WRITER, Running, serving

GOOD = {"q": "we see two cats", "source": "en", "target": "fr"}
FORM = b"q=a&source=en&target=fr"
AS_FORM: dict[str, Any] = {"content_type": "application/x-www-form-urlencoded"}


@pytest.fixture(autouse=True)
def _goes_on(server: Running) -> Any:
    yield
    assert server.json("/translate", GOOD)["translatedText"]


def raw(server: Running, head: str, *, more: bytes = b"") -> bytes:
    """The first bytes that come back for a request written by hand."""
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


BODIES = {
    "a lone surrogate": b'{"q": "\\ud800", "source": "en", "target": "fr"}',
    "bytes that are no UTF-8": b'{"q": "\xff\xfe", "source": "en", "target": "fr"}',
    "no object": b'["q"]',
    "a number for a text": b'{"q": 5, "source": "en", "target": "fr"}',
    "nothing": b"",
    "a deep list": b"[" * 100_000,
    "NaN": b'{"q": NaN}',
    "too many alternatives": json.dumps(GOOD | {"alternatives": 11}).encode(),
    "another language": json.dumps(GOOD | {"target": "de"}).encode(),
    "long words": json.dumps(GOOD | {"q": "x" * 100_000}).encode(),
    "too many texts": json.dumps(GOOD | {"q": ["x"] * 1_001}).encode(),
}


@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_wrong_body_is_told_why(server: Running, body: bytes) -> None:
    status, answer, _ = server.ask("/translate", body=body, content_type="application/json")
    assert status == 400
    assert len(json.loads(answer)["error"]) > 20


def test_odd_texts_are_translated(server: Running) -> None:
    for text in ("a\0b", "\0", "x" * 4_000, "\u202eabc", "😀" * 400, "", " \n ", "\r\n", "<b>", "\ufdd0"):
        status, body, _ = server.ask("/translate", GOOD | {"q": text})
        assert status == 200 or (status == 400 and b"tokens" in body), (text[:9], body)


@pytest.mark.parametrize("body", [b"q=%ed%a0%80&source=en&target=fr", b"q=%ff", b"q=\xff", b"a&" * 2_000])
def test_a_wrong_form_is_told_why(server: Running, body: bytes) -> None:
    assert server.ask("/translate", body=body, **AS_FORM)[0] == 400
    assert server.ask("/translate", body=FORM, content_type="text/plain")[0] == 415


@pytest.mark.parametrize(
    "path", ["/regard/v1/attention", "/regard/v1/view", "/regard/v1/view/weights", "/v1/completions"]
)
def test_other_types_of_bodies_are_refused(server: Running, path: str) -> None:
    assert server.ask(path, body=b"{}", content_type="text/plain")[0] == 415  # what a form of another page can send
    assert server.ask(path, body=b"{}", content_type="application/json")[0] == 400


QUESTIONS: list[tuple[str, Any, int]] = [
    ("/regard/v1/attention", {"text": "we see two cats", "maps": ["decoder.9"]}, 400),
    ("/regard/v1/attention", {"text": "we see two cats", "heads": [2]}, 400),
    ("/regard/v1/attention", {"text": "we see two cats", "rows": [99]}, 400),
    ("/regard/v1/attention", {"text": "we see two cats", "tokens": [999_999]}, 400),
    ("/regard/v1/attention", {"text": "we see two cats", "tokens": [7] * 600}, 400),
    ("/regard/v1/attention", {"text": "", "top_keys": 1}, 400),
    ("/regard/v1/attention", {"text": "x", "model": WRITER, "alignment": True}, 400),
    ("/regard/v1/attention", {"text": "x", "model": WRITER, "tokens": [999_999]}, 400),
    ("/regard/v1/attention", {"text": "x", "model": "../../etc/passwd"}, 404),
    ("/regard/v1/attention", {"text": "x", "unknown": 1}, 400),
    ("/regard/v1/answer", {"text": "we see", "edits": [{"map": "decoder.0.cross", "head": 9}]}, 400),
    ("/regard/v1/answer", {"text": "we see", "edits": [{"map": "target_embedding", "head": 0}]}, 400),
    ("/regard/v1/answer", {"text": "1 " * 2_000, "model": WRITER}, 400),
    ("/regard/v1/view", {"subjects": []}, 400),
    ("/regard/v1/view/weights", {"subjects": [{"text": "we see"}], "question": {"ask": "all"}}, 400),
    ("/regard/v1/view/weights", {"subjects": [{"text": "we see"}], "question": {"ask": "row", "at": "x"}}, 400),
    ("/v1/completions", {"model": WRITER, "prompt": "1 " * 300}, 400),
    ("/v1/completions", {"model": WRITER, "prompt": "1", "stop": [""]}, 400),
    ("/v1/completions", {"model": WRITER, "prompt": "1", "n": 16, "max_tokens": 1, "stop": "x" * 9}, 200),
]


@pytest.mark.parametrize(("path", "question", "expected"), QUESTIONS)
def test_a_wrong_question_is_told_why(server: Running, path: str, question: Any, expected: int) -> None:
    status, body, _ = server.ask(path, question)
    assert status == expected, body
    assert b"failed" not in body
    assert b"etc/passwd" not in body or b"there is no model" in body


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
