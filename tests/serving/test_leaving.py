"""Work stops at the next step when its client leaves; works wait in a bounded queue, or run together, or in turn."""

import asyncio
import http.client
import json
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from regard.nn.residual import Residual
from regard.serving.asking import Ending, HttpAnswer
from regard.serving.guard import Guard
from regard.serving.served import Served, ServedTranslator
from regard.serving.settings import Entrance, RequestLimits
from regard.serving.worker import ENDED, RequestWork, SharedWork, Ticket, Worker
from regard.tasks.generation.config import Beam
from regard.tasks.translation.translation_model import Request, TranslationOptions
from tests.serving.conftest import TRANSLATOR, WRITER, Running, serving


class Steps:
    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, seconds: float) -> None:
        self.count, step = 0, module.step

        def counted(*given: Any) -> Any:
            self.count += 1
            time.sleep(seconds)
            return step(*given)

        monkeypatch.setattr(module, "step", counted)


def begin(port: int, path: str, question: Any) -> http.client.HTTPConnection:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    connection.request("POST", path, json.dumps(question), {"content-type": "application/json"})
    return connection


def after(steps: Steps, left: int) -> int:
    time.sleep(0.3)
    count = steps.count
    time.sleep(0.15)
    assert steps.count == count
    return count - left


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/regard/v1/answer", {"text": "1 and", "model": WRITER, "max_tokens": 400}),
        ("/v1/completions", {"model": WRITER, "prompt": "1 and", "max_tokens": 400, "stream": True}),
        ("/v1/completions", {"model": WRITER, "prompt": "1 and", "max_tokens": 400, "temperature": 0}),
    ],
)
def test_a_client_that_leaves_stops_its_text(
    server: Running, monkeypatch: pytest.MonkeyPatch, path: str, question: Any
) -> None:
    served: Any = server.desk.models[WRITER]
    monkeypatch.setattr(type(served.model.language), "end_ids", (2,))
    monkeypatch.setattr(served.model.language, "writable", served.model.language.writable[1:])  # it never ends
    steps = Steps(monkeypatch, served.module, 0.02)
    connection = begin(server.port, path, question)
    while steps.count < 3:
        time.sleep(0.005)
    connection.sock.close() if connection.sock else None
    connection.close()
    left = steps.count
    assert after(steps, left) <= 2
    assert server.ask("/health")[0] == 200


@pytest.mark.parametrize(
    ("path", "question"),
    [
        ("/regard/v1/answer", {"text": "1 and 2 and 3", "model": WRITER}),
        ("/regard/v1/answer", {"text": "we see two cats", "model": TRANSLATOR}),
        ("/regard/v1/attention", {"text": "1 and 2 and 3", "model": WRITER, "top_keys": 1}),
        ("/regard/v1/attention", {"text": "we see two cats", "model": TRANSLATOR, "target": "on", "top_keys": 1}),
    ],
)
def test_a_client_that_leaves_while_its_text_is_read_stops_within_a_layer(
    server: Running, path: str, question: Any
) -> None:
    served, begun = server.desk.models[question["model"]], list[float]()
    layers = [one for one in served.module.modules() if isinstance(one, Residual)]

    def slow(*_: Any) -> None:
        begun.append(time.monotonic())
        time.sleep(0.2)

    hooks = [one.register_forward_hook(slow) for one in layers]
    try:
        connection = begin(server.port, path, question)
        while not begun:
            time.sleep(0.002)
        connection.close()
        time.sleep(0.7)
        assert len(begun) <= 2 < len(layers)  # a layer has two sublayers and more
        assert not any(one._forward_pre_hooks for one in layers)
    finally:
        for hook in hooks:
            hook.remove()
    assert server.ask("/health")[0] == 200


