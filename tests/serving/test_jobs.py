"""Documents as jobs: progress, results, bounds, and a server that is killed and goes on."""

import gzip
import json
import os
import shlex
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from regard.serving.jobs import WINDOW
from regard.serving.served import Served, ServedTranslator
from tests import ROOT
from tests.serving.conftest import TRANSLATOR, WRITER, Running, serving
from tests.tasks.small_runs import PAIRS

JOBS = "/regard/v1/jobs"
SENTENCES = [source for source, _ in PAIRS]


def send(
    server: Running, document: str | bytes, *, query: str = "", kind: str = "text/plain", expect: int = 200
) -> Any:
    body = document.encode() if isinstance(document, str) else document
    status, answer, _ = server.ask(JOBS + query, body=body, content_type=kind)
    assert status == expect, answer
    return json.loads(answer)


def until(server: Running, job: Any, *statuses: str, lines: int = 0) -> Any:
    end = time.monotonic() + 20
    while (found := server.json(f"{JOBS}/{job['id']}"))["status"] not in statuses or found["done"] < lines:
        assert time.monotonic() < end, found
        time.sleep(0.01)
    return found


def translations(models: dict[str, Served], lines: list[str]) -> str:
    one = models[TRANSLATOR]
    assert isinstance(one, ServedTranslator)
    return "".join(f"{found.text}\n" for found in one.translator.translate(lines, one.options()))


def held(monkeypatch: pytest.MonkeyPatch, models: dict[str, Served]) -> tuple[threading.Event, list[int]]:
    """Windows that wait for an event after the first, and the sizes of those that were begun."""
    one: Any = models[TRANSLATOR]
    go, sizes, translate = threading.Event(), list[int](), one.translator.translate_window

    def waiting(lines: Any, options: Any) -> Any:
        sizes.append(len(lines))
        assert len(sizes) == 1 or go.wait(10)
        return translate(lines, options)

    monkeypatch.setattr(one.translator, "translate_window", waiting)
    return go, sizes


