"""Ray Data and datasets call `Measure` on their own blocks: the rows are those of the callable alone."""

import threading
import time
from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is in an environment of its own: make consumers ONLY=ray")
pa = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")

from regard.corpus import Measure  # noqa: E402  (after the packages that it needs)
from tests.corpus.conftest import bytes_of, documents, gpt2, measure_into, write_jsonl  # noqa: E402, F401  (gpt2)

KEYS = [("id", "ascending"), ("layer", "ascending"), ("head", "ascending")]


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


def table() -> Any:
    rows = documents(40)
    rows[11]["text"] = ""
    return pa.Table.from_pylist(rows)


def test_actors_of_ray_measure_as_one_process(cluster: Any, gpt2: Path) -> None:  # noqa: F811
    found = ray.data.from_arrow(table()).repartition(6).map_batches(
        Measure, fn_constructor_args=[str(gpt2)], fn_constructor_kwargs={"device": "cpu"}, batch_format="pyarrow",
        batch_size=7, concurrency=2,
    )  # fmt: skip
    whole = pa.concat_tables(ray.get(found.to_arrow_refs())).sort_by(KEYS)
    expected = Measure(gpt2, device="cpu")(table()).sort_by(KEYS)
    assert whole.select(expected.column_names).cast(expected.schema).equals(expected)


def test_datasets_measure_as_one_process(gpt2: Path, tmp_path: Path) -> None:  # noqa: F811
    rows = datasets.Dataset(table()).with_format("arrow")
    found = rows.map(Measure(gpt2, device="cpu"), batched=True, batch_size=9, remove_columns=rows.column_names)
    expected = Measure(gpt2, device="cpu")(table())
    assert pa.Table.from_pylist(found.with_format(None).to_list(), schema=expected.schema).equals(expected)
    rows.save_to_disk(tmp_path / "saved")
    from regard.corpus.documents import documents_in, input_files

    files = input_files([tmp_path / "saved"])
    texts = [one.text for file in files for one in documents_in(file, text="text", id="id")]
    assert texts == table().column("text").to_pylist()
