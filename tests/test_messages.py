"""The tables of docs/design/messages.md: each command is typed, its line compared, and the folder looked at."""

import json
import os
import re
import shlex
import subprocess
import sys
import threading
from pathlib import Path
from typing import NamedTuple

import pytest

from regard.cli import main as program
from regard.cli.commands import COMMANDS
from regard.cli.train import TRAINERS
from regard.models.config import DecoderOnlyConfig, TransformerConfig
from regard.tasks import FitConfig, LanguageModelConfig, TranslationConfig, train_language_model, train_translation
from tests.test_first_run import typed

PAGE = Path(__file__).parents[1] / "docs" / "design" / "messages.md"


class Case(NamedTuple):
    typed: str
    said: str


CASES = [Case(*row) for row in re.findall(r"^\| `regard (.+?)` \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.M)]


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("messages")
    pairs = [f"{n} times {m}\t{m} mal {n}\n" for n in range(10) for m in range(10)]
    (folder / "pairs.tsv").write_text("".join(pairs))
    (folder / "one.tsv").write_text(pairs[0])
    (folder / "one.txt").write_text("one line\n")
    (folder / "book.txt").write_text("a line of a book\n" * 200)
    (folder / "file").write_text("a file\n")
    (folder / "empty.tsv").write_text("")
    (folder / "broken.toml").write_text("steps =\n")
    for name, task in (("poetry", "poetry"), ("book", "language-model")):
        (folder / f"{name}.toml").write_text(f'task = "{task}"\n')
    (folder / "rows.jsonl").write_text('{"id": "a", "text": "one"}\n{"id": "a", "text": "two"}\n')
    (folder / "cut.parquet").write_bytes(b"PAR1 and no more")
    (folder / "bert").mkdir()
    (folder / "bert" / "config.json").write_text(json.dumps({"model_type": "bert"}))
    soon = FitConfig(steps=1)
    translator = TransformerConfig(dim=8, num_heads=2, encoder_layers=1, decoder_layers=1, feed_forward_dim=8)
    train_translation(
        TranslationConfig(
            data=(folder / "pairs.tsv",), out=folder / "runs" / "mine", transformer=translator, fit=soon, device="cpu",
            vocab_size=300, pictures=0,
        )
    )  # fmt: skip
    decoder = DecoderOnlyConfig(dim=8, num_heads=2, num_layers=1, feed_forward_dim=8)
    train_language_model(
        LanguageModelConfig(
            data=(folder / "book.txt",), out=folder / "runs" / "book", model=decoder, fit=soon, device="cpu",
            tokenizer="characters", block_length=16, pictures=0,
        )
    )  # fmt: skip
    return folder


def inventory(folder: Path) -> dict[str, tuple[int, int]]:
    found = {}
    for path in sorted(folder.rglob("*")):
        about = path.stat()
        found[str(path.relative_to(folder))] = (0, 0) if path.is_dir() else (about.st_size, about.st_mtime_ns)
    return found


@pytest.mark.parametrize("case", CASES, ids=[case.typed for case in CASES])
def test_a_command_is_refused_in_one_line_and_leaves_nothing(
    case: Case, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place)
    monkeypatch.setattr(program, "_keep_freed_memory", lambda: None)
    before = inventory(place)
    status, out, err = typed(*shlex.split(case.typed))
    # Before the error of data that were read, a line may say what was read.
    *earlier, last = err.splitlines()
    assert (status, out, last) == (2, "", f"regard: {case.said}")
    read = r"(train|valid|source|target)\b.*: [\d,]+ |(vocabulary|vocabularies) of |[\d,]+ |the learning rate rises"
    assert not [line for line in earlier if not re.match(read, line)]
    assert inventory(place) == before
    # TensorBoard's thread would still write into a folder that is gone, and say so.
    assert not [thread for thread in threading.enumerate() if type(thread).__name__ == "_AsyncWriterThread"]


def test_the_table_has_what_it_should() -> None:
    assert len(CASES) > 45
    assert len({case.typed for case in CASES}) == len(CASES)


def test_no_message_has_the_name_of_a_setting_in_python() -> None:
    assert not [case.said for case in CASES if re.search(r"\b[a-z]+_[a-z]+\b", case.said)]


COUNT = """
import io, json, sys
from contextlib import redirect_stderr, redirect_stdout
from regard.cli.main import run_command
found = {}
for line in json.load(sys.stdin):
    said = io.TextIOWrapper(io.BytesIO())
    with redirect_stdout(said), redirect_stderr(said):
        status = run_command(line)
    found[" ".join(line)] = (status, len(sys.modules), "torch" in sys.modules)
json.dump(found, sys.stdout)
"""


def test_help_and_the_first_table_need_no_torch(place: Path) -> None:
    """Counted in modules, which do not depend on the machine; `python -m benchmarks start` has the seconds."""
    text = PAGE.read_text(encoding="utf-8").split("## After it")[0]
    early = [shlex.split(typed) for typed, _ in re.findall(r"^\| `regard (.+?)` \| (.+) \|$", text, re.M)]
    tasks = [["train", task, "--help"] for task in TRAINERS]
    help_ = [["--version"], ["--help"], *tasks, *([name, "--help"] for name in COMMANDS)]
    done = subprocess.run(
        [sys.executable, "-c", COUNT], input=json.dumps([*help_, *early]), cwd=place,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}, capture_output=True, text=True,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    statuses = [*((" ".join(line), 0) for line in help_), *((" ".join(line), 2) for line in early)]
    assert {line: status for line, (status, _, _) in found.items()} == dict(statuses)
    assert [line for line, (_, _, is_loaded) in found.items() if is_loaded] == []
    assert found["--version"][1] < 130, "json and io of this test among them"
    assert max(found[" ".join(line)][1] for line in help_) < 450