def test_a_document_is_translated_while_others_are_answered(
    models: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = [*SENTENCES[:20], "", *SENTENCES[20:]]
    expected = translations(models, lines)
    go, _ = held(monkeypatch, models)
    with serving(models, jobs=tmp_path) as server:
        job = send(server, "\n".join(lines), query=f"?model={TRANSLATOR}")
        assert (job["total"], job["model"]) == (len(lines), TRANSLATOR)
        until(server, job, "running", lines=WINDOW)
        assert server.ask(f"{JOBS}/{job['id']}/result")[0] == 409
        go.set()
        assert server.json("/translate", {"q": "we see two cats", "source": "en", "target": "fr"})["translatedText"]
        found = until(server, job, "done")
        assert (found["done"], found.get("problem")) == (len(lines), None)
        status, body, headers = server.ask(f"{JOBS}/{job['id']}/result")
        assert (status, body.decode()) == (200, expected)
        assert headers["content-type"].startswith("text/plain")
        objects = "".join(json.dumps({"source": one}) + "\n" for one in SENTENCES[:3])
        until(server, second := send(server, objects, kind="application/x-ndjson"), "done")
        assert server.ask(f"{JOBS}/{second['id']}/result")[1].decode() == translations(models, SENTENCES[:3])
    with serving(models, jobs=tmp_path) as again:  # what is done stays
        assert again.json(f"{JOBS}/{job['id']}")["status"] == "done"
        assert again.ask(f"{JOBS}/{job['id']}/result")[1].decode() == expected
        assert again.ask(f"{JOBS}/{job['id']}", method="DELETE")[0] == 200
        assert [again.ask(f"{JOBS}/{job['id']}{more}")[0] for more in ("", "/result")] == [404, 404]
    assert [path.name for path in tmp_path.iterdir()] == [second["id"]]


def test_a_line_that_cannot_be_read_has_an_empty_answer(models: dict[str, Served], tmp_path: Path) -> None:
    with serving(models, jobs=tmp_path, max_text=50) as server:
        document = b"we see two cats\nwe \xff see\nwe see " + b"a" * 60 + b"\nwe see ten trees\n"
        found = until(server, job := send(server, document), "done")
        assert found["problem"].startswith("line 2: expected UTF-8")  # without the path of the server
        expected = translations(models, ["we see two cats", "", "", "we see ten trees"])
        assert server.ask(f"{JOBS}/{job['id']}/result")[1].decode() == expected


def test_jobs_are_bounded(models: dict[str, Served], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with serving(models, jobs=tmp_path, max_jobs=2, max_document=2_000) as server:
        assert "packed" not in send(server, gzip.compress(b"x"), expect=415)
        send(server, "x" * 3_000, expect=413)
        send(server, "x", kind="application/json", expect=415)
        send(server, "x", query=f"?model={WRITER}", expect=400)
        send(server, "x", query="?model=../..", expect=404)
        message = send(server, "x".encode("utf-16"), expect=400)["error"]
        assert str(tmp_path) not in message
        assert list(tmp_path.iterdir()) == []  # nothing of them is kept
        assert [server.ask(f"{JOBS}/{name}")[0] for name in ("none", "..%2f..", "%00")] == [404] * 3
        go, sizes = held(monkeypatch, models)
        first, second = send(server, "\n".join(SENTENCES)), send(server, "we see two cats")
        assert "delete one" in send(server, "we see two cats", expect=429)["error"]
        until(server, first, "running", lines=WINDOW)
        assert server.json(f"{JOBS}/{second['id']}")["status"] == "waiting"  # one after the other
        assert server.ask(f"{JOBS}/{first['id']}", method="DELETE")[0] == 200
        go.set()
        until(server, second, "done")
        assert len(sizes) == 3  # the first ended after the window that it was in
        assert [path.name for path in tmp_path.iterdir()] == [second["id"]]


def test_half_an_upload_of_a_killed_server_goes_and_all_else_stays(models: dict[str, Served], tmp_path: Path) -> None:
    def folder(name: str, *files: str) -> Path:
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("we see two")
        return tmp_path / name

    gone = [folder("0" * 32, "document"), folder("1" * 32)]
    stays = [folder("a" * 32, "document", "notes"), folder("b" * 31, "document"), folder("x" * 32, "document"),
             folder("c" * 32, "document", "job.json")]  # fmt: skip
    with serving(models, jobs=tmp_path):
        assert [path.exists() for path in (*gone, *stays)] == [False] * 2 + [True] * 4


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_the_curl_lines_of_documents_do_as_the_page_says(models: dict[str, Served], tmp_path: Path) -> None:
    text = (ROOT / "docs/serve.md").read_text(encoding="utf-8")
    lines = [line[2:] for line in text.split("\n") if line.startswith("$ curl") and "/jobs" in line]
    shown = next(line for line in text.split("\n") if line.startswith('{"id"'))
    (tmp_path / "lines.txt").write_text("".join(f"{one}\n" for one in SENTENCES[:3]))
    with serving(models, jobs=tmp_path / "jobs") as server:
        said, job = [], {"id": "ID"}
        for line in lines:
            words = shlex.split(line.replace("127.0.0.1:8000", f"127.0.0.1:{server.port}").replace("ID", job["id"]))
            said.append(subprocess.run([*words, "-s"], cwd=tmp_path, capture_output=True, check=True).stdout.decode())
            if len(said) == 1:
                job = json.loads(said[0])
                until(server, job, "done")
    assert list(job) == list(json.loads(shown))
    assert json.loads(said[1])["total"] == 3
    assert said[2] == translations(models, SENTENCES[:3])
    assert (len(said), list((tmp_path / "jobs").iterdir())) == (4, [])


def test_without_a_folder_there_are_no_jobs(server: Running, models: dict[str, Served], tmp_path: Path) -> None:
    assert server.ask(JOBS, body=b"x", content_type="text/plain")[0] == 404
    assert not [path for path in server.json("/openapi.json")["paths"] if path.startswith(JOBS)]
    with serving(models, jobs=tmp_path) as other:
        paths = other.json("/openapi.json")["paths"]
        assert set(paths[f"{JOBS}/{{id}}"]) == {"get", "delete"}
        assert [one["name"] for one in paths[JOBS]["post"]["parameters"]] == ["model"]


def test_a_killed_server_goes_on_where_it_stopped(
    models: dict[str, Served], tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its process also prints a line for each request, with nothing of the document."""
    run = next(tmp_path_factory.getbasetemp().glob(f"served*/{TRANSLATOR}"))
    lines = SENTENCES * 4
    command = [sys.executable, "-m", "regard", "serve", str(run), "--port", "0", "--languages", "en-fr", "--workers"]
    command += ["1", "--jobs", str(tmp_path), "--log-requests", "--device", "cpu"]
    with (tmp_path / "log").open("wb") as log, subprocess.Popen(command, stdout=log, stderr=log, env=os.environ) as one:
        try:
            while b"serving at" not in (said := (tmp_path / "log").read_bytes()):
                assert one.poll() is None, said
                time.sleep(0.02)
            port = int(said.decode().split("serving at")[1].split(":")[2].split()[0])
            killed: Any = Running(port, desk=None)  # type: ignore[arg-type]
            job = send(killed, "\n".join(lines))
            before = until(killed, job, "running", lines=2 * WINDOW)
        finally:
            one.send_signal(signal.SIGKILL)
    printed = (tmp_path / "log").read_text()
    assert f'"POST {JOBS} HTTP/1.1" 200' in printed
    assert SENTENCES[0] not in printed
    assert before["done"] < len(lines)
    with monkeypatch.context() as patch:
        go, sizes = held(patch, models)
        go.set()
        with serving(models, jobs=tmp_path) as server:
            until(server, job, "done")
            body = server.ask(f"{JOBS}/{job['id']}/result")[1]
    assert sum(sizes) <= len(lines) - before["done"]
    assert body.decode() == translations(models, SENTENCES) * 4
