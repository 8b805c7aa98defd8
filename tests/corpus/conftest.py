"""A model of two layers with a tokenizer of words, and documents for it."""

import json
import random
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers

from regard.cli.main import run_command
from regard.files import atomic
from tests.families.architectures import library

WORDS = ("the", "cat", "sat", "on", "a", "mat", "and", "dog", "ran", "to", "house", "red", "blue", ".", ",")
PLACES = 48


def save_words(folder: Path) -> None:
    own = {word: number for number, word in enumerate(("<unk>", *WORDS))}
    backend = Tokenizer(models.WordLevel(own, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    library().PreTrainedTokenizerFast(tokenizer_object=backend, unk_token="<unk>").save_pretrained(folder)


def save_sharp(model: Any, folder: Path) -> None:
    with torch.no_grad():
        for name, one in model.named_parameters():
            if one.dim() == 2 and "wpe" not in name:
                one.normal_(0, 0.4)
    model.save_pretrained(folder)


@pytest.fixture(scope="session")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_small_gpt2(tmp_path_factory.mktemp("gpt2"))


def save_small_gpt2(folder: Path) -> Path:
    transformers = library()
    transformers.utils.logging.disable_progress_bar()
    save_words(folder)
    torch.manual_seed(0)
    sizes = {"vocab_size": 16, "n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": PLACES}
    marks = {"bos_token_id": 0, "eos_token_id": 0}
    save_sharp(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, **marks)), folder)
    return folder


def documents(count: int, *, seed: int = 0) -> list[dict[str, str]]:
    draw = random.Random(seed)
    return [
        {"id": f"d{number}", "text": " ".join(draw.choices(WORDS, k=draw.randint(5, 40)))} for number in range(count)
    ]


def write_jsonl(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


@pytest.fixture(scope="session")
def docs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    rows = documents(60)
    rows[7]["text"], rows[20]["text"], rows[41]["text"] = "", " ".join(["cat"] * (PLACES + 9)), "mat"
    return write_jsonl(tmp_path_factory.mktemp("docs") / "docs.jsonl", rows)


SMALL = ("--shard-documents", "7", "--examples", "3", "--device", "cpu", "--workers", "1")


def measure_into(out: Path, model: Path, docs: Path, *more: str) -> Path:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("regard.cli.main._keep_freed_memory", lambda: None)
        assert run_command(["measure", str(model), "--data", str(docs), "--out", str(out), *SMALL, *more]) == 0
    return out


@pytest.fixture(scope="session")
def stats(tmp_path_factory: pytest.TempPathFactory, gpt2: Path, docs: Path) -> Path:
    return measure_into(tmp_path_factory.mktemp("stats") / "stats", gpt2, docs)


@pytest.fixture(scope="session")
def sharper(tmp_path_factory: pytest.TempPathFactory, gpt2: Path, docs: Path) -> Path:
    folder = tmp_path_factory.mktemp("sharper")
    other = folder / "gpt2"
    shutil.copytree(gpt2, other)
    model = library().GPT2LMHeadModel.from_pretrained(other)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, 8:16] *= 1.3
    model.save_pretrained(other)
    return measure_into(folder / "stats", other, docs)


def bytes_of(folder: Path) -> dict[str, bytes]:
    files = [path for part in ("heads", "totals", "examples") for path in (folder / part).iterdir()]
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@contextmanager
def snapshots(out: Path, into: Path, *, from_rename: int) -> Iterator[list[Path]]:
    """Copies of a folder as it is before each rename of this process, from that number on: what a kill then leaves."""
    rename, left, number = atomic.rename, list[Path](), count(1)

    def watched(source: Path, target: Path) -> None:
        if next(number) >= from_rename and target.is_relative_to(out):
            left.append(into / str(len(left)))
            shutil.copytree(out, left[-1])
        rename(source, target)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(atomic, "rename", watched)
        yield left
