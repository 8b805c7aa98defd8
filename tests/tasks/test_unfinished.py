"""A file of translations: in order, in constant memory, and gone on with after any interruption."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, DataError, RunFolderError
from regard.models.config import TransformerConfig
from regard.models.transformer import Transformer
from regard.tasks.generation.config import Beam
from regard.tasks.text.lines import Line, Lines
from regard.tasks.text.tokenizer_recipes import Characters
from regard.tasks.translation.bulk import BulkTranslation, Notes, answered, opened, sentence_and_prefix, whole_line
from regard.tasks.translation.results import Translation
from regard.tasks.translation.translation_model import TranslationOptions
from regard.tasks.translation.translator import Translator
from tests import ROOT

SETTINGS: dict[str, Any] = {"model": "abc", "beam": 1}
LINES = [f"{n:x}" * (n % 3 + 1) for n in range(23)]
WINDOW = 5
SEED = 2


def tiny() -> Translator:
    tokenizer = Characters().train(["0123456789abcdef "])
    sizes: dict[str, Any] = {"dim": 8, "num_heads": 2, "encoder_layers": 1, "decoder_layers": 1, "feed_forward_dim": 8}
    model = Transformer(
        TransformerConfig(**sizes, positions="learned", max_length=7),
        source_vocab_size=len(tokenizer), target_vocab_size=len(tokenizer),
    )  # fmt: skip
    generator = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for parameter in model.parameters():  # drawn here: nothing is left of how layers begin
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return Translator(model, tokenizer, tokenizer)


@pytest.fixture(scope="module")
def translator() -> Translator:
    return tiny()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "in.txt"
    path.write_text("".join(f"{line}\n" for line in LINES))
    return path


def show(number: int, translation: Translation) -> str:
    return f"{number}\t{translation.text}\t{translation.candidates[0].score:.9f}"


class Killed(BaseException):
    """A stand-in for kill -9: nothing catches it, and it has the files as they were at that moment."""

    def __init__(self, target: Path) -> None:
        super().__init__()
        self.files = {path: path.read_bytes() for path in target.parent.glob(f"{target.name}.*")}


def run(
    translator: Translator,
    source: Path,
    target: Path,
    *,
    stop_after: int | None = None,
    bad_lines: Any = "stop",
    skipped: Notes | None = None,
    settings: dict[str, Any] = SETTINGS,
    **how: Any,
) -> None:
    lines = Lines(source)
    windows = answered(translator, lines, TranslationOptions(beam=Beam(2)), parse=whole_line, window_lines=WINDOW)
    with opened(target, settings, **{"resume": False, "overwrite": False} | how) as unfinished:
        if unfinished is None:
            return

        unfinished.pass_over(lines)
        for count in BulkTranslation(lines, windows, show, bad_lines, skipped or Notes()).written(unfinished):
            if stop_after is not None and count >= stop_after:
                raise Killed(target)


@pytest.fixture
def whole(translator: Translator, source: Path, tmp_path: Path) -> bytes:
    target = tmp_path / "undisturbed.txt"
    run(translator, source, target)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "undisturbed.txt"]
    content = target.read_bytes()
    numbers, texts, _ = zip(*(line.split("\t") for line in content.decode().splitlines()), strict=True)
    assert numbers == tuple(str(n + 1) for n in range(len(LINES)))
    assert all(texts)  # else these weights show little of what is lost or out of order
    assert len(set(texts)) > 3
    return content


@pytest.mark.parametrize("stop_after", [5, 15, 23])
@pytest.mark.parametrize("torn", [b"", b"half of a li", b"whole lines\nthat no record knows of\n"])
def test_what_was_interrupted_ends_as_if_it_had_not_been(
    translator: Translator, source: Path, whole: bytes, tmp_path: Path, stop_after: int, torn: bytes
) -> None:
    target = tmp_path / "out.txt"
    with pytest.raises(Killed) as killed:
        run(translator, source, target, stop_after=stop_after)
    assert not target.exists()
    for path in tmp_path.glob("out.txt.*"):
        path.unlink()
    for path, content in killed.value.files.items():  # nothing that ends a block has run
        path.write_bytes(content)
    partial_file = tmp_path / "out.txt.partial"
    with partial_file.open("ab") as file:
        file.write(torn)  # the process died after these were written and before they were recorded
    (tmp_path / ".out.txt.partial.json.4711.tmp").write_text("{")  # or while it recorded
    run(translator, source, target, resume=True)
    assert target.read_bytes() == whole
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.txt", "undisturbed.txt"]


def test_resume_from_nothing_and_after_the_end(
    translator: Translator, source: Path, whole: bytes, tmp_path: Path
) -> None:
    target = tmp_path / "out.txt"
    run(translator, source, target, resume=True)
    assert target.read_bytes() == whole
    with pytest.raises(ArgumentError, match=r"out\.txt is there already, and nothing of it is unfinished"):
        run(translator, source, target, resume=True)
    # Killed between the last two steps: the file has its name, and the record is still there.
    with pytest.raises(Killed):
        run(translator, source, tmp_path / "other.txt", stop_after=23)
    (tmp_path / "other.txt.partial").rename(tmp_path / "other.txt")
    run(translator, source, tmp_path / "other.txt", resume=True)
    assert (tmp_path / "other.txt").read_bytes() == whole
    assert not (tmp_path / "other.txt.partial.json").exists()


def test_what_does_not_belong_together_is_refused(
    translator: Translator, source: Path, whole: bytes, tmp_path: Path
) -> None:
    target, record, partial_file = (tmp_path / f"out.txt{end}" for end in ("", ".partial.json", ".partial"))
    with pytest.raises(Killed):
        run(translator, source, target, stop_after=10)
    before = partial_file.read_bytes()

    def refused(message: str, error: type[Exception] = ArgumentError, **how: Any) -> None:
        with pytest.raises(error, match=message):
            run(translator, how.pop("source", source), target, **{"resume": True} | how)
        assert not target.exists()

    refused("was begun with beam 1, not 2: go on with the same", settings={**SETTINGS, "beam": 2})
    refused("was begun with model abc, not xyz", settings={**SETTINGS, "model": "xyz"})
    refused("was begun with prefix None, not x", settings={**SETTINGS, "prefix": "x"})  # the record does not know it
    refused("was begun with beam 1, not None", settings={"model": "abc"})
    refused("is an unfinished translation: go on with it", resume=False)
    other = tmp_path / "other.txt"
    other.write_text("".join(f"{line}\n" for line in ["x", *LINES[1:]]))
    refused("answers 10 lines, and the input does not begin with them", source=other)
    other.write_text("".join(f"{line}\n" for line in LINES[:7]))
    refused("answers 10 lines, and the input does not begin with them", source=other)
    assert partial_file.read_bytes() == before
    content = record.read_text()
    for damaged in (content[:-9], "[]", '{"format": 1}', content.replace('"format": 1', '"format": 2')):
        record.write_text(damaged)
        refused(r"out\.txt\.partial\.json", RunFolderError)
    record.write_text(content)
    partial_file.write_bytes(before[:-1])
    refused("has lost some of the", RunFolderError)
    partial_file.unlink()
    refused("has lost some of the", RunFolderError)
    record.unlink()
    partial_file.write_bytes(before)
    refused("is missing", RunFolderError)
    refused("is missing", RunFolderError, resume=False, overwrite=True)  # its owner is not known
    partial_file.unlink()
    run(translator, source, target, overwrite=True)
    assert target.read_bytes() == whole


def test_nothing_is_replaced_unasked(translator: Translator, source: Path, whole: bytes, tmp_path: Path) -> None:
    target = tmp_path / "out.txt"
    target.write_text("mine")
    with pytest.raises(ArgumentError, match=r"out\.txt is there already: replace it \(--overwrite\)"):
        run(translator, source, target)
    with pytest.raises(Killed):
        run(translator, source, target, overwrite=True, stop_after=10)
    assert target.read_text() == "mine"  # until the new one is whole
    run(translator, source, target, resume=True)
    assert target.read_bytes() == whole
    with pytest.raises(ArgumentError, match="is not a file"):
        run(translator, source, tmp_path, overwrite=True)


def test_a_full_disk_keeps_what_was_answered(
    translator: Translator, source: Path, whole: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, writes, sync = tmp_path / "out.txt", 0, os.fsync

    def full(number: int) -> None:
        nonlocal writes
        writes += os.readlink(f"/proc/self/fd/{number}").endswith(".partial")
        if writes > 2:
            raise OSError(28, "No space left on device")
        sync(number)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match=r"No space left on device: '.*out\.txt\.partial'"):
        run(translator, source, target)
    monkeypatch.undo()
    assert json.loads((tmp_path / "out.txt.partial.json").read_text())["lines"] == 2 * WINDOW
    run(translator, source, target, resume=True)
    assert target.read_bytes() == whole


def test_two_at_a_time_are_one_too_many(translator: Translator, source: Path, tmp_path: Path) -> None:
    with (
        opened(tmp_path / "out.txt", SETTINGS, resume=False, overwrite=False),
        pytest.raises(RunFolderError, match="another process is writing"),
    ):
        run(translator, source, tmp_path / "out.txt", resume=True)


def test_bad_lines_stop_or_stay_empty(translator: Translator, source: Path, tmp_path: Path) -> None:
    content = source.read_bytes().splitlines(keepends=True)
    content[7], content[11] = b"\xff\xfe\n", b"0123456789\n"
    source.write_bytes(b"".join(content))
    target = tmp_path / "out.txt"
    with pytest.raises(DataError, match=r"in\.txt:8: expected UTF-8"):
        run(translator, source, target)
    assert json.loads((tmp_path / "out.txt.partial.json").read_text())["lines"] == WINDOW  # its window is not
    skipped = Notes()
    run(translator, source, target, resume=True, bad_lines="skip", skipped=skipped)
    rows = [line.split("\t") for line in target.read_text().splitlines()]
    assert len(rows) == len(LINES)
    assert [number for number, (_, text, _) in enumerate(rows, 1) if not text] == [8, 12]
    assert skipped.lines == 2
    assert skipped.first is not None
    assert "in.txt:8: expected UTF-8" in skipped.first
    content[7] = b"7\n"
    source.write_bytes(b"".join(content))
    with pytest.raises(DataError, match=r"in\.txt:12: 11 tokens, and the model takes 7 at most"):
        run(translator, source, tmp_path / "other.txt")


def test_a_column_of_prefixes(translator: Translator) -> None:
    lines = [Line("x:1", b"12\tab"), Line("x:2", b"12"), Line("x:3", b"1\t2\t3"), Line("x:4", b"12\tc")]
    (window,) = answered(translator, lines, TranslationOptions(beam=Beam(1)), parse=sentence_and_prefix, window_lines=9)
    texts = [one.translation.text for one in window]
    assert texts[0].startswith("ab")
    assert texts[3].startswith("c")
    assert (
        window[2].translation.problem == "x:3: expected a sentence and a prefix with a tab between them, got 3 columns"
    )


def test_no_more_than_a_window_is_read_ahead(translator: Translator) -> None:
    read = 0

    def endless() -> Iterator[Line]:
        nonlocal read
        for line in repeat(Line("x", b"12")):
            read += 1
            yield line

    windows = answered(
        translator, endless(), TranslationOptions(beam=Beam(1)), parse=partial(whole_line), window_lines=WINDOW
    )
    for number in range(1, 4):
        assert len(next(windows)) == WINDOW
        assert read == number * WINDOW


MEMORY = """
import resource, sys
from tests.tasks.test_unfinished import *
translator = tiny()
def done(count):
    path = Path({out!r}, f"{{count}}.in")
    path.write_text("12\\n" * count)
    lines = Lines(path)
    windows = answered(translator, lines, TranslationOptions(beam=Beam(1)), parse=whole_line, window_lines=100)
    with opened(path.with_suffix(".out"), SETTINGS, resume=False, overwrite=False) as unfinished:
        list(BulkTranslation(lines, windows, show, "stop").written(unfinished))
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
small = done(2_000)
print(done(20_000) - small)
"""


@pytest.mark.slow
def test_memory_does_not_grow_with_the_lines(tmp_path: Path) -> None:
    """Ten times as many lines: a KiB a line more would be 18 MiB."""
    code = MEMORY.format(out=str(tmp_path))
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, env=environment, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 4_096  # KiB
