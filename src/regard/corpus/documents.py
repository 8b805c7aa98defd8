"""Documents: an id and a text, in tables and in files. Each file is cut into shards of so many documents."""

import glob
import hashlib
import json
from array import array
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import ipc, parquet

from regard.errors import ArgumentError, DataError
from regard.tasks.text.forms import json_of, shape_of
from regard.tasks.text.lines import Line, Lines, decoded, form_of, unpacked_name, why_not_read

ENDINGS = (".parquet", ".arrow", ".jsonl", ".ndjson", ".txt")
"""The endings of the files that are read in a folder, packed or not."""
CHUNK = 256
"""The most rows of a file in memory at a time, beside those of a shard."""


class Document(NamedTuple):
    id: str
    text: str | None
    error: str | None = None


class Shard(NamedTuple):
    number: int
    documents: list[Document]


# -- files -----------------------------------------------------------------------------------------------


def input_files(data: Iterable[str | Path]) -> list[Path]:
    found: dict[Path, None] = {}
    for one in map(str, data):
        path = Path(one)
        if path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if _is_read(file.relative_to(path))]
            if not inside:
                raise ArgumentError(f"data: {path} has no file that ends in {', '.join(ENDINGS)}; name the files")
        elif path.exists() or not glob.has_magic(one):
            inside = [path]
        else:
            inside = [Path(file) for file in sorted(glob.glob(one, recursive=True))]
            if not inside:
                raise ArgumentError(f"data: no file is named like {one}; check the pattern")
        found |= dict.fromkeys(inside)
    for path in found:
        try:
            with path.open("rb"):
                pass
        except OSError as error:
            raise ArgumentError(f"data: {why_not_read(str(path), error)}") from None
    return list(found)


def _is_read(path: Path) -> bool:
    return unpacked_name(path).suffix in ENDINGS and not any(part.startswith((".", "_")) for part in path.parts)


def documents_in(path: Path, *, text: str, id: str) -> Iterator[Document]:
    """Rows of Parquet or Arrow, JSON lines, or lines that are not blank, by the ending of the name. Without an id
    column, an id is the file's name and the number of the row or line."""
    if path.suffix not in (".parquet", ".arrow"):
        yield from _of_lines(path, text, id)
        return
    batches = _parquet_batches(path, [text, id]) if path.suffix == ".parquet" else _arrow_batches(path)
    number = 0
    for table in batches:
        for one in documents_of(table, text=text, id=id, source=str(path), first=number):
            number += 1
            yield one


def _parquet_batches(path: Path, columns: Sequence[str]) -> Iterator[Any]:
    with _file_faults(path, "Parquet"), parquet.ParquetFile(path, memory_map=True) as file:
        chosen = [name for name in columns if name in file.schema_arrow.names]
        yield file.schema_arrow.empty_table().select(chosen)
        yield from map(pa.Table.from_batches, ([batch] for batch in file.iter_batches(CHUNK, columns=chosen)))


def _arrow_batches(path: Path) -> Iterator[Any]:
    with _file_faults(path, "Arrow"), pa.memory_map(str(path)) as source:
        is_file = source.read(6) == b"ARROW1"
        source.seek(0)
        if is_file:
            file = ipc.open_file(source)
            batches: Iterable[Any] = (file.get_batch(n) for n in range(file.num_record_batches))
        else:
            file = batches = ipc.open_stream(source)
        yield file.schema.empty_table()
        for batch in batches:
            yield from (pa.Table.from_batches([batch.slice(n, CHUNK)]) for n in range(0, batch.num_rows, CHUNK))


@contextmanager
def _file_faults(path: Path, kind: str) -> Iterator[None]:
    try:
        yield
    except (pa.ArrowException, OSError) as error:
        raise DataError(f"{path}: expected a whole {kind} file, got a damaged one; copy it again") from error


def documents_of(table: Any, *, text: str, id: str, source: str = "", first: int = 0) -> Iterator[Document]:
    place = f"{source}: " if source else ""
    if text not in table.column_names:
        raise ArgumentError(f"{place}there is no column {text!r} of texts, only {', '.join(table.column_names)}")
    if not _is_text(kind := table.schema.field(text).type):
        raise ArgumentError(f"{place}the column {text!r} has {kind}, expected texts; name another column")
    has_ids = id in table.column_names
    if has_ids and not _is_text(kind := table.schema.field(id).type) and not pa.types.is_integer(kind):
        raise ArgumentError(f"{place}the column {id!r} of ids has {kind}, expected texts or whole numbers")
    texts = table.column(text).to_pylist()
    ids = table.column(id).to_pylist() if has_ids else [None] * len(texts)
    for number, (own, one) in enumerate(zip(ids, texts, strict=True), first):
        name = str(own) if own is not None else f"{source}:{number + 1}" if source else str(number)
        yield Document(name, one, None if one is not None else "there is no text: it is null")


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return bool(
        pa.types.is_null(kind)
        or pa.types.is_string(kind)
        or pa.types.is_large_string(kind)
        or pa.types.is_string_view(kind)
    )