@pytest.mark.parametrize("beam", [1, 4])
def test_a_client_that_leaves_stops_its_translation(
    server: Running, monkeypatch: pytest.MonkeyPatch, beam: int
) -> None:
    one: Any = server.desk.models[TRANSLATOR]
    monkeypatch.setattr(one.translator, "searcher", None)
    steps = Steps(monkeypatch, one.module, 0.0)
    options = TranslationOptions(beam=Beam(beam), labels=False)
    stays, leaves = "we see two cats", Request("we see ten trees", is_wanted=lambda: steps.count < 2)
    (text,) = one.translator.translate_window([stays], options)
    alone, steps.count = steps.count, 0
    kept, _ = one.translator.translate_window([stays, leaves], options)
    assert kept.text == text.text  # those who stay get the same answer
    assert steps.count <= alone + 1
    steps.count = 0
    one.translator.translate_window([leaves], options)
    assert steps.count == 2 < alone


def test_a_translation_that_waits_is_never_begun(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = server.desk.models[TRANSLATOR]
    monkeypatch.setattr(one.translator, "searcher", None)
    steps = Steps(monkeypatch, one.module, 0.05)
    first = begin(server.port, "/translate", {"q": "we see two cats", "source": "en", "target": "fr"})
    while not steps.count:
        time.sleep(0.005)
    asked = {"q": "we see ten cats", "source": "en", "target": "fr", "alternatives": 1}
    second = begin(server.port, "/translate", asked)
    time.sleep(0.02)
    second.close()
    assert first.getresponse().status == 200
    left = steps.count
    first.close()
    assert after(steps, left) == 0


def test_requests_run_together_within_a_few_milliseconds(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = server.desk.models[TRANSLATOR]
    sizes: list[int] = []
    translate = ServedTranslator.translate

    def counted(self: Any, asked: Any) -> Any:
        sizes.append(len(asked))
        time.sleep(0.1)
        return translate(self, asked)

    monkeypatch.setattr(ServedTranslator, "translate", counted)
    texts = [f"we see {n} {thing}" for n in ("two", "six", "ten") for thing in ("cats", "trees")]
    found: dict[str, str] = {}

    def ask(text: str) -> None:
        found[text] = server.json("/translate", {"q": text, "source": "en", "target": "fr"})["translatedText"]

    threads = [threading.Thread(target=ask, args=(text,)) for text in texts]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sum(sizes) == len(texts)
    assert len(sizes) <= 3
    assert found == {text: next(iter(one.translator.translate([text]))).text for text in texts}


def test_streams_of_a_model_are_written_in_turn(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, server.desk.models[WRITER].module, 0.02)
    question = {"text": "1 and", "model": WRITER, "max_tokens": 60}
    long, short = (begin(server.port, "/regard/v1/answer", question | {"max_tokens": n}) for n in (60, 4))
    short.getresponse().read()
    assert steps.count < 40  # the short one did not wait for the long one
    for one in (long, short):
        one.close()


def test_a_full_queue_says_when_to_come_again(models: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    one: Any = models[TRANSLATOR]
    monkeypatch.setattr(one.translator, "searcher", None)
    Steps(monkeypatch, one.module, 0.05)
    with serving(models, max_waiting=2) as server:
        question = {"q": "we see two cats", "source": "en", "target": "fr"}
        begun = [begin(server.port, "/translate", question | {"alternatives": n}) for n in range(3)]
        time.sleep(0.1)
        begun += [begin(server.port, "/translate", question | {"alternatives": n}) for n in range(3, 6)]
        answers = [one.getresponse() for one in begun]
        statuses = [one.status for one in answers]
        assert set(statuses) == {200, 429}
        assert statuses.count(200) >= 3
        (refused, *_) = (one for one in answers if one.status == 429)
        assert int(refused.headers["retry-after"]) >= 1
        assert json.loads(refused.read()) == {"error": "2 requests wait already: come again"}
        for connection in begun:
            connection.close()


def test_an_answer_that_takes_too_long_is_ended(models: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    steps = Steps(monkeypatch, models[WRITER].module, 0.1)
    with serving(models, max_seconds=1) as server:
        question = {"model": WRITER, "prompt": "1 and", "max_tokens": 100, "seed": 0}
        status, body, _ = server.ask("/v1/completions", question)
        assert (status, json.loads(body)["error"]["message"]) == (503, "the answer took longer than 1 seconds")
        assert after(steps, steps.count) <= 2
        status, body, _ = server.ask("/v1/completions", question | {"stream": True})
        assert status == 200  # it had begun
        assert b"event: error" in body


def test_a_work_alone_is_not_interrupted() -> None:
    seen: list[str] = []

    def steps(name: str) -> Iterator[Any]:
        for _ in range(4):
            seen.append(name)
            yield name

    async def run() -> None:
        worker, tickets = Worker("test", most_waiting=9), [Ticket() for _ in range(3)]
        hold = threading.Event()
        worker.submit(RequestWork(Ticket(), lambda: iter([hold.wait()])))
        for ticket, name in zip(tickets, "abc", strict=True):
            worker.submit(RequestWork(ticket, lambda name=name: steps(name), alone=name == "b"))  # type: ignore[misc]
        hold.set()
        for ticket in tickets:
            while await ticket.next() is not ENDED:
                pass
        worker.close()

    asyncio.run(run())
    assert "".join(seen).count("bbbb") == 1
    assert sorted(seen) == sorted("aaaabbbbcccc")


def test_searches_run_beside_each_other_and_never_beside_steps() -> None:
    """Two groups are at work at once; a work of steps waits for both, and none begins until its end."""
    at_work, log, both = set[str](), list[str](), threading.Barrier(2)

    def search(asked: Sequence[Any]) -> Sequence[Any]:
        at_work.add(asked[0])
        if asked[0] in "ab":
            both.wait(10)  # each goes on only if the other has begun
        if threading.current_thread() is worker._threads[1]:
            time.sleep(0.1)  # the thread of the steps is ready before
        log.append(asked[0])
        at_work.remove(asked[0])
        return asked

    def steps() -> Iterator[Any]:
        for _ in range(3):
            log.append(f"step{''.join(at_work)}")
            yield None

    async def run() -> None:
        tickets = [Ticket() for _ in range(5)]
        for ticket, name in zip(tickets, "abscd", strict=True):
            worker.submit(RequestWork(ticket, steps) if name == "s" else SharedWork(ticket, name, name, search))
        for ticket in tickets:
            while await ticket.next() is not ENDED:
                pass

    worker = Worker("test", most_waiting=9, searches=2)
    asyncio.run(run())
    worker.close()
    assert sorted(log[:2]) == ["a", "b"]
    assert sorted(log[2:]) == ["c", "d", "step", "step", "step"]


def test_a_reader_who_takes_nothing_ends_the_work() -> None:
    """A client that stays and does not read: the server waits for it no longer than an answer may take."""
    sent: list[str] = []
    coming: list[Any] = [{"type": "http.request", "body": b""}]

    async def receive() -> Any:
        return coming.pop() if coming else await asyncio.sleep(60)

    async def send(message: Any) -> None:
        sent.append(message["type"])
        await asyncio.sleep(60 if message["type"] == "http.response.body" else 0)

    async def run() -> None:
        ticket = Ticket()
        ticket.tell(b"data: x\n\n")
        answer = HttpAnswer(ticket, event=lambda event: [event], seconds=9, ending=Ending())
        guard = Guard(answer, Entrance(hosts=frozenset({"localhost"})), RequestLimits(max_seconds=1))
        scope = {"type": "http", "method": "GET", "path": "/", "headers": [(b"host", b"localhost")]}
        await asyncio.wait_for(guard(scope, receive, send), 5)
        assert not ticket.is_wanted()

    asyncio.run(run())
    assert sent == ["http.response.start", "http.response.body"]
