"""A folder written by Hugging Face's `save_pretrained`: its settings and its tensors. No code of it is run."""

import warnings
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from regard.errors import DataError, RunFolderError
from regard.files.model_folder import PICKLED, WEIGHTS, OnProgress, no_progress, refuse_other_kinds, snapshot_of
from regard.files.untrusted import open_tensors, parse_json, read_torch_tensors


class Settings(NamedTuple):
    values: dict[str, Any]
    source: Path


def read_settings(folder: Path) -> Settings:
    """The configuration of the model in a folder, which is its `source.parent`: of a cache, the snapshot.

    Raises:
        RunFolderError: there is no complete configuration.
    """
    folder = snapshot_of(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; expected one with a config.json and a {WEIGHTS}")
    if not (folder / "config.json").is_file():
        refuse_other_kinds(folder)
        raise RunFolderError(f"{folder} is not a Hugging Face folder: it has no config.json")
    return Settings(read_object(folder / "config.json"), folder / "config.json")


def read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object.

    Raises:
        RunFolderError: the file cannot be read, or holds something else.
    """
    try:
        value = parse_json(path.read_bytes())
    except (OSError, ValueError) as error:
        raise RunFolderError(f"{path} is not whole JSON ({error}): copy it again") from None
    if not isinstance(value, dict):
        raise RunFolderError(f"{path} holds a JSON {type(value).__name__}, expected an object")
    return value


def read_tensors(folder: Path, tell: OnProgress = no_progress) -> dict[str, Tensor]:
    """All tensors of model.safetensors or pytorch_model.bin, or of the shards in the index of one of them.

    A warning says so where they come from a pickle, which `torch.load(weights_only=True)` reads without running code.

    Raises:
        RunFolderError: a file is absent, truncated or foreign, or a pickle names code.
        MissingExtraError: safetensors is not installed.
    """
    names: list[str] = []
    for name in (WEIGHTS, PICKLED):
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            shards = [folder / name]
        elif index.is_file():
            shards, names = _shards(index)
        else:
            continue
        if name == PICKLED:
            warnings.warn(
                f"{folder} has its weights in {name}, a pickle: torch.load(weights_only=True) reads it and runs no "
                "code of it",
                stacklevel=2,
            )
        tensors = _read(shards, tell)
        absent = next((one for one in names if one not in tensors), None)
        if absent is not None:
            raise RunFolderError(f"{index} names the tensor {absent!r:.80}, which is in none of its files")
        return tensors
    refuse_other_kinds(folder)
    raise RunFolderError(
        f"{folder} has no {WEIGHTS}, no {PICKLED} and no index of one: it holds no weights that regard reads"
    )


def _shards(index: Path) -> tuple[list[Path], list[str]]:
    names = read_object(index).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise RunFolderError(f"{index} has no weight_map: it does not say where the tensors are")
    # The base name only: an index is untrusted.
    return [index.parent / name for name in sorted({Path(str(name)).name for name in names.values()})], list(names)


def _read(shards: list[Path], tell: OnProgress) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    done, total = 0, sum(path.stat().st_size for path in shards if path.is_file())
    for path in shards:
        try:
            if path.suffix == ".bin":
                tensors |= _pickled(path)
            else:
                with open_tensors(path) as file:
                    for name in file.keys():  # noqa: SIM118  (it is no dictionary)
                        tensors[name] = file.get_tensor(name)
                        done += _bytes(tensors[name])
                        tell("bytes of weights read", done, total)
        except (DataError, OSError) as error:
            raise RunFolderError(f"{path} cannot be read ({error}): absent, cut short or another format") from None
        done = sum(map(_bytes, tensors.values()))
        tell("bytes of weights read", done, total)
    return tensors


def _pickled(path: Path) -> dict[str, Tensor]:
    try:
        return read_torch_tensors(path)
    except DataError as error:
        raise RunFolderError(str(error)) from None


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
