"""Readers: every bad line is named, and only the line feed ends a line."""

import gzip
import io
import itertools
import json
import os
import sys
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from regard.errors import ArgumentError, DataError
from regard.tasks.text import lines as lines_module
from regard.tasks.text.lines import read_lines
from regard.tasks.text.pairs import Pair, read_pairs
from regard.tasks.text.unicode import normalise
from tests.conftest import standard_input

GOOD = b"a cat\teine Katze\n"


def written(folder: Path, content: bytes, name: str = "pairs.tsv") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


one_line = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r\ufeff"))
cell = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\n\r\t\ufeff"), min_size=1).filter(
    str.strip
)


@pytest.mark.parametrize("packed", [False, True])
@given(texts=st.lists(one_line))
@example(texts=["a\x01b", "\u2028 \u2029 \x85 \x0b \x0c \x1c", "", "last"])
def test_lines_come_back(tmp_path_factory: pytest.TempPathFactory, texts: list[str], packed: bool) -> None:
    content = "".join(text + "\n" for text in texts).encode()
    content, name = (gzip.compress(content, 1), "x.gz") if packed else (content, "x")
    path = written(tmp_path_factory.mktemp("lines"), content, name)
    assert list(read_lines(path)) == [normalise(text) for text in texts]


@given(pairs=st.lists(st.tuples(cell, cell), min_size=1))
def test_pairs_come_back_in_every_format(
    tmp_path_factory: pytest.TempPathFactory, pairs: list[tuple[str, str]]
) -> None:
    folder = tmp_path_factory.mktemp("pairs")
    table = written(folder, "".join(f"{a}\t{b}\n" for a, b in pairs).encode())
    records = [json.dumps({"id": 7, "source": a, "target": b}) + "\n" for a, b in pairs]
    objects = written(folder, "".join(records).encode(), "pairs.jsonl")
    names = ("side.en", "side.de")
    sides = [written(folder, "".join(pair[n] + "\n" for pair in pairs).encode(), name) for n, name in enumerate(names)]
    expected = [Pair(normalise(a), normalise(b)) for a, b in pairs]
    assert [list(read_pairs(paths)) for paths in (table, objects, sides)] == [expected] * 3


@pytest.mark.parametrize(
    "content",
    [
        GOOD + b"b\tB",
        b"\xef\xbb\xbf" + GOOD + b"b\tB\n",
        GOOD.replace(b"\n", b"\r\n") + b"b\tB\r\n",
        gzip.compress(GOOD) + gzip.compress(b"b\tB\n"),
    ],
    ids=["no last line end", "byte order mark", "CRLF", "two gzip members"],
)
def test_marks_of_other_systems_are_no_text(tmp_path: Path, content: bytes) -> None:
    name = "x.tsv.gz" if content.startswith(b"\x1f\x8b") else "x.tsv"
    assert list(read_pairs(written(tmp_path, content, name))) == [("a cat", "eine Katze"), ("b", "B")]


def test_a_byte_order_mark_further_down_is_text(tmp_path: Path) -> None:
    assert list(read_lines(written(tmp_path, b"a\n\xef\xbb\xbfb\n"))) == ["a", "\ufeffb"]


BAD_LINES = [
    ("x.tsv", b"no tab here\n", "got no tab"),
    ("x.tsv", b"\n", "got no tab"),
    ("x.tsv", b"a\tb\tc\n", "expected 2 columns, got 3"),
    ("x.tsv", b"\tb\n", "expected a source sentence, got an empty one"),
    ("x.tsv", b"a\t  \n", "expected a target sentence, got an empty one"),
    ("x.tsv", b"caf\xe9\tb\n", "expected UTF-8, got byte 0xe9 at byte 4"),
    ("x.tsv", b"a\0\tb\n", "expected text in UTF-8, got a NUL byte at byte 2; take it out"),
    ("x.jsonl", b'{"source": "a"}\n', r'got \{"source": str\}'),
    ("x.jsonl", b'{"source": "a", "target": 3}\n', '"target": int'),
    ("x.jsonl", b'["a", "b"]\n', "got a JSON list"),
    ("x.jsonl", b"not json\n", "expected one JSON object a line"),
    ("x.jsonl", b"\n", "expected one JSON object a line"),
    ("x.jsonl", b'{"source": "a", "target": "\\ud800"}\n', "half of a surrogate pair"),
    ("x.jsonl", b"[" * 100_000 + b"\n", "expected one JSON object a line"),
    ("x.jsonl", b"1" * 5000 + b"\n", "expected one JSON object a line"),
    ("x.jsonl", b'{"source": "", "target": "b"}\n', "expected a source sentence"),
]


