"""The example of an engine in docs/corpus.md, run as it stands: its rows are those of `Measure` alone, bit for bit."""

import re
from pathlib import Path

import pyarrow as pa
import pytest
from pyarrow import parquet

from regard.corpus import Measure
from tests import ROOT
from tests.corpus.conftest import documents, save_small_gpt2

KEYS = [("id", "ascending"), ("layer", "ascending"), ("head", "ascending")]


def examples_of_the_page() -> list[str]:
    page = (ROOT / "docs" / "corpus.md").read_text(encoding="utf-8")
    return re.findall(r"```python\n(.*?)```", page, flags=re.DOTALL)


def run_example(engine: str, folder: Path, patch: pytest.MonkeyPatch) -> None:
    """Run the example that imports `engine` over two files of documents, one of which cannot be measured."""
    (folder / "gpt2").mkdir()
    (folder / "shards").mkdir()
    save_small_gpt2(folder / "gpt2")
    rows = documents(40)
    rows[11]["text"] = ""
    table = pa.Table.from_pylist(rows)
    for number in range(2):
        parquet.write_table(table.slice(20 * number, 20), folder / "shards" / f"{number}.parquet")
    patch.chdir(folder)
    (code,) = (code for code in examples_of_the_page() if f"import {engine}\n" in code or f"from {engine}." in code)
    exec(compile(code, "corpus.md", "exec"), {"__name__": "example"})
    (written,) = folder.glob("rows*")
    found, expected = parquet.read_table(written).sort_by(KEYS), Measure("gpt2")(table).sort_by(KEYS)
    assert found.column_names == expected.column_names
    assert found.cast(expected.schema).equals(expected)
