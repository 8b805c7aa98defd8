"""Every command says of a folder that it does not read what the folder is; of a cache, it reads the snapshot."""

import json
from pathlib import Path

import pytest

from regard.cli.main import run_command
from regard.cli.progress import LARGE
from regard.errors import RunFolderError
from regard.files.model_folder import is_huggingface, snapshot_of
from tests import each_once

CONFIG: dict[str, object] = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40}
ADAPTER: dict[str, object] = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


Files = dict[str, bytes | dict[str, object]]
"""The content of each file, by its path in a folder; a mapping is written as JSON."""


def make(folder: Path, files: Files) -> Path:
    folder.mkdir(parents=True)
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    return folder


OF_ADAPTER: Files = {"adapter_config.json": ADAPTER, "adapter_model.safetensors": b""}
KINDS: dict[str, tuple[Files, str]] = {
    "adapter": (OF_ADAPTER, r"an adapter \(peft_type 'LORA'\) of 'org/base', not a whole model"),
    "adapter_with_config": ({"config.json": CONFIG, **OF_ADAPTER}, r"an adapter \(peft_type 'LORA'\)"),
    "gguf": ({"config.json": CONFIG, "model.gguf": b"GGUF"}, r"holds GGUF \(model\.gguf\)"),
    "onnx": ({"config.json": CONFIG, "model.onnx": b"\x08"}, r"holds ONNX \(model\.onnx\) and no model\.safetensors"),
    "ctranslate2": (
        {"config.json": {"bos_token": "<s>"}, "model.bin": b"", "engine.json": {}}, "a model for CTranslate2"
    ),
    "pipeline": ({"model_index.json": {}}, "a pipeline of diffusers"),
    "tensorflow": ({"config.json": CONFIG, "tf_model.h5": b""}, r"weights of TensorFlow \(tf_model\.h5\)"),
    "caches": (
        {"models--org--name/snapshots/abc/config.json": CONFIG}, "Hugging Face's cache of several models"
    ),
    "statistics": ({"totals/0.parquet": b""}, "statistics that `regard measure` made"),
    "runs": ({"mine/config.json": {}, "mine/train.log": b""}, "is no run: give one of those in it, such as .*mine"),
    "pointer": (
        {"config.json": CONFIG, "model.safetensors": POINTER}, r"model\.safetensors is a pointer of Git LFS"
    ),
    "no_type": (
        {"config.json": {"vocab_size": 40}, "model.safetensors": b""},
        "neither the model_type of a Hugging Face model nor the task of a run",
    ),
}  # fmt: skip
DOORS = {
    "view": ["view", "FOLDER", "--tokens", "2", "3", "--out", "pictures"],
    "check": ["check", "FOLDER"],
    "measure": ["measure", "FOLDER", "--data", "lines.txt", "--out", "stats"],
    "generate": ["generate", "FOLDER", "a b"],
    "translate": ["translate", "FOLDER", "a b"],
    "evaluate": ["evaluate", "FOLDER", "--data", "lines.txt"],
    "serve": ["serve", "FOLDER", "--port", "0"],
    "export": ["export", "FOLDER", "--to", "huggingface", "--out", "exported"],
}


@pytest.mark.parametrize("door", DOORS)
def test_every_door_says_the_kind_of_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], door: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("a b\n")
    for kind, (files, says) in KINDS.items():
        folder = make(Path(kind), files)
        with pytest.raises(RunFolderError, match=says):
            is_huggingface(folder)
        assert run_command([folder.name if word == "FOLDER" else word for word in DOORS[door]]) == 2
        said = capsys.readouterr().err
        with pytest.raises(RunFolderError, match=says):
            raise RunFolderError(said)
        assert said.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {*KINDS, "lines.txt"}


@pytest.mark.parametrize(
    ("door", "family"),
    each_once(["view", "measure", "generate", "translate", "evaluate", "serve"], ["gpt2", "marian"]),
)
def test_an_absent_tokenizer_is_said_before_the_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], door: str, family: str
) -> None:
    """They are larger than those whose reading is announced, and no weights at all."""
    monkeypatch.chdir(tmp_path)
    Path("lines.txt").write_text("a b\n")
    folder = make(
        Path("folder"), {"config.json": {**CONFIG, "model_type": family}, "generation_config.json": {}}
    )  # fmt: skip
    with (folder / "model.safetensors").open("wb") as file:
        file.truncate(2 * LARGE)
    command = ["a b" if word in "23" else word for word in DOORS[door] if word != "--tokens"]
    assert run_command(["folder" if word == "FOLDER" else word for word in command]) == 2
    said = capsys.readouterr().err
    assert "folder has no tokenizer" in said
    assert said.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {"folder", "lines.txt"}
    (folder / "vocab.txt").write_text("it may be one")
    assert run_command(["measure", "folder", "--data", "lines.txt", "--out", "stats", "--workers", "1"]) == 2
    assert "not a whole safetensors file" in capsys.readouterr().err


def test_a_folder_of_a_cache_is_its_snapshot(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cache = tmp_path / "models--org--name"
    first = make(
        cache / "snapshots" / "abc", {"config.json": {**CONFIG, "model_type": "next9"}, "model.safetensors": b""}
    )
    assert snapshot_of(cache) == first
    assert snapshot_of(first) == first
    assert run_command(["generate", str(cache), "a"]) == 2
    assert f"{first} has no tokenizer that regard reads" in capsys.readouterr().err
    second = make(cache / "snapshots" / "def", {})
    with pytest.raises(RunFolderError, match=r"give one of its snapshots \(abc, def\)"):
        snapshot_of(cache)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("def\n")
    assert snapshot_of(cache) == second