@pytest.mark.parametrize(("name", "bad", "message"), BAD_LINES)
def test_a_bad_line_is_named_or_skipped_and_counted(tmp_path: Path, name: str, bad: bytes, message: str) -> None:
    good = GOOD if name == "x.tsv" else b'{"source": "a cat", "target": "eine Katze"}\n'
    path = written(tmp_path, good + bad + good + bad, name)
    with pytest.raises(DataError, match=f"{name}:2: .*{message}"):
        list(read_pairs(path))
    pairs = read_pairs(path, bad_lines="skip")
    assert list(pairs) == [("a cat", "eine Katze")] * 2
    assert pairs.skipped == 2
    assert pairs.first_skipped is not None
    assert ":2: " in pairs.first_skipped


def test_aligned_files_of_unequal_length_are_refused_even_when_skipping(tmp_path: Path) -> None:
    short, long = written(tmp_path, b"a\nb\n", "x.en"), written(tmp_path, b"A\nB\nC\n", "x.de")
    for files in ([short, long], [long, short]):
        pairs = read_pairs(files, bad_lines="skip")
        assert [next(pairs), next(pairs)] != []
        with pytest.raises(DataError, match=r"x\.de:3: .*x\.en ends after line 2"):
            next(pairs)


def test_a_bad_line_of_aligned_files_takes_its_partner_along(tmp_path: Path) -> None:
    files = [written(tmp_path, b"a\n\nc\nd\n", "x.en"), written(tmp_path, b"A\nB\nC\xff\nD\n", "x.de")]
    with pytest.raises(DataError, match=r"x\.en:2: expected a source sentence"):
        list(read_pairs(files))
    pairs = read_pairs(files, bad_lines="skip")
    assert (list(pairs), pairs.skipped) == ([("a", "A"), ("d", "D")], 2)


def test_data_without_a_pair_are_refused(tmp_path: Path) -> None:
    for name, content in (("x.tsv", b""), ("x.tsv.gz", gzip.compress(b"")), ("x.csv", b""), ("x.csv", b"\n")):
        with pytest.raises(DataError, match=rf"pairs of sentences in .*{name}, got nothing"):
            list(read_pairs(written(tmp_path, content, name)))
    with pytest.raises(DataError, match=r"got 2 bad lines only \(the first: .*pairs\.tsv:1: .*no tab"):
        list(read_pairs(written(tmp_path, b"a\nb\n"), bad_lines="skip"))
    empty = [written(tmp_path, b"", "x.en"), written(tmp_path, b"", "x.de")]
    with pytest.raises(DataError, match=r"x\.en and .*x\.de, got nothing"):
        list(read_pairs(empty))


def test_no_lines_at_all_are_fine_for_lines(tmp_path: Path) -> None:
    assert list(read_lines(written(tmp_path, b""))) == []
    assert list(read_lines(written(tmp_path, b"\n\n"))) == ["", ""]


