"""Two small models behind a server in this process, for all tests of the folder."""

import http.client
import json
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import uvicorn

from regard.serving.application import application
from regard.serving.asking import Desk
from regard.serving.guard import allowed_hosts
from regard.serving.served import Served
from regard.serving.server import load_model, load_models
from regard.serving.settings import Entrance, RequestLimits
from regard.tasks import train_language_model
from regard.tasks.translation.train import run_translation
from tests.tasks.small_runs import small_config, small_text_config
from tests.views.conftest import browser as browser

LOAD = partial(load_model, device="cpu", limits=RequestLimits(), threads=1, tell=lambda _: None)
TRANSLATOR, WRITER = "mine", "book"


@dataclass(frozen=True)
class Running:
    port: int
    desk: Desk

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self, path: str, question: Any = None, *, body: bytes | None = None, method: str = "", **headers: Any
    ) -> tuple[int, bytes, http.client.HTTPMessage]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        if question is not None:
            body, named = json.dumps(question).encode(), {"content-type": "application/json", **named}
        try:
            connection.request(method or ("GET" if body is None else "POST"), path, body, named)
            answer = connection.getresponse()
            return answer.status, answer.read(), answer.headers
        finally:
            connection.close()

    def json(self, path: str, question: Any = None, **headers: Any) -> Any:
        status, body, _ = self.ask(path, question, **headers)
        assert status == 200, body
        return json.loads(body)


@contextmanager
def serving(models: Mapping[str, Served], *, token: str | None = None, **limits: Any) -> Iterator[Running]:
    with ExitStack() as stack:
        desk = Desk(models, RequestLimits(**limits), version="test")
        stack.callback(desk.close)
        app = application(desk, Entrance(hosts=allowed_hosts("127.0.0.1", ["example.org"]), token=token))
        yield stack.enter_context(running(app, desk))


@contextmanager
def running(app: Any, desk: Desk) -> Iterator[Running]:
    config = uvicorn.Config(app, host="127.0.0.1", port=0, lifespan="off", ws="none", log_config=None)
    listening = config.bind_socket()
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.005)
    try:
        yield Running(listening.getsockname()[1], desk)
    finally:
        server.should_exit = True
        thread.join(timeout=10)
        listening.close()


@pytest.fixture(scope="session")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Served]:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("served")
    run_translation(small_config(folder, out=folder / TRANSLATOR, steps=25, validate_every=25, save_every=25))
    train_language_model(small_text_config(folder, out=folder / WRITER, documents="lines"))
    return load_models([folder / TRANSLATOR, folder / WRITER], ["en-fr"], LOAD)


@pytest.fixture(scope="session")
def server(models: dict[str, Served]) -> Iterator[Running]:
    with serving(models) as running:
        yield running
