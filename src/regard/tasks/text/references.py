"""Sentences with reference translations."""

from collections.abc import Iterator, Sequence
from itertools import zip_longest
from typing import NamedTuple

from regard.errors import ArgumentError, DataError
from regard.files.untrusted import parse_json
from regard.tasks.text.lines import Line, Reader, StrPath, decoded, raw_lines
from regard.tasks.text.unicode import normalise


class Judged(NamedTuple):
    """A sentence and its reference translations, at least one."""

    source: str
    references: tuple[str, ...]


def read_references(source: StrPath, references: Sequence[StrPath]) -> Reader[Judged]:
    """The lines of a file, each with the lines of the same number in other files: one file for each set of references.

    A sentence may lack some references, but not all. Its lines in those files are then empty.

    Raises:
        ArgumentError: there is no file of references.
        DataError: while reading, if a line is not UTF-8, a source is empty, a sentence has no reference,
            files have different lengths, or no line can be read.

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
    must_hold = f"sentences in {source}"
    return Reader(_side_by_side([source, *references]), _judged, bad_lines="stop", must_hold=must_hold)


def read_judged(path: StrPath) -> Reader[Judged]:
    """Read JSON lines: {"source": ..., "target": ...}, where the target is a text or a list of texts.

    Raises:
        DataError: while reading, if a line is something else, a text is empty, or no line can be read.
    """
    return Reader(raw_lines(path), _judged_json, bad_lines="stop", must_hold=f"sentences in {path}")


def _judged_json(line: Line) -> Judged:
    try:
        record = parse_json(decoded(*line))
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
    for number, lines in enumerate(zip_longest(*map(raw_lines, paths)), 1):
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
