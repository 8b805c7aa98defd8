"""The kind of a folder with a model: a run of ours, one in Hugging Face's format, or another one, which is named.

Each command and each reader asks here, before torch is imported.
"""

import reprlib
from collections.abc import Callable
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from regard.errors import RunFolderError
from regard.files.atomic import read_json
from regard.files.untrusted import check_tensors

WEIGHTS, PICKLED = "model.safetensors", "pytorch_model.bin"
"""The files of weights that are read, each in one or in the shards of its index."""
OnProgress = Callable[[str, int, int | None], None]
"""Is called with the name of the work, the amount done, and the whole amount (None if it is not known)."""
POINTER, MOST_POINTER_BYTES = b"version https://git-lfs", 1024


def no_progress(what: str, done: int, total: int | None) -> None:
    """Do nothing with it."""


def is_huggingface(folder: Path) -> bool:
    """Whether a folder has a model in Hugging Face's format; False for a run, and for a path that is no folder."""
    if not folder.is_dir():
        return False
    path = folder / "config.json"
    values = read_json(path) if path.is_file() else {}
    if "task" in values or "format" in values:
        return False
    if "model_type" not in values or not _has_weights(folder):
        refuse_other_kinds(folder)
    _refuse_lfs_pointers(folder)
    if values and "model_type" not in values:
        raise RunFolderError(f"{path} has neither the model_type of a Hugging Face model nor the task of a run")
    return bool(values)


def family_of(folder: Path) -> object:
    return read_json(folder / "config.json").get("model_type")


def snapshot_of(folder: Path) -> Path:
    """Of a folder of Hugging Face's cache, `models--owner--name`, the snapshot of `refs/main`, or the only one."""
    snapshots = folder / "snapshots"
    if (folder / "config.json").exists() or not snapshots.is_dir():
        return folder
    found = {path.name: path for path in sorted(snapshots.iterdir()) if path.is_dir()}
    main = folder / "refs" / "main"
    named = main.read_text(encoding="utf-8", errors="replace").strip() if main.is_file() else ""
    if named in found:
        return found[named]
    if len(found) == 1:
        return next(iter(found.values()))
    names = ", ".join(found) or "none"
    raise RunFolderError(f"{folder} is a folder of Hugging Face's cache: give one of its snapshots ({names:.300})")


def refuse_other_kinds(folder: Path) -> None:
    for evidence, describe in KINDS.items():
        if found := sorted(folder.glob(evidence)):
            raise RunFolderError(f"{folder} {describe(found[0])}")


def _refuse_lfs_pointers(folder: Path) -> None:
    """Check that the weights were downloaded: without Git LFS, a clone has a few lines of text in their place."""
    for path in folder.glob("*model*.safetensors"):
        if path.is_file() and path.stat().st_size < MOST_POINTER_BYTES and path.read_bytes().startswith(POINTER):
            raise RunFolderError(f"{path} is a pointer of Git LFS, not the weights: git lfs pull downloads them")


def _has_weights(folder: Path) -> bool:
    return any((folder / f"{name}{index}").is_file() for name in (WEIGHTS, PICKLED) for index in ("", ".index.json"))


def _adapter(path: Path) -> str:
    values: dict[str, Any] = read_json(path)
    kind, base = (reprlib.repr(values.get(name)) for name in ("peft_type", "base_model_name_or_path"))
    return (
        f"holds an adapter (peft_type {kind}) of {base}, not a whole model: load both by peft, and save "
        "model.merge_and_unload() into a folder"
    )


KINDS: dict[str, Callable[[Path], str]] = {
    "adapter_config.json": _adapter,
    "*.gguf": lambda path: (
        f"holds GGUF ({path.name}), which regard does not read: transformers reads it (from_pretrained(folder, "
        f"gguf_file={path.name!r})), and saves it as {WEIGHTS}"
    ),
    "engine.json": lambda _: "holds a model for CTranslate2; regard reads the run that it was made from",
    "model_index.json": lambda path: (
        f"holds a pipeline of diffusers ({path.name}): load it there, and watch its models by regard.watch"
    ),
    "models--*": lambda path: f"is Hugging Face's cache of several models: give one of them, such as {path}",
    "snapshots/*": lambda path: f"is a folder of Hugging Face's cache: give one of its snapshots, such as {path}",
    "totals/*.parquet": lambda _: "holds statistics that `regard measure` made: `regard atlas` shows them",
    "*/train.log": lambda path: f"is no run: give one of those in it, such as {path.parent}",
    "*.onnx": lambda path: f"holds ONNX ({path.name}) and no {WEIGHTS}: regard reads the model that it was made from",
    "tf_model.h5": lambda path: (
        f"holds weights of TensorFlow ({path.name}) and no {WEIGHTS}: an older transformers reads them, and saves those"
    ),
    "flax_model.msgpack": lambda path: (
        f"holds weights of Flax ({path.name}) and no {WEIGHTS}: an older transformers reads them, and saves those"
    ),
}


def check_weights(folder: Path) -> None:
    for path in folder.glob("*.safetensors"):
        check_tensors(path)


NO_TOKENIZER = (
    *("config.json", "generation_config.json", "*.safetensors", "*.safetensors.index.json"),
    *("pytorch_model*.bin", "pytorch_model.bin.index.json", "training_args.bin", "*.md", ".git*", "attention.*"),
)
"""Files that belong to no tokenizer of transformers, of any class."""


def check_texts(folder: Path, otherwise: str) -> None:
    """Check that some file of a folder may be a tokenizer's; `otherwise` tells the remedy if none is."""
    names = [path.name for path in folder.iterdir() if path.is_file()]
    if all(any(fnmatch(name, known) for known in NO_TOKENIZER) for name in names):
        raise RunFolderError(f"{folder} has no tokenizer: {otherwise}")
