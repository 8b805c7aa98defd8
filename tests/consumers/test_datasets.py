"""`datasets` of Hugging Face calls `Measure` on its own blocks, and its folders are read."""

from pathlib import Path

import pyarrow as pa
import pytest

datasets = pytest.importorskip(
    "datasets", reason="datasets is in an environment of its own: make consumers ONLY=datasets"
)

from regard.corpus.documents import documents_in, input_files  # noqa: E402  (after the package that it needs)
from tests.consumers.corpus_example import run_example  # noqa: E402
from tests.corpus.conftest import documents  # noqa: E402


def test_the_example_has_the_rows_of_the_measure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run_example("datasets", tmp_path, monkeypatch)


def test_a_folder_of_datasets_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_pylist(documents(40))
    datasets.Dataset(table).save_to_disk(tmp_path / "saved")
    files = input_files([tmp_path / "saved"])
    texts = [one.text for file in files for one in documents_in(file, text="text", id="id")]
    assert texts == table.column("text").to_pylist()
