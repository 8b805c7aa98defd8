"""A new checkpoint takes the place of a model, and no request is dropped."""

import http.client
import json
import shutil
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from regard.serving.served import Served
from regard.serving.server import CheckpointWatch
from regard.tasks.training.checkpoints import Checkpoints, Position
from tests.serving.conftest import LOAD, TRANSLATOR, Running, serving

QUESTION = {"q": "we see two cats", "source": "en", "target": "fr"}


@pytest.fixture
def run(tmp_path: Path, tmp_path_factory: pytest.TempPathFactory, models: dict[str, Served]) -> Path:
    """A copy of the translator's run, whose checkpoints the test may write."""
    found = next(tmp_path_factory.getbasetemp().glob(f"served*/{TRANSLATOR}"))
    return Path(shutil.copytree(found, tmp_path / TRANSLATOR))


def write_other(run: Path) -> None:
    """A checkpoint in which the output prefers other words."""
    tensors = Checkpoints(run).load_model("best")
    changed = {name: one.roll(3, 0) for name, one in tensors.items() if "output" in name or "target_embedding" in name}
    Checkpoints(run).save_model("best", tensors | changed, Position(step=99))


def translated(server: Running) -> str:
    found: str = server.json("/translate", QUESTION)["translatedText"]
    return found


def test_a_new_checkpoint_is_taken_while_requests_run(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told: list[str] = []
    model = LOAD(TRANSLATOR, run)
    model.languages = "en", "fr"
    with serving({TRANSLATOR: model}) as server:
        watch = CheckpointWatch(server.desk, {TRANSLATOR: run}, LOAD, told.append)
        before, view = translated(server), {"subjects": [{"text": "we see two cats"}]}
        drawn = server.json("/regard/v1/view", view)
        asked = view | {"question": {"ask": "row", "example": 0, "map": 0, "head": 0, "at": 0}}
        status, weights, _ = server.ask("/regard/v1/view/weights", asked)
        assert status == 200, weights
        first = server.ask("/regard/v1/answer", {"text": "we see two cats", "seed": 0})[1].decode()
        watch.look()
        assert (told, server.desk.models[TRANSLATOR]) == ([], model)  # nothing is new
        # A stream that has begun ends on the old model; others go on being asked meanwhile.
        go, step = threading.Event(), model.module.step

        def waiting(*given: Any) -> Any:
            assert go.wait(10)
            return step(*given)

        monkeypatch.setattr(model.module, "step", waiting)
        stream = http.client.HTTPConnection("127.0.0.1", server.port, timeout=20)
        body = json.dumps({"text": "we see two cats", "seed": 0})
        stream.request("POST", "/regard/v1/answer", body, {"content-type": "application/json"})
        time.sleep(0.1)
        write_other(run)
        watch.look()
        assert told == [f"{TRANSLATOR}: a new checkpoint is taken"]
        assert server.desk.models[TRANSLATOR] is not model
        go.set()
        old = stream.getresponse().read().decode()
        stream.close()
        monkeypatch.undo()
        after = translated(server)
        assert after != before
        new = server.ask("/regard/v1/answer", {"text": "we see two cats", "seed": 0})[1].decode()
        assert old == first != new
        # A view that is open keeps the weights of its model; a new one has those of the new model.
        assert server.ask("/regard/v1/view/weights", asked)[1] == weights
        assert server.json("/regard/v1/view", view) != drawn
        assert server.json("/languages")[0]["targets"] == ["fr"]


def test_a_damaged_checkpoint_is_not_taken(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told, looked = list[str](), threading.Semaphore(0)
    monkeypatch.setattr("regard.serving.server.LOOK_SECONDS", 0.01)
    look = CheckpointWatch.look
    monkeypatch.setattr(CheckpointWatch, "look", lambda self: (look(self), looked.release()))
    with serving({TRANSLATOR: (model := LOAD(TRANSLATOR, run))}) as server:
        model.languages = "en", "fr"
        with CheckpointWatch(server.desk, {TRANSLATOR: run}, LOAD, told.append):
            for change in (lambda path: path.write_text("{}"), Path.unlink):
                change(run / "best" / "checkpoint.json")
                assert all(looked.acquire(timeout=10) for _ in range(4))
        assert [one.partition(", because")[0] for one in told] == [f"{TRANSLATOR}: the new checkpoint is not taken"]
        assert translated(server)
    assert not [one for one in threading.enumerate() if isinstance(one, CheckpointWatch)]
