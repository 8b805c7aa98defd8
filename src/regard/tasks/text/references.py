"""Sentences with reference translations."""

from collections.abc import Iterator, Sequence
from functools import partial
from itertools import zip_longest
from typing import Any, NamedTuple

from regard.errors import ArgumentError, DataError
from regard.tasks.text.forms import RecordForm, in_a_row, json_of
from regard.tasks.text.gate import PairFormat
from regard.tasks.text.lines import BadLines, Line, Lines, Reader, StrPath, decoded
from regard.tasks.text.pairs import PAIR_FORMS, read_items
from regard.tasks.text.unicode import normalise


class Judged(NamedTuple):
    source: str
    references: tuple[str, ...]


def read_references(source: StrPath, references: Sequence[StrPath], *, bad_lines: BadLines = "stop") -> Reader[Judged]:
    """The lines of a file, each with the lines of the same number in other files: one file for each set of references.

    A sentence may lack some references, but not all. Its lines in those files are then empty.

    >>> import tempfile
    >>> from pathlib import Path
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     paths = [Path(folder, name) for name in ("en", "fr.0", "fr.1")]
    ...     for path, text in zip(paths, ("Hi.\\n", "Salut.\\n", "Bonjour.\\n")):
    ...         _ = path.write_text(text)
    ...     print(list(read_references(paths[0], paths[1:])))
    [Judged(source='Hi.', references=('Salut.', 'Bonjour.'))]
    """
    if not references:
        raise ArgumentError("expected one file of references or more, got none")
    sides = (partial(_judged, lines) for lines in _side_by_side([source, *references]))
    return Reader(sides, bad_lines=bad_lines, must_hold=f"sentences in {source}")


def read_judged(
    paths: Sequence[StrPath], *, format: PairFormat | None = None, bad_lines: BadLines = "stop"
) -> Reader[tuple[str, str | tuple[str, ...]]]:
    """Pairs in any form that `read_pairs` takes; the target of a JSON object may be a list of texts."""
    forms: dict[str, RecordForm[Any, Any]] = {**PAIR_FORMS, "jsonl": RecordForm(in_a_row, _judged_json)}
    return read_items(paths, format, forms, bad_lines=bad_lines)


def _judged_json(line: Line) -> Judged:
    try:
        record = json_of(line)
        source, target = record["source"], record["target"]
        texts = [source, *([target] if isinstance(target, str) else target)]
        is_whole = len(texts) > 1 and all(isinstance(text, str) and text.strip() for text in texts)
    except (ValueError, KeyError, TypeError):
        is_whole = False
    if not is_whole:
        raise DataError(
            f'{line.place}: expected {{"source": text, "target": text or a list of texts}}, none of them empty, '
            f"got {line.raw[:60].decode(errors='replace')!r}; correct the line"
        )
    return Judged(normalise(source), tuple(map(normalise, texts[1:])))


def _side_by_side(paths: Sequence[StrPath]) -> Iterator[tuple[Line, ...]]:
    for number, lines in enumerate(zip_longest(*map(Lines, paths)), 1):
        if None in lines:
            short = paths[lines.index(None)]
            raise DataError(
                f"{short} ends after line {number - 1}, and other files do not: expected as many lines in each of "
                f"{', '.join(map(str, paths))}"
            )
        yield lines


def _judged(lines: tuple[Line, ...]) -> Judged:
    source, *references = (decoded(*line) for line in lines)
    kept = tuple(text for text in references if text.strip())
    if not source.strip() or not kept:
        missing = "a source" if not source.strip() else "a reference in one of the files"
        raise DataError(f"{lines[0].place}: expected {missing}, got an empty line; fill it in or remove the line")
    return Judged(source, kept)