def test_files_that_cannot_be_read_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "x.tsv").mkdir()
    for read in (read_lines, read_pairs):
        with pytest.raises(DataError, match=r"cannot read .*absent\.tsv \(No such file.*check the path"):
            list(read(tmp_path / "absent.tsv"))
        with pytest.raises(DataError, match=r"cannot read .*\(Is a directory\); name a file in it"):
            list(read(tmp_path / "x.tsv"))

    def refuse(*_: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(DataError, match=r"\(Is a directory\); name a file in it"):  # so Windows says it of a folder
        list(read_lines(tmp_path))
    # The tests may run as root, whom no permission stops.
    with pytest.raises(DataError, match=r"x\.tsv \(Permission denied\); allow reading it"):
        list(read_lines("x.tsv"))


def test_a_file_without_line_ends_does_not_fill_the_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines_module, "LONGEST_LINE_BYTES", 10)
    assert list(read_lines(written(tmp_path, b"123456789\n"))) == ["123456789"]
    with pytest.raises(DataError, match=r"pairs\.tsv:2: .*at most 10 bytes"):
        list(read_lines(written(tmp_path, b"1\n12345678901\n")))


def test_standard_input_is_read_like_a_file(monkeypatch: pytest.MonkeyPatch) -> None:
    def typed(content: bytes) -> None:
        monkeypatch.setattr(sys, "stdin", standard_input(content, "ascii"))

    typed(b"\xef\xbb\xbfcaf\xc3\xa9\r\n\n\xe2\x80\xa8x")
    assert list(read_lines()) == ["café", "", "\u2028x"]
    assert not sys.stdin.closed
    typed(GOOD)
    assert list(read_pairs("-", format="tsv")) == [("a cat", "eine Katze")]
    typed(b"a\n\xff\n")
    with pytest.raises(DataError, match="standard input:2: expected UTF-8"):
        list(read_lines("-"))
    typed(b"a\n\xff\nb")
    skipping = read_lines(bad_lines="skip")
    assert (list(skipping), skipping.skipped) == (["a", "b"], 1)


def test_lines_are_read_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pair is there before the second line has been written, as from a pipe."""

    reading, writing = os.pipe()
    with open(reading, "rb") as pipe, open(writing, "wb", buffering=0) as speaker:
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(pipe))
        pairs = read_pairs("-", format="tsv")
        for source, target in (("a", "b"), ("c", "d")):
            speaker.write(f"{source}\t{target}\n".encode())
            assert next(pairs) == (source, target)


def test_formats_and_numbers_of_files_that_do_not_fit_are_refused(tmp_path: Path) -> None:
    path = str(written(tmp_path, GOOD))
    with pytest.raises(ArgumentError, match="got 'xls'"):
        read_pairs(path, format="xls")  # type: ignore[arg-type]
    for paths, chosen in (([path], "aligned"), ([path] * 3, "aligned"), ([], "tsv"), ([], None)):
        with pytest.raises(ArgumentError, match=f"two files of aligned lines .*, got {len(paths)}"):
            read_pairs(paths, format=chosen)  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="got 'ignore'"):
        read_pairs(path, bad_lines="ignore")  # type: ignore[arg-type]


def test_several_files_of_one_form_are_read_one_after_the_other(tmp_path: Path) -> None:
    for name, side in itertools.product("ab", ("en", "de")):
        (tmp_path / f"{name}.{side}").write_text(f"{name} {side} 1\n{name} {side} 2\n")
        (tmp_path / f"{name}.tsv").write_text(f"{name} en 1\t{name} de 1\n{name} en 2\t{name} de 2\n")
    expected = [(f"{name} en {number}", f"{name} de {number}") for name in "ab" for number in (1, 2)]
    tables = [tmp_path / "a.tsv", tmp_path / "b.tsv"]
    sides = [tmp_path / f"{name}.{side}" for name in "ab" for side in ("en", "de")]
    assert list(read_pairs(tables)) == list(read_pairs(sides)) == list(read_pairs(sides, format="aligned")) == expected
    (tmp_path / "b.tsv").write_text("no tab\n")
    with pytest.raises(DataError, match=r"b\.tsv:1: expected a source and a target"):
        list(read_pairs(tables))
