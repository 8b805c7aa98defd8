"""The gate: the ending of a name says the form and the packing, and other encodings are named by their marks."""

import bz2
import gzip
import json
import lzma
import os
import re
from collections.abc import Callable
from dataclasses import fields
from importlib import import_module
from pathlib import Path
from typing import Any, cast, get_args

import pytest

from regard.cli.commands import COMMANDS
from regard.errors import ArgumentError, DataError
from regard.tasks.registry import TASKS
from regard.tasks.text.forms import RunningText
from regard.tasks.text.lines import ENDINGS, PACKINGS, DataFormat, read_lines
from regard.tasks.text.pairs import read_judged, read_pairs
from regard.tasks.text.unicode import bounded, normalise
from tests import ROOT

PAIRS = [(f"a cat {n}, it says", f"eine „Katze“ {n}") for n in range(20)]
TABLE = "".join(f"{a}\t{b}\n" for a, b in PAIRS).encode()


def written(folder: Path, content: bytes | str, name: str = "x.tsv") -> Path:
    path = folder / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def zstd(content: bytes) -> bytes:
    packed: bytes = import_module("backports.zstd").compress(content)
    return packed


PACKERS: dict[str, tuple[str, Callable[[bytes], bytes]]] = {
    ".gz": ("gzip", gzip.compress),
    ".bz2": ("bzip2", bz2.compress),
    ".xz": ("xz", lzma.compress),
    ".zst": ("zstd", zstd),
}


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_text_is_unpacked_by_its_ending(tmp_path: Path, ending: str) -> None:
    kind, pack = PACKERS[ending]
    assert list(read_pairs(written(tmp_path, pack(TABLE), f"x.tsv{ending}"))) == PAIRS
    with pytest.raises(DataError, match=r"x\.tsv:1: expected"):
        list(read_pairs(written(tmp_path, pack(TABLE), "x.tsv")))
    with pytest.raises(DataError, match=rf"x\.tsv{ending}:1: expected {kind} data by the name"):
        list(read_pairs(written(tmp_path, TABLE, f"x.tsv{ending}"), bad_lines="skip"))


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_data_cut_short_or_damaged_end_the_reading(tmp_path: Path, ending: str) -> None:
    kind, pack = PACKERS[ending]
    packed = pack(os.urandom(100_000).hex().encode())
    middle = len(packed) // 2
    for spoilt in (packed[:middle], packed[:middle] + bytes(64) + packed[middle + 64 :]):
        with pytest.raises(DataError, match=rf"x{ending}:\d+: expected (more )?{kind} data"):
            list(read_lines(written(tmp_path, spoilt, f"x{ending}"), bad_lines="skip"))


@pytest.mark.parametrize("encoding", ["utf-16", "utf-32"])
def test_a_byte_order_mark_names_another_encoding(tmp_path: Path, encoding: str) -> None:
    path = written(tmp_path, ("\ufeff" + TABLE.decode()).encode(f"{encoding}-be"))
    for read in (read_pairs, read_lines):
        with pytest.raises(DataError, match=rf"got {encoding.upper()} by its byte order mark; convert it: iconv -f"):
            list(read(path, bad_lines="skip"))


def test_utf16_without_a_mark_is_all_bad_lines(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"x\.tsv:1: expected text in UTF-8, got a NUL byte at byte 2; .*iconv"):
        list(read_pairs(written(tmp_path, TABLE.decode().encode("utf-16-le"))))


