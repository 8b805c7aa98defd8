"""Parallel text: pairs of sentences from a table, from two aligned files, or from JSON lines."""

import os
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import chain, zip_longest
from typing import Any, Literal, NamedTuple, get_args

from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.tasks.text.lines import BadLines, Line, Reader, StrPath, decoded, raw_lines
from regard.tasks.text.unicode import normalise

PairFormat = Literal["tsv", "tsv-extra", "jsonl", "aligned"]
JSON_SUFFIXES = (".jsonl", ".ndjson", ".json")


class Pair(NamedTuple):
    """A sentence and its translation."""

    source: str
    target: str


def read_pairs(
    paths: StrPath | Sequence[StrPath], *, format: PairFormat | None = None, bad_lines: BadLines = "stop"
) -> Reader[Pair]:
    """Pairs from files, gzipped or not, read line by line and brought to NFC.

    Args:
        paths: one file, or several files of one format, read one after the other; or two files with aligned lines, or
            several such twos. "-" is standard input. Each file is opened for its first pair.
        format: "tsv" (source, tab, target), "tsv-extra" (the same, with further columns ignored), "jsonl" ({"source":
            ..., "target": ...} on each line) or "aligned" (a.en a.de b.en b.de ...). None decides by the number and the
            names of the files.
        bad_lines: "stop" at the first bad line, or "skip" and count them in the reader's `skipped`.

    Raises:
        ArgumentError: the format is unknown, cannot be decided, or needs another number of files.
        DataError: while reading, if a line is bad (for example, a sentence is empty), aligned files have
            different lengths, there is no pair at all, or a file cannot be read.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     path = Path(folder, "pairs.tsv")
    ...     _ = path.write_text("Good day.\\tBonjour.\\nno tab\\n", encoding="utf-8")
    ...     pairs = read_pairs(path, bad_lines="skip")
    ...     print(list(pairs), pairs.skipped)
    [Pair(source='Good day.', target='Bonjour.')] 1
    """
    files = [paths] if isinstance(paths, str | os.PathLike) else list(paths)
    must_hold = f"pairs of sentences in {' and '.join(map(str, files))}"
    return Reader(*pair_records(files, format), bad_lines=bad_lines, must_hold=must_hold)


def pair_records(files: Sequence[StrPath], format: PairFormat | None) -> tuple[Iterator[Any], Callable[[Any], Pair]]:
    """The raw record of each pair in files, and a function that decodes it; raises ArgumentError for an unknown or
    ambiguous format, or a wrong number of files."""
    lines = chain.from_iterable(map(raw_lines, files))
    match _format(files, format):
        case "aligned":
            return chain.from_iterable(map(_side_by_side, files[::2], files[1::2])), _from_aligned
        case "jsonl":
            return lines, _from_json
        case table:
            return lines, partial(_from_table, extra_columns=table == "tsv-extra")


def _format(files: Sequence[StrPath], format: PairFormat | None) -> PairFormat:
    if format is not None and format not in get_args(PairFormat):
        raise ArgumentError(f"expected a format out of {', '.join(get_args(PairFormat))}, got {format!r}")
    if not files or (format == "aligned" and len(files) % 2):
        raise ArgumentError(
            f"expected files of pairs, or two aligned files, got {len(files)} with format {format!r}; "
            "give one or more for tsv, tsv-extra and jsonl, two (or four, ...) for aligned"
        )
    if format:
        return format
    if all(map(is_json_lines, files)):
        return "jsonl"
    names = [os.fspath(file).lower().removesuffix(".gz") for file in files]
    if len(files) == 1 or all(name.endswith(".tsv") for name in names):
        return "tsv"
    if len(files) == 2:
        return "aligned"
    raise ArgumentError(
        f"expected one form for all of {len(files)} files, got names like {names[0]} and {names[-1]}; "
        "name it: tsv, tsv-extra, jsonl or aligned"
    )


def is_json_lines(path: StrPath) -> bool:
    """True if the name of a file promises a JSON object on each line.

    >>> is_json_lines("pairs.jsonl.gz"), is_json_lines("pairs.tsv")
    (True, False)
    """
    return os.fspath(path).lower().removesuffix(".gz").endswith(JSON_SUFFIXES)


def _from_table(line: Line, *, extra_columns: bool) -> Pair:
    cells = decoded(*line).split("\t")
    if len(cells) < 2:
        raise DataError(f"{line.place}: expected a source and a target with a tab between them, got no tab; add it")
    if len(cells) > 2 and not extra_columns:
        raise DataError(
            f"{line.place}: expected 2 columns, got {len(cells)}; "
            "remove the others, or ask for the format 'tsv-extra' to leave them out"
        )
    return _pair((line.place, cells[0]), (line.place, cells[1]))


def _from_aligned(lines: tuple[Line, Line]) -> Pair:
    source, target = lines
    return _pair((source.place, decoded(*source)), (target.place, decoded(*target)))


def _from_json(line: Line) -> Pair:
    text = decoded(*line)
    try:
        record = parse_json(text)
    except DataError as error:
        raise DataError(
            f"{line.place}: expected one JSON object a line, got something else ({error}); correct the line"
        ) from None
    sides = [record.get(key) if isinstance(record, dict) else None for key in Pair._fields]
    texts = [_normalised(line.place, side) for side in sides if isinstance(side, str)]
    if len(texts) != len(sides):
        raise DataError(
            f'{line.place}: expected {{"source": text, "target": text}}, got {_shape(record)}; correct the line'
        )
    return _pair((line.place, texts[0]), (line.place, texts[1]))


def _shape(record: object) -> str:
    if not isinstance(record, dict):
        return f"a JSON {type(record).__name__}"
    held = ", ".join(f'"{key[:40]}": {type(value).__name__}' for key, value in list(record.items())[:5])
    return f"{{{held}}}"


def _normalised(place: str, text: str) -> str:
    try:
        return normalise(text)
    except DataError as error:
        raise DataError(f"{place}: {error}") from None


def _pair(source: tuple[str, str], target: tuple[str, str]) -> Pair:
    for (place, text), name in zip((source, target), Pair._fields, strict=True):
        if not text.strip():
            raise DataError(f"{place}: expected a {name} sentence, got an empty one; remove the pair or fill it in")
    return Pair(source[1], target[1])


def _side_by_side(first: StrPath, second: StrPath) -> Iterator[tuple[Line, Line]]:
    for number, (source, target) in enumerate(zip_longest(raw_lines(first), raw_lines(second)), 1):
        if source is None or target is None:
            short, long = (first, target) if source is None else (second, source)
            raise DataError(
                f"{long.place}: expected aligned files to have as many lines as each other, "
                f"but {os.fspath(short)} ends after line {number - 1}; give files of equal length"
            )
        yield source, target
