"""Folders of models that somebody damaged: every command ends well or with one line, and loses no file of anyone."""

import contextlib
import io
import os
import random
import shutil
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

from regard.cli import main as program
from regard.models.config import DecoderOnlyConfig, RNNConfig, TransformerConfig
from regard.tasks.language_modelling.config import LanguageModelConfig
from regard.tasks.language_modelling.train import train_language_model
from regard.tasks.training.fit_config import FitConfig
from regard.tasks.translation.config import TranslationConfig
from regard.tasks.translation.train import train_translation
from tests.fuzz.mutations import mutated_bytes, mutated_file

PAIRS = "".join(f"{n} times {m}\t{m} mal {n}\n" for n in range(8) for m in range(8))
FIT = FitConfig(steps=2, validate_every=1, save_every=1, log_every=1, keep=2)
USUAL: dict[str, Any] = {"fit": FIT, "batch_tokens": 128, "warmup_steps": 1, "pictures": 0, "device": "cpu"}
STRANGER = b"nobody may touch this"


class Ended(NamedTuple):
    """How a command ended."""

    status: int
    output: str
    errors: str


def make_folders(folder: Path) -> dict[str, Path]:
    """A tiny run of each task and model, and one that was exported; each has files of somebody else in it."""
    (data := folder / "pairs.tsv").write_text(PAIRS)
    (text := folder / "text.txt").write_text(PAIRS.replace("\t", " "))
    sizes: dict[str, Any] = {"dim": 8, "num_heads": 2, "feed_forward_dim": 8}
    transformer = TransformerConfig(**sizes, encoder_layers=1, decoder_layers=1, norm_position="post")
    rnn = RNNConfig(embedding_dim=4, hidden_dim=8, attention_dim=4)
    one = {**USUAL, "data": (data,), "tokenizer": "characters"}
    train_translation(TranslationConfig(**one, out=folder / "translator", transformer=transformer))
    train_translation(TranslationConfig(**one, out=folder / "rnn", model="rnn", rnn=rnn))
    many = {**USUAL, "data": (text,), "block_length": 16, "vocab_size": 280}
    train_language_model(
        LanguageModelConfig(**many, out=folder / "writer", model=DecoderOnlyConfig(**sizes, num_layers=1))
    )
    ended = command("export", str(folder / "translator"), "--to", "huggingface", "--out", str(folder / "exported"))
    assert ended.status == 0, ended.errors
    made = {name: folder / name for name in ("translator", "rnn", "writer", "exported")}
    for run in made.values():
        for name in ("notes.txt", "last/model.safetensors", "data/mine.tokens", "kept/step-x/a.txt"):
            if (path := run / name).parent.is_dir() or name == "notes.txt":
                path.write_bytes(STRANGER)
    return made


def commands(name: str, run: Path, out: Path) -> list[Sequence[str]]:
    """What somebody may do with a folder."""
    device = ("--device", "cpu")
    going_on = ("train", "--out", str(run), "--resume", "--steps", "3")
    view = ("view", str(run), "3 times 4", "--out", str(out), *device)
    match name:
        case "exported":
            return [("translate", str(run), "3 times 4", *device), view]
        case "writer":
            write = ("generate", str(run), "3 times", "--max-tokens", "3", *device)
            return [write, ("evaluate", str(run), str(run.parent / "text.txt"), *device), view, going_on]
    chosen = ("choose", str(run), *device)
    return [("translate", str(run), "3 times 4", *device), view, chosen, going_on]


