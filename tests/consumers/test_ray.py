"""Ray Data and datasets call `Measure` on their own blocks: the rows are those of the callable alone."""

from pathlib import Path
from typing import Any

import pytest

ray = pytest.importorskip("ray", reason="ray is in an environment of its own: make consumers ONLY=ray")
pa = pytest.importorskip("pyarrow")
datasets = pytest.importorskip("datasets")

from regard.corpus import Measure  # noqa: E402  (after the packages that it needs)
from tests.corpus.conftest import documents, gpt2  # noqa: E402, F401  (the fixture)

KEYS = [("id", "ascending"), ("layer", "ascending"), ("head", "ascending")]


@pytest.fixture(scope="module")
def cluster() -> Any:
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
    yield
    ray.shutdown()


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