def _of_lines(path: Path, text: str, id: str) -> Iterator[Document]:
    lines = Lines(path)
    if _form_of(path) == "text":
        yield from (_of_line(line) for line in lines if line.raw.strip())
        return
    for number, line in enumerate(line for line in lines if line.raw.strip()):
        one, is_missing = _of_json(line, text, id)
        if number == 0 and is_missing:
            raise ArgumentError(one.error)
        yield one


def _form_of(path: Path) -> str:
    try:
        return form_of(path, ("text", "jsonl"))
    except ArgumentError:
        raise ArgumentError(
            f"data: expected a name that ends in {', '.join(ENDINGS)} or in a language's two letters (.en), got "
            f"{path}; rename the file, or name a link to it (ln -s)"
        ) from None


def _of_line(line: Line) -> Document:
    try:
        return Document(line.place, decoded(*line))
    except DataError as error:
        return Document(line.place, None, str(error))


def _of_json(line: Line, text: str, id: str) -> tuple[Document, bool]:
    try:
        record = json_of(line)
    except DataError as error:
        return Document(line.place, None, str(error)), False
    own = record.get(id) if isinstance(record, dict) else None
    if own is not None and type(own) not in (str, int):
        return Document(line.place, None, f"{line.place}: the id {id!r} is no text or whole number"), False
    name = line.place if own is None else str(own)
    if not isinstance(record, dict) or not isinstance(record.get(text), str):
        said = f'{line.place}: expected {{"{text}": text}}, got {shape_of(record)}'
        return Document(name, None, said), not isinstance(record, dict) or text not in record
    return Document(name, record[text]), False


# -- shards ----------------------------------------------------------------------------------------------


def shards(files: Sequence[Path], *, text: str, id: str, size: int) -> Iterator[Shard]:
    number = 0
    for path in files:
        rest = documents_in(path, text=text, id=id)
        for first in rest:
            yield Shard(number, [first, *islice(rest, size - 1)])
            number += 1


class CheckedCorpus(NamedTuple):
    files: list[dict[str, Any]]
    """The name, the bytes, the documents and a digest of the ids of each."""
    shards: int
    documents: int


def check_corpus(files: Sequence[Path], *, text: str, id: str, size: int) -> CheckedCorpus:
    """Read all ids once, before the work, in eight bytes of memory each."""
    about: list[dict[str, Any]] = []
    hashes, count = array("Q"), 0
    for path in files:
        digest, before = hashlib.blake2b(digest_size=16), len(hashes)
        for one in documents_in(path, text=text, id=id):
            found = hashlib.blake2b(one.id.encode(), digest_size=8).digest()
            hashes.frombytes(found)
            digest.update(found)
        documents = len(hashes) - before
        count += -(-documents // size)
        about.append(
            {"name": str(path), "bytes": path.stat().st_size, "documents": documents, "ids": digest.hexdigest()}
        )
    if not hashes:
        raise DataError(f"there is no document in {', '.join(map(str, files[:3]))}; name files that have some")
    ordered = np.sort(np.frombuffer(hashes, np.uint64))
    if (twice := ordered[1:][ordered[1:] == ordered[:-1]]).size:
        _refuse_twice(files, int(twice[0]).to_bytes(8, "little"), text, id)
    return CheckedCorpus(about, count, len(hashes))


def _refuse_twice(files: Sequence[Path], twice: bytes, text: str, id: str) -> None:
    everything = chain.from_iterable(
        ((path, number, one.id) for number, one in enumerate(documents_in(path, text=text, id=id), 1)) for path in files
    )
    same = (
        (p, n, name) for p, n, name in everything if hashlib.blake2b(name.encode(), digest_size=8).digest() == twice
    )
    (one, first, name), (other, second, _) = islice(same, 2)
    raise ArgumentError(
        f"ids must be unique: {json.dumps(name)[:80]} is document {first} of {one} and document {second} of {other}; "
        "name a column of other ids, or none (--id '')"
    )