def command(*arguments: str) -> Ended:
    """Run a command in this process. Anything that is no error of ours comes through."""
    output, errors = io.StringIO(), io.StringIO()
    output.reconfigure = errors.reconfigure = lambda **_: None  # type: ignore[attr-defined]
    status = 0
    with (
        patch.object(sys, "argv", ["regard", *arguments]),
        patch.object(program, "_keep_freed_memory", lambda: None),
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        try:
            program.main()
        except SystemExit as leaving:
            status = int(leaving.code or 0)
    return Ended(status, output.getvalue(), errors.getvalue())


def files_in(folder: Path) -> dict[str, bytes]:
    """The files of a folder, and where its links lead."""
    paths = [path for path in folder.rglob("*") if path.is_symlink() or path.is_file()]
    return {
        str(path.relative_to(folder)): os.readlink(path).encode() if path.is_symlink() else path.read_bytes()
        for path in paths
    }


def damage(run: Path, elsewhere: Path, generator: random.Random) -> str:
    """Do harm to one file of a folder, or to the folder; say what was done."""
    names = sorted(name for name, content in files_in(run).items() if content != STRANGER and "tfevents" not in name)
    # Small files of settings say more than numbers do.
    weights = [3 if name.endswith(".json") else 1 for name in names]
    name = generator.choices(names, weights)[0]
    path = run / name
    match generator.choice(["content"] * 16 + ["gone", "link", "folder", "swap", "unsealed", "unsealed", "unsealed"]):
        case "gone":
            path.unlink()
            return f"{name} gone"
        case "link":
            top = run / name.split("/")[0] if generator.random() < 0.7 else path
            target = elsewhere / top.name
            top.rename(target)
            top.symlink_to(target)
            return f"{top.name} is a link"
        case "folder":
            path.unlink()
            path.mkdir()
            (path / "mine").write_bytes(STRANGER)
            return f"{name} is a folder"
        case "swap":
            other = run / generator.choice(names)
            content = path.read_bytes()
            path.write_bytes(other.read_bytes())
            other.write_bytes(content)
            return f"{name} and {other.name} swapped"
        case "unsealed":
            name = generator.choice(
                [name for name in names if name.endswith(("config.json", "prepared.json", "nt.json"))]
            )
            return f"{name} unsealed and {_unsealed(run / name, generator)}"
    content = mutated_file(name, path.read_bytes(), generator)
    path.write_bytes(content)
    return f"{name} mutated"


def _unsealed(path: Path, generator: random.Random) -> str:
    """Take the checksum away, so that what else the file says is believed."""
    import json

    try:
        record = json.loads(path.read_bytes())
        record.pop("crc32", None)
        path.write_text(json.dumps(record, indent=1))
    except (ValueError, AttributeError):
        path.write_bytes(mutated_bytes(path.read_bytes(), generator))
        return "bytes mutated"
    path.write_bytes(mutated_file(path.name, path.read_bytes(), generator))
    return "mutated"


def check(name: str, run: Path, work: Path, seed: int) -> tuple[str, list[Ended]]:
    """Damage a copy of a folder, and use it: what was done, and how each command ended.

    Raises:
        AssertionError: a command ended otherwise than with status 0 or a line, or a file of somebody else is another.
    """
    generator = random.Random(seed)
    shutil.rmtree(work, ignore_errors=True)
    copy, elsewhere = Path(shutil.copytree(run, work / run.name)), work / "elsewhere"
    elsewhere.mkdir()
    for part in ("pairs.tsv", "text.txt"):
        shutil.copy(run.parent / part, work / part)
    (elsewhere / "weights.safetensors").write_bytes(STRANGER)
    done = damage(copy, elsewhere, generator)
    strangers = _strangers(work)
    ended = []
    for arguments in commands(name, copy, work / "pictures"):
        ended.append(command(*arguments))
        status, _, errors = ended[-1]
        told = [line for line in errors.splitlines() if line.startswith("regard: ")]
        assert status in (0, 2), (seed, done, arguments, status, errors[-500:])
        assert len(told) == (status == 2), (seed, done, arguments, errors[-500:])
        assert all(len(line) <= 1_010 for line in told), (seed, done, arguments)
        after = _strangers(work)
        assert strangers == after, (seed, done, arguments, strangers.keys() ^ after.keys())
    return done, ended


def _strangers(work: Path) -> Mapping[str, bytes]:
    """What no command may touch: all that is outside the run, and in it what regard did not write."""
    found = files_in(work)
    return {name: content for name, content in found.items() if content == STRANGER or name.startswith("elsewhere/")}
