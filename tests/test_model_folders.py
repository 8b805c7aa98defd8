"""Every command says of a folder that it does not read what the folder is; of a cache, it reads the snapshot."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from regard.cli.main import run_command
from regard.cli.progress import LARGE
from regard.errors import RunFolderError
from regard.files.model_folder import is_huggingface, snapshot_of
from tests import each_once

CONFIG = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "vocab_size": 40}
ADAPTER = {"peft_type": "LORA", "base_model_name_or_path": "org/base"}
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 5\n"


def make(folder: Path, **files: object) -> Path:
    """A folder of files; `__` stands for a dot, and a mapping is written as JSON."""
    folder.mkdir(parents=True)
    for name, content in files.items():
        raw = content if isinstance(content, bytes) else json.dumps(content).encode()
        (folder / name.replace("__", ".")).write_bytes(raw)
    return folder


def adapter(folder: Path) -> Path:
    return make(folder, adapter_config__json=ADAPTER, adapter_model__safetensors=b"")


def adapter_with_config(folder: Path) -> Path:
    return make(folder, config__json=CONFIG, adapter_config__json=ADAPTER, adapter_model__safetensors=b"")


def gguf(folder: Path) -> Path:
    return make(folder, config__json=CONFIG, model__gguf=b"GGUF")


def onnx(folder: Path) -> Path:
    return make(folder, config__json=CONFIG, model__onnx=b"\x08")


def ctranslate2(folder: Path) -> Path:
    return make(folder, config__json={"bos_token": "<s>"}, model__bin=b"", engine__json={})


def pipeline(folder: Path) -> Path:
    return make(folder, model_index__json={})


def tensorflow(folder: Path) -> Path:
    return make(folder, config__json=CONFIG, tf_model__h5=b"")


def caches(folder: Path) -> Path:
    make(folder / "models--org--name" / "snapshots" / "abc", config__json=CONFIG)
    return folder


def statistics(folder: Path) -> Path:
    make(folder / "totals").joinpath("0.parquet").write_bytes(b"")
    return folder


def runs(folder: Path) -> Path:
    make(folder / "mine", config__json={}, train__log=b"")
    return folder


def no_type(folder: Path) -> Path:
    return make(folder, config__json={"vocab_size": 40}, model__safetensors=b"")


def pointer(folder: Path) -> Path:
    return make(folder, config__json=CONFIG, model__safetensors=POINTER)


KINDS: dict[Callable[[Path], Path], str] = {
    adapter: r"an adapter \(peft_type 'LORA'\) of 'org/base', not a whole model",
    adapter_with_config: r"an adapter \(peft_type 'LORA'\)",
    gguf: r"holds GGUF \(model\.gguf\)",
    onnx: r"holds ONNX \(model\.onnx\) and no model\.safetensors",
    ctranslate2: "a model for CTranslate2",
    pipeline: "a pipeline of diffusers",
    tensorflow: r"weights of TensorFlow \(tf_model\.h5\)",
    caches: "Hugging Face's cache of several models",
    statistics: "statistics that `regard measure` made",
    runs: "is no run: give one of those in it, such as .*mine",
    pointer: r"model\.safetensors is a pointer of Git LFS",
    no_type: "neither the model_type of a Hugging Face model nor the task of a run",
}
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
    for kind, says in KINDS.items():
        folder = kind(Path(kind.__name__))
        with pytest.raises(RunFolderError, match=says):
            is_huggingface(folder)
        assert run_command([folder.name if word == "FOLDER" else word for word in DOORS[door]]) == 2
        said = capsys.readouterr().err
        with pytest.raises(RunFolderError, match=says):
            raise RunFolderError(said)
        assert said.count("\n") == 1
    assert {path.name for path in Path().iterdir()} == {kind.__name__ for kind in KINDS} | {"lines.txt"}


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
    folder = make(Path("folder"), config__json={**CONFIG, "model_type": family}, generation_config__json={})
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
    first = make(cache / "snapshots" / "abc", config__json={**CONFIG, "model_type": "next9"}, model__safetensors=b"")
    assert snapshot_of(cache) == first
    assert snapshot_of(first) == first
    assert run_command(["generate", str(cache), "a"]) == 2
    assert f"{first} has no tokenizer that regard reads" in capsys.readouterr().err
    second = make(cache / "snapshots" / "def")
    with pytest.raises(RunFolderError, match=r"give one of its snapshots \(abc, def\)"):
        snapshot_of(cache)
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("def\n")
    assert snapshot_of(cache) == second
