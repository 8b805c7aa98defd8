"""The gate: packed text is read, other encodings and files that are no text are named, and content says the form."""

import bz2
import gzip
import io
import json
import lzma
import os
import re
import zipfile
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from regard.cli.commands import COMMANDS
from regard.errors import ArgumentError, DataError
from regard.tasks.registry import TASKS
from regard.tasks.text.gate import PACKINGS, DataFormat
from regard.tasks.text.lines import Lines, read_lines
from regard.tasks.text.pairs import read_pairs
from regard.tasks.text.references import read_judged
from regard.tasks.text.texts import RunningText, read_texts
from regard.tasks.text.unicode import bounded, normalise
from tests import ROOT

PAIRS = [(f"a cat {n}, it says", f"eine „Katze“ {n}") for n in range(20)]
TABLE = "".join(f"{a}\t{b}\n" for a, b in PAIRS).encode()


def written(folder: Path, content: bytes | str, name: str = "x") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def zipped(**files: bytes) -> bytes:
    packed = io.BytesIO()
    with zipfile.ZipFile(packed, "w") as archive:
        for name, content in files.items():
            archive.writestr(name, content)
    return packed.getvalue()


def zstd(content: bytes) -> bytes:
    packed: bytes = import_module("backports.zstd").compress(content)
    return packed


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "bzip2": bz2.compress,
    "xz": lzma.compress,
    "zstd": zstd,
    "zip": lambda content: zipped(member=content),
    "a zip file of a gzip file": lambda content: zipped(member=gzip.compress(content)),
}


@pytest.mark.parametrize("kind", PACKERS)
def test_packed_text_is_read_whatever_its_name(tmp_path: Path, kind: str) -> None:
    assert list(read_pairs(written(tmp_path, PACKERS[kind](TABLE)))) == PAIRS


@pytest.mark.parametrize("kind", ["gzip", "bzip2", "xz", "zstd", "zip"])
def test_packed_data_cut_short_or_damaged_end_the_reading(tmp_path: Path, kind: str) -> None:
    packed = PACKERS[kind](os.urandom(100_000).hex().encode())
    middle = len(packed) // 2
    for spoilt in (packed[:middle], packed[:middle] + bytes(64) + packed[middle + 64 :]):
        with pytest.raises(DataError, match=rf"expected (more )?{kind} data, got"):
            list(read_lines(written(tmp_path, spoilt), bad_lines="skip"))


ENCODINGS = ["utf-16", "utf-16-le", "utf-16-be", "utf-32", "utf-32-le", "utf-32-be"]
TEXTS = {"Latin": "a cat\teine Katze\n", "Cyrillic": "кошка спит\tкот, и пёс\n", "Chinese": "猫 睡觉\t猫和狗。\n"}


@pytest.mark.parametrize("script", TEXTS)
@pytest.mark.parametrize("encoding", ENCODINGS)
def test_other_encodings_are_named_and_their_conversion_is_right(tmp_path: Path, encoding: str, script: str) -> None:
    text = TEXTS[script] * 20
    path = written(tmp_path, text.encode(encoding))
    for read in (read_pairs, read_lines):
        with pytest.raises(DataError, match=r"expected text in UTF-8, got UTF-\d\d.*; convert it: iconv -f") as refused:
            list(read(path, bad_lines="skip"))
    told = str(refused.value).split("iconv -f ")[1].split()[0]
    assert path.read_bytes().decode(told).removeprefix("\ufeff") == text


FOREIGN = {
    b"PAR1" + bytes(99): "got a Parquet file; write it as JSON lines",
    b"%PDF-1.7\n": "got a PDF; save its text",
    zipped(a=TABLE, b=TABLE): r"a zip archive of one file, got one of 2 \(a, b\)",
    zipped(**{"[Content_Types].xml": b"<x/>", "xl/workbook.xml": b"<x/>"}): "got an office document",
    bytes(257) + b"ustar\0" + bytes(300): "got a tar archive",
    gzip.compress(bytes(257) + b"ustar\0" + bytes(300)): "got a tar archive",
    TABLE.replace(b"\n", b"\r"): "got carriage returns alone, .*; convert them: tr",
    b"\x89PNG\r\n\x1a\n\0\0\0\rIHDR" + bytes(range(256)) * 4: "got bytes that are none",
}


