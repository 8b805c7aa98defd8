"""All that decides the bits of statistics: the model's files, the settings, the versions, the processor."""

import hashlib
import inspect
import platform
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from regard.corpus.documents import CheckedCorpus
from regard.corpus.reading import own_function
from regard.corpus.settings import MeasureSettings
from regard.files.model_folder import is_huggingface
from regard.tasks.runs.run_folder import versions_of
from regard.tasks.training.distributed.devices import find_device

FORMAT = 1
"""The version of the files of a folder of statistics."""
PACKAGES = ("regard", "torch", "transformers", "tokenizers", "numpy", "numba", "pyarrow")
WEIGHTS = (".safetensors", ".bin", ".pt")


def identity(measure: MeasureSettings, corpus: CheckedCorpus, *, shard_documents: int, examples: int) -> dict[str, Any]:
    """The settings of a folder of statistics, for run.toml; without `files` they are in each Parquet file too."""
    device, settings = find_device(measure.device), {name: getattr(measure, name) for name in SETTINGS}
    capability = torch.backends.cpu.get_cpu_capability() if device.type == "cpu" else torch.cuda.get_device_name(device)
    return {
        "format": FORMAT,
        **{name: list(value) if isinstance(value, tuple) else value for name, value in settings.items()},
        "max_tokens": measure.max_tokens or 0,
        "shard_documents": shard_documents,
        "examples": examples,
        "dtype": "float32",
        "device": device.type,
        "processor": f"{platform.machine()} {capability}",
        "model": hashes_of(Path(measure.model)),
        "functions": {
            name: _digest([Path(inspect.getfile(own_function(name)))]) for name in measure.statistics if ":" in name
        },
        "versions": {name: found or "none" for name, found in versions_of(PACKAGES).items()},
        "files": corpus.files,
    }


SETTINGS = ("statistics", "text", "id", "layers", "heads", "keys", "threads")


def hashes_of(folder: Path) -> dict[str, str]:
    if is_huggingface(folder):
        files = [path for path in sorted(folder.iterdir()) if path.is_file() and not path.name.startswith(".")]
    else:
        files = [*sorted(folder.glob("*tokenizer.json")), folder / "config.json", folder / "best.safetensors"]
    weights = [path for path in files if path.suffix in WEIGHTS]
    settings = [path for path in files if path.name == "config.json"]
    return {
        "weights": _digest(weights),
        "tokenizer": _digest(
            path for path in files if path not in weights and path not in settings and _is_of_text(path)
        ),
        "configuration": _digest(settings),
    }


def _is_of_text(path: Path) -> bool:
    """Whether a file may be the tokenizer's: its names are many, so all but a few are taken."""
    return path.suffix in (".json", ".txt", ".model", ".spm") and "index" not in path.name


def _digest(files: Iterable[Path]) -> str:
    digest = hashlib.blake2b(digest_size=16)
    for path in files:
        digest.update(path.name.encode())
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "blake2b").digest())
    return digest.hexdigest()