TMX = """<?xml version="1.0" encoding="utf-16"?>
<tmx version="1.4"><header srclang="en-US" adminlang="en"/><body>{}</body></tmx>
"""
UNIT = (
    '<tu><tuv xml:lang="de"><seg>{1}</seg></tuv>\n'
    '<tuv xml:lang="EN-us"><seg>a <bpt i="1">&lt;b&gt;</bpt><hi>cat</hi><ept i="1"/> {0}</seg></tuv></tu>'
)
FORMS = {
    "csv": "source,target\r\n" + "".join(f'"{a}","{b}"\r\n' for a, b in PAIRS),
    "csv of columns with names": "id,Target,Source\n" + "".join(f'{n},"{b}","{a}"\n' for n, (a, b) in enumerate(PAIRS)),
    "csv with semicolons": "source;target\n" + "".join(f"{a};{b}\n" for a, b in PAIRS),
    "csv-no-header": "".join(f'"{a}",{b}\n' for a, b in PAIRS),
    "jsonl": "".join(json.dumps({"source": a, "target": b}) + "\n" for a, b in PAIRS),
    "tmx": TMX.format("\n".join(UNIT.format(a.removeprefix("a cat "), b) for a, b in PAIRS)),
}


@pytest.mark.parametrize("form", FORMS)
def test_a_form_is_told_by_the_ending_or_by_the_flag(tmp_path: Path, form: str) -> None:
    told: Any = form.split()[0]
    for name, given in ((f"pairs.{told}", None), ("pairs.txt", told)):
        path = written(tmp_path, FORMS[form], name)
        if name != "pairs.csv-no-header":
            assert list(read_pairs(path, format=given)) == PAIRS
            assert list(read_pairs([path, path], format=given)) == PAIRS * 2
    every = [written(tmp_path, FORMS[form], f"pairs.{form}") for form in ("csv", "jsonl", "tmx")]
    assert list(read_pairs(every)) == PAIRS * 3


def test_a_name_that_tells_no_form_is_refused_before_its_content(tmp_path: Path) -> None:
    for name in ("x", "x.json", "x.zip", "x.tar.gz", "x.parquet", "x.xml"):
        for read in (read_pairs, lambda path: RunningText([path])):
            with pytest.raises(ArgumentError, match=rf"expected a name that ends in .*, got {tmp_path}/{name}: say"):
                read(tmp_path / name)
    for names in (["a.txt"], ["a.en", "a.fr", "b.fr"], ["a.en", "b.tsv"], ["-"]):
        with pytest.raises(ArgumentError, match=rf"two files of aligned lines .* got {len(names)} \(.*--data-format"):
            read_pairs(names)
    with pytest.raises(ArgumentError, match=r"got a\.tsv: say its form"):
        RunningText(["a.tsv"])


def test_quotes_in_a_csv_may_hold_line_feeds_and_quotes(tmp_path: Path) -> None:
    path = written(tmp_path, 'source,target\n"one\ntwo","a ""b"", c"\nx,\n"y",z\ncaf\xe9,d\n'.encode("latin-1"))
    pairs = read_pairs(path, format="csv", bad_lines="skip")
    assert (list(pairs), pairs.skipped) == ([("one\ntwo", 'a "b", c'), ("y", "z")], 2)
    assert (
        pairs.first_skipped == f"{path}:4: expected a target sentence, got an empty one; remove the pair or fill it in"
    )


def test_the_header_of_a_csv_is_no_pair_and_tells_its_columns(tmp_path: Path) -> None:
    path = written(tmp_path, 'English words,French words\n"Hi, you.","Salut, toi."\nRun!,Cours !\n', "x.csv")
    pairs = read_pairs(path)
    assert list(pairs) == [("Hi, you.", "Salut, toi."), ("Run!", "Cours !")]
    assert pairs.told == [
        f"{path}: the first line is a header, sources are 'English words' and targets 'French words' "
        "(--data-format csv-no-header reads it as a pair)"
    ]
    assert next(read_pairs(path, format="csv-no-header")) == ("English words", "French words")
    for head, row, said in (
        ("id,en,fr", "1,a,b", r"x\.csv:1: expected a header with `source` and `target`.*got 3 columns \(id, en, fr\)"),
        ("en", "a", r"x\.csv:1: expected a comma or a semicolon .*, neither stands there"),
        ("en, or British;fr", "a;b", r"x\.csv:1: expected a comma or a semicolon .*, both stand there"),
        ("source,target", "Hi, you.,Salut", r"x\.csv:2: expected 2 cells, got 3; put quotes around"),
        ("id,source,target", "Hi,Salut", r"x\.csv:2: expected 3 cells, got 2"),
        ("source,target", '"a, b,c\nd,e', r"x\.csv:3: expected 2 cells, got 1"),
    ):
        with pytest.raises(DataError, match=said):
            list(read_pairs(written(tmp_path, f"{head}\n{row}\n", "x.csv")))