@pytest.mark.parametrize("content", FOREIGN, ids=list(FOREIGN.values()))
def test_files_that_are_no_text_are_named_before_any_line(tmp_path: Path, content: bytes) -> None:
    with pytest.raises(DataError, match=rf"^{tmp_path}/x: expected .*{FOREIGN[content]}"):
        list(read_lines(written(tmp_path, content), bad_lines="skip"))


def test_a_zero_byte_is_a_bad_line(tmp_path: Path) -> None:
    path = written(tmp_path, TABLE + b"a\0\tb\n" + TABLE)
    with pytest.raises(DataError, match="x:21: expected text, got a NUL byte at byte 2; take it out"):
        list(read_pairs(path))
    pairs = read_pairs(path, bad_lines="skip")
    assert (list(pairs), pairs.skipped) == (PAIRS * 2, 1)


# -- the form of pairs -----------------------------------------------------------------------------------------

TMX = """<?xml version="1.0" encoding="utf-16"?>
<tmx version="1.4"><header srclang="en-US" adminlang="en"/><body>{}</body></tmx>
"""
UNIT = (
    '<tu><tuv xml:lang="de"><seg>{1}</seg></tuv>\n'
    '<tuv xml:lang="EN-us"><seg>a <bpt i="1">&lt;b&gt;</bpt><hi>cat</hi><ept i="1"/> {0}</seg></tuv></tu>'
)
FORMS = {
    "csv": "".join(f'"{a}","{b}"\r\n' for a, b in PAIRS),
    "csv of columns with names": "id,Target,Source\n" + "".join(f'{n},"{b}","{a}"\n' for n, (a, b) in enumerate(PAIRS)),
    "csv with semicolons": "".join(f'"{a}";{b}\n' for a, b in PAIRS),
    "jsonl": "".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in PAIRS),
    "tmx": TMX.format("\n".join(UNIT.format(a.removeprefix("a cat "), b) for a, b in PAIRS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_known_by_its_content(tmp_path: Path, form: str) -> None:
    path = written(tmp_path, FORMS[form], "pairs.txt")
    assert list(read_pairs(path)) == list(read_pairs(path, format=form.split()[0])) == PAIRS  # type: ignore[arg-type]
    assert list(read_pairs([path, path])) == PAIRS * 2


def test_quotes_in_a_csv_may_hold_line_feeds_and_quotes(tmp_path: Path) -> None:
    path = written(tmp_path, 'source,target\n"one\ntwo","a ""b"", c"\nx,\n"y",z\ncaf\xe9,d\n'.encode("latin-1"))
    pairs = read_pairs(path, format="csv", bad_lines="skip")
    assert (list(pairs), pairs.skipped) == ([("one\ntwo", 'a "b", c'), ("y", "z")], 2)
    assert (
        pairs.first_skipped == f"{path}:4: expected a target sentence, got an empty one; remove the pair or fill it in"
    )


def test_two_tables_are_not_aligned_files(tmp_path: Path) -> None:
    one, two = (written(tmp_path, TABLE, name) for name in ("a.txt", "b.txt"))
    assert list(read_pairs([one, two])) == PAIRS * 2
    assert next(read_pairs([one, two], format="aligned")) == ("\t".join(PAIRS[0]),) * 2
    lines = written(tmp_path, "one\ntwo\n", "c.txt")
    with pytest.raises(
        ArgumentError, match=r"a\.txt looks like a table with tabs and .*c\.txt looks like lines of text"
    ):
        list(read_pairs([one, lines]))


def test_exports_with_more_columns_are_named(tmp_path: Path) -> None:
    anki = written(tmp_path, "Go.\tVa !\tCC-BY 2.0 (France) #1\n" * 9)
    with pytest.raises(DataError, match=r"x:1: expected 2 columns, got 3; .*--data-format tsv-extra"):
        list(read_pairs(anki))
    assert list(read_pairs(anki, format="tsv-extra")) == [("Go.", "Va !")] * 9
    for columns in ("1276\tGo.\t1277\tVa !", "1276\teng\tGo."):
        with pytest.raises(DataError, match=r"got numbers, as in exports of Tatoeba; .* cut -f2,4"):
            list(read_pairs(written(tmp_path, f"{columns}\n" * 9), format="tsv-extra", bad_lines="skip"))


def test_json_over_several_lines_is_named(tmp_path: Path) -> None:
    for content in (json.dumps([{"source": "a", "target": "b"}]), json.dumps({"source": "a"}, indent=1)):
        with pytest.raises(DataError, match=r"got JSON over several lines or in a list; .*jq -c '\.\[\]'"):
            list(read_pairs(written(tmp_path, content)))


def test_references_come_in_every_form(tmp_path: Path) -> None:
    path = written(tmp_path, '{"source": "a", "target": ["b", "c"]}\n{"source": "a"}\n')
    judged = read_judged([path], bad_lines="skip")
    assert (list(judged), judged.skipped) == ([("a", ("b", "c"))], 1)
    assert list(read_judged([written(tmp_path, TABLE)])) == PAIRS


# -- running text ----------------------------------------------------------------------------------------------


def test_json_lines_are_texts_with_a_blank_line_between(tmp_path: Path) -> None:
    texts = ["one\ntwo\n", "three"]
    path = written(tmp_path, "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts))
    assert list(RunningText([path])) == ["one", "two", "", "three", ""]
    assert list(read_texts([path])) == texts
    assert next(RunningText([path], format="text")).startswith('{"id": 1, ')
    with pytest.raises(
        DataError, match=r'x:1: expected \{"text": text\}, got \{"content": str\}; .*--data-format text'
    ):
        list(read_texts([written(tmp_path, '{"content": "a"}\n')]))


def test_a_text_without_line_feeds_is_cut_between_characters_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.tasks.text.lines.LONGEST_LINE_BYTES", 10)
    read = RunningText([written(tmp_path, "ééééééééé\nshort\n")])
    assert list(read) == ["éééééé", "ééé", "short"]
    assert read.told == [f"1 lines of more than 16 MiB cut (the first: {tmp_path}/x:1)"]


def test_parts_are_the_text_and_cut_no_character() -> None:
    for text in ("e\u0301" * 2_000, "word " * 900, "-" * 5_000, "a" + " " * 3_000 + "b"):
        parts = list(bounded(normalise(text)))
        assert "".join(parts) == normalise(text)
        assert max(map(len, parts)) <= 512
        assert not [part for part in parts if part[:1] == "\u0301"]


# -- the commands ----------------------------------------------------------------------------------------------


def test_every_reading_command_has_the_flags_that_messages_name() -> None:
    flags = {name: {one.name for one in fields(cast(Any, command))} for name, command in COMMANDS.items()}
    reading = {name: names for name, names in flags.items() if {"data", "valid", "input"} & names}
    assert set(reading) == {"translate", "align", "evaluate", "view", "measure"}
    del reading["view"]  # which reads one text: its lines are no examples
    del reading["measure"]  # whose bad lines are rows of its answer, with their error
    for name, task in TASKS.items():
        reading[name] = {one.name for one in fields(task.config)}
    assert [name for name, names in reading.items() if not {"data_format", "bad_lines"} <= names] == []


def test_the_page_has_every_form() -> None:
    page = (ROOT / "docs" / "command-line.md").read_text(encoding="utf-8")
    table = page.partition("| `--data-format` |")[2].partition("\n\n")[0]
    assert set(re.findall(r"^\| `([a-z-]+)` \|", table, re.MULTILINE)) == set(get_args(DataFormat))
    packed = page.partition("Files may be packed by ")[2].partition(";")[0]
    assert set(re.findall(r"gzip|bzip2|xz|zstd|zip(?= archive)", packed)) == {one.name for one in PACKINGS.values()}


def test_answers_keep_the_places_of_lines_left_out(tmp_path: Path) -> None:
    reader = read_pairs(written(tmp_path, b"bad\na\tb\nbad\nbad\nc\td\nbad\n"), bad_lines="skip")
    assert list(reader.with_gaps(pair.source for pair in reader)) == [None, "a", None, None, "c", None]
    assert reader.told[0].startswith("4 bad lines left out; the first: ")


def test_an_input_is_opened_once_for_its_head_and_its_lines(tmp_path: Path) -> None:
    lines = Lines(written(tmp_path, "\ufeffone\ntwo\n"))
    assert lines.head == b"one\ntwo\n"
    assert [line.raw for line in lines] == [b"one", b"two"]
