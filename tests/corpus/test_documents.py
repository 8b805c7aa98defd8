"""Documents in files of every kind: the same ones, and faults told before the work."""

import gzip
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from pyarrow import ipc, parquet

from regard.corpus.documents import Document, check_corpus, documents_in, input_files, shards
from regard.errors import ArgumentError, DataError
from tests.corpus.conftest import documents, write_jsonl

ROWS = documents(700, seed=2)
NAMES: dict[str, Any] = {"text": "text", "id": "id"}


def save(path: Path, rows: list[dict[str, Any]] = ROWS) -> Path:
    table = pa.Table.from_pylist([{**row, "more": n} for n, row in enumerate(rows)])
    match path.suffix:
        case ".parquet":
            parquet.write_table(table, path, row_group_size=100)
        case ".arrow":
            new = ipc.new_file if "file" in path.name else ipc.new_stream
            with new(path, table.schema) as writer:
                writer.write_table(table, max_chunksize=300)
        case ".gz":
            path.write_bytes(gzip.compress(write_jsonl(path.with_suffix(""), rows).read_bytes()))
            path.with_suffix("").unlink()
        case _:
            write_jsonl(path, rows)
    return path


@pytest.mark.parametrize("name", ["x.parquet", "stream.arrow", "file.arrow", "x.jsonl", "x.jsonl.gz"])
def test_files_of_every_kind_have_the_same_documents(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name)
    assert list(documents_in(path, **NAMES)) == [Document(row["id"], row["text"]) for row in ROWS]
    for other in ("data", "data.json", "data.csv"):
        with pytest.raises(ArgumentError, match=rf"data: expected a name that ends in .*, got .*{other}; rename"):
            next(documents_in(path.rename(tmp_path / other), **NAMES))
        (tmp_path / other).rename(path)


def test_without_ids_the_place_is_the_id(tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_bytes(b"one cat\n\n \ntwo caf\xc3\xa9s\nbad \xff\n")
    one, two, bad = documents_in(tmp_path / "x.txt", **NAMES)
    assert (one, two) == (Document(f"{tmp_path}/x.txt:1", "one cat"), Document(f"{tmp_path}/x.txt:4", "two cafés"))
    assert bad.text is None
    assert "x.txt:5: expected UTF-8" in str(bad.error)
    path = save(tmp_path / "x.parquet", [{"text": "a"}, {"text": "b"}])
    assert [one.id for one in documents_in(path, **NAMES)] == [f"{path}:1", f"{path}:2"]


def test_a_bad_line_is_a_document_with_an_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text(
        '{"id": 3, "text": "a"}\n{"id": 4, "text": null}\n{broken\n{"text": "b"}\n{"id": [], "text": "c"}\n'
    )
    found = list(documents_in(path, **NAMES))
    assert [one.id for one in found] == ["3", "4", f"{path}:3", f"{path}:4", f"{path}:5"]
    assert [one.text for one in found] == ["a", None, None, "b", None]
    assert all(one.error for one in found if one.text is None)


def test_folders_and_patterns_name_their_files(tmp_path: Path) -> None:
    for name in ("b.parquet", "deep/a.jsonl", "dataset_info.json", "_hidden/c.jsonl", "README.md", "d.txt.zst"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("x")
    names = [str(path.relative_to(tmp_path)) for path in input_files([tmp_path])]
    assert names == ["b.parquet", "d.txt.zst", "deep/a.jsonl"]
    assert input_files([f"{tmp_path}/*.parquet", tmp_path / "b.parquet"]) == [tmp_path / "b.parquet"]
    for given, said in (
        ("*.csv", "no file is named like"),
        ("absent.txt", "cannot read .*absent.txt"),
        ("_e", "no file that ends"),
    ):
        (tmp_path / "_e").mkdir(exist_ok=True)
        with pytest.raises(ArgumentError, match=said):
            input_files([f"{tmp_path}/{given}"])


def test_shards_begin_anew_with_each_file(tmp_path: Path) -> None:
    files = [save(tmp_path / "a.parquet", ROWS[:300]), write_jsonl(tmp_path / "b.jsonl", ROWS[300:421])]
    found = list(shards(files, **NAMES, size=100))
    assert [(one.number, len(one.documents)) for one in found] == [(0, 100), (1, 100), (2, 100), (3, 100), (4, 21)]
    corpus = check_corpus(files, **NAMES, size=100)
    assert (corpus.shards, corpus.documents) == (5, 421)
    assert [one.id for shard in found for one in shard.documents] == [row["id"] for row in ROWS[:421]]


def test_an_id_twice_is_refused_with_both_places(tmp_path: Path) -> None:
    files = [save(tmp_path / "a.parquet", ROWS[:300]), save(tmp_path / "b.jsonl", [*ROWS[400:410], ROWS[5]])]
    with pytest.raises(ArgumentError, match=r'"d5" is document 6 of .*a.parquet and document 11 of .*b.jsonl'):
        check_corpus(files, **NAMES, size=100)
    assert check_corpus(files, text="text", id="", size=100).documents == 311


@pytest.mark.parametrize("name", ["x.parquet", "stream.arrow", "file.arrow", "x.jsonl.gz"])
def test_a_file_cut_short_is_refused(tmp_path: Path, name: str) -> None:
    path = save(tmp_path / name)
    path.write_bytes(path.read_bytes()[: path.stat().st_size * 2 // 3])
    with pytest.raises(DataError, match=r"damaged one|more gzip data"):
        check_corpus([path], **NAMES, size=100)


def test_mixed_schemas_and_absent_columns_are_refused(tmp_path: Path) -> None:
    good, numbers = save(tmp_path / "a.parquet"), tmp_path / "b.parquet"
    parquet.write_table(pa.table({"id": ["x"], "text": [1.5]}), numbers)
    with pytest.raises(ArgumentError, match=r"b.parquet: the column 'text' has double, expected texts"):
        check_corpus([good, numbers], **NAMES, size=100)
    with pytest.raises(ArgumentError, match=r"a.parquet: there is no column 'body' of texts, only id"):
        check_corpus([good], text="body", id="id", size=100)
    lines = write_jsonl(tmp_path / "c.jsonl", ROWS)
    with pytest.raises(ArgumentError, match=r'c.jsonl:1: expected {"body": text}, got {"id": str, "text": str}'):
        check_corpus([lines], text="body", id="id", size=100)
    (tmp_path / "empty.txt").write_text("\n")
    with pytest.raises(DataError, match="there is no document in"):
        check_corpus([tmp_path / "empty.txt"], **NAMES, size=100)