@pytest.mark.parametrize("size", [70_000, 200_000])  # Python's own limit is 131,072
def test_a_first_cell_of_a_csv_may_be_of_any_size(tmp_path: Path, size: int) -> None:
    path = written(tmp_path, f'"{"y" * size}, ""q""";z\n"c, d";e\n')
    assert list(read_pairs(path, format="csv-no-header")) == [("y" * size + ', "q"', "z"), ("c, d", "e")]


def test_references_come_in_every_form(tmp_path: Path) -> None:
    path = written(tmp_path, '{"source": "a", "target": ["b", "c"]}\n{"source": "a"}\n', "x.jsonl")
    judged = read_judged([path], bad_lines="skip")
    assert (list(judged), judged.skipped) == ([("a", ("b", "c"))], 1)
    assert list(read_judged([written(tmp_path, TABLE)])) == PAIRS


def test_json_lines_are_texts_with_a_blank_line_between(tmp_path: Path) -> None:
    texts = ["one\ntwo\n", "three"]
    path = written(tmp_path, "".join(json.dumps({"id": 1, "text": text}) + "\n" for text in texts), "x.jsonl")
    assert list(RunningText([path])) == ["one", "two", "", "three", ""]
    assert next(RunningText([path], format="text")).startswith('{"id": 1, ')
    with pytest.raises(
        DataError, match=r'x\.jsonl:1: expected \{"text": text\}, got \{"content": str\}; .*--data-format text'
    ):
        list(RunningText([written(tmp_path, '{"content": "a"}\n', "x.jsonl")]))
    for content in ('[{"text": "a"}]\n', '{\n "text": "a"\n}\n'):
        with pytest.raises(DataError, match=r"x\.jsonl:1: expected "):
            list(RunningText([written(tmp_path, content, "x.jsonl")]))


def test_a_text_without_line_feeds_is_cut_between_characters_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("regard.tasks.text.lines.LONGEST_LINE_BYTES", 10)
    read = RunningText([written(tmp_path, "ééééééééé\nshort\n", "x.txt")])
    assert list(read) == ["éééééé", "ééé", "short"]
    assert read.told == [f"1 lines of more than 16 MiB cut (the first: {tmp_path}/x.txt:1)"]


def test_parts_are_the_text_and_cut_no_character() -> None:
    for text in ("e\u0301" * 2_000, "word " * 900, "-" * 5_000, "a" + " " * 3_000 + "b"):
        parts = list(bounded(normalise(text)))
        assert "".join(parts) == normalise(text)
        assert max(map(len, parts)) <= 512
        assert not [part for part in parts if part[:1] == "\u0301"]


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
    packed = page.partition("says that it is packed: ")[2].partition(". ")[0]
    assert set(re.findall(r"\.\w+", packed)) == set(PACKINGS)
    assert set(re.findall(r"\.\w+(?=`)", table)) - {".en", ".pt_BR"} == set(ENDINGS)


def test_answers_keep_the_places_of_lines_left_out(tmp_path: Path) -> None:
    reader = read_pairs(written(tmp_path, b"bad\na\tb\nbad\nbad\nc\td\nbad\n"), bad_lines="skip")
    assert list(reader.with_gaps(pair.source for pair in reader)) == [None, "a", None, None, "c", None]
    assert reader.told[0].startswith("4 bad lines left out; the first: ")
