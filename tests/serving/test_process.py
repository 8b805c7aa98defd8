"""`regard serve` as a process: it says where it is, refuses wrong flags in a line, and SIGTERM ends it cleanly."""

import http.client
import json
import os
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest

from regard.cli.main import run_command
from regard.serving.asking import Desk
from regard.serving.served import Served
from regard.serving.server import ListeningPlace, listening_at, serve_forever
from regard.serving.settings import Entrance, RequestLimits
from regard.tasks.training.interrupts import Interrupted, ending_at_once
from tests.serving.conftest import WRITER, Running


def test_a_token_of_other_bytes_is_told_in_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "token").write_bytes(b"\xff\xfe\x00")
    assert run_command(["serve", str(tmp_path), "--token-file", str(tmp_path / "token")]) == 2
    assert "must have a secret in ASCII" in capsys.readouterr().err


def test_a_port_of_another_is_told_before_models_are_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def loaded(*_: object) -> None:
        raise AssertionError("a model is loaded")

    monkeypatch.setattr("regard.serving.server.load_models", loaded)
    monkeypatch.setattr("regard.cli.serve.task_name_of", lambda _: "translation")
    with listening_at(ListeningPlace("127.0.0.1", 0, 1.0, logs_requests=False)) as other:
        port = str(other.getsockname()[1])
        assert run_command(["serve", str(tmp_path), "--port", port]) == 2
    said = capsys.readouterr().err.splitlines()
    assert f"127.0.0.1:{port} cannot be listened on (Address already in use); give another --port" in said[-1]
    assert sum("regard:" in line for line in said) == 1


def test_a_second_sigterm_is_one_more(models: dict[str, Served], monkeypatch: pytest.MonkeyPatch) -> None:
    ended, close = [], Desk.close

    def closing(desk: Desk) -> None:
        signal.raise_signal(signal.SIGTERM)  # after the loop has ended, while threads end
        close(desk)
        ended.append(True)

    monkeypatch.setattr(Desk, "close", closing)
    place = ListeningPlace("127.0.0.1", 0, 1.0, logs_requests=False)
    entrance = Entrance(hosts=frozenset({"127.0.0.1"}), token=None)
    with suppress(Interrupted), ending_at_once(), listening_at(place) as listening:
        serve_forever(
            models, listening, place, entrance, RequestLimits(), lambda _: signal.raise_signal(signal.SIGTERM)
        )
    assert ended


@pytest.mark.slow
def test_sigterm_lets_answers_end_and_tells_those_that_do_not(
    server: Running, tmp_path_factory: pytest.TempPathFactory
) -> None:
    run = next(tmp_path_factory.getbasetemp().glob(f"served*/{WRITER}"))
    command = [sys.executable, "-m", "regard", "serve", str(run), "--port", "0", "--grace", "2"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=os.environ) as process:
        try:
            _stop(process)
        finally:
            process.kill()


def _stop(process: "subprocess.Popen[str]") -> None:
    assert process.stderr is not None
    line = next(one for one in process.stderr if "serving at" in one)
    port = int(line.split(":")[3].split()[0])
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=30)
    question = {"model": WRITER, "prompt": "1 and", "max_tokens": 500, "n": 16, "stream": True}
    connection.request("POST", "/v1/completions", json.dumps(question), {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read(100)
    connection.sock and connection.sock.settimeout(10)
    process.send_signal(signal.SIGTERM)
    begun = time.monotonic()
    told = answer.read()
    assert b"the server ends" in told or told.endswith(b"data: [DONE]\n\n")
    assert process.wait(timeout=10) == 0
    assert time.monotonic() - begun < 6
    assert process.stderr.read() == ""
    answer.close(), connection.close()
