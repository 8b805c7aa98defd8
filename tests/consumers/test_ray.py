"""Ray shares out shards, and Ray Data calls `Measure` on its own blocks: the bytes are those of one process."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is in an environment of its own: make consumers ONLY=ray")

from tests.consumers.corpus_example import run_example  # noqa: E402  (after the package that it needs)
from tests.corpus.conftest import bytes_of, documents, gpt2, measure_into, snapshots, write_jsonl  # noqa: E402, F401


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


def test_tasks_of_ray_write_the_bytes_of_one_process(cluster: Any, gpt2: Path, tmp_path: Path) -> None:  # noqa: F811
    docs = write_jsonl(tmp_path / "docs.jsonl", documents(60))
    expected = bytes_of(measure_into(tmp_path / "alone", gpt2, docs))
    assert bytes_of(measure_into(tmp_path / "ray", gpt2, docs, "--engine", "ray")) == expected


def test_a_node_that_dies_meanwhile_loses_nothing(
    gpt2: Path,  # noqa: F811
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    ray.shutdown()
    monkeypatch.setenv("RAY_worker_niceness", "0")  # beside other work on few cores its workers would wait
    from ray.cluster_utils import Cluster

    docs, out = write_jsonl(tmp_path / "docs.jsonl", documents(100)), tmp_path / "ray"
    expected = bytes_of(measure_into(tmp_path / "alone", gpt2, docs))
    nodes = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    second = nodes.add_node(num_cpus=1)
    ray.init(nodes.address, log_to_driver=False)
    killed = []

    def kill() -> None:
        while len(list(out.glob("_done/*.json"))) < 3:
            time.sleep(0.01)
        nodes.remove_node(second, allow_graceful=False)
        killed.append(len(list(out.glob("_done/*.json"))))

    threading.Thread(target=kill, daemon=True).start()
    try:
        assert bytes_of(measure_into(out, gpt2, docs, "--engine", "ray")) == expected
    finally:
        ray.shutdown()
        nodes.shutdown()
    assert killed
    assert killed[0] < len(list(out.glob("_done/*.json")))


def test_the_example_has_the_rows_of_the_measure(cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("ray", tmp_path, monkeypatch)


def test_a_driver_killed_after_the_last_shard_loses_nothing(
    cluster: Any,
    gpt2: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    """The disk as it is before each rename of the driver is what a kill leaves; either engine goes on."""
    docs, out = write_jsonl(tmp_path / "docs.jsonl", documents(60)), tmp_path / "out"
    with snapshots(out, tmp_path / "killed", from_rename=2) as left:
        expected = bytes_of(measure_into(out, gpt2, docs, "--engine", "ray"))
    assert len(left) == 3  # totals, examples, _SUCCESS
    for number, folder in enumerate(left):
        more = ("--resume", *["--engine", "ray"] * (number % 2))
        assert bytes_of(measure_into(folder, gpt2, docs, *more)) == expected
