"""A folder written by Hugging Face's `save_pretrained`: its settings and its tensors. No code of it is run."""

import reprlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from torch import Tensor

from regard.errors import DataError, RunFolderError
from regard.files.untrusted import parse_json, safetensors_library, tensor_errors

T = TypeVar("T")
LARGEST = 2**62
WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"


class Settings:
    """The values of config.json, read by name and type.

    >>> settings = Settings({"d_model": 8}, Path("config.json"))
    >>> settings.get("d_model", int), settings.get("dropout", float, 0.1)
    (8, 0.1)
    >>> settings.get("encoder_layers", int)
    Traceback (most recent call last):
    regard.errors.RunFolderError: config.json has no encoder_layers: it is not the whole configuration of a model
    """

    def __init__(self, values: Mapping[str, Any], source: Path) -> None:
        self.values, self.source = values, source

    def get(self, name: str, kind: type[T], default: T | None = None) -> T:
        """A value; the default if it is absent or null.

        Raises:
            RunFolderError: the value is absent and has no default, or it has another type.
        """
        value = self.values.get(name)
        if value is None:
            value = default
        if value is None:
            raise RunFolderError(f"{self.source} has no {name}: it is not the whole configuration of a model")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise RunFolderError(f"{self.source}: {name} must be a {kind.__name__}, got {reprlib.repr(value)}")
        if isinstance(value, int) and abs(value) > LARGEST:
            raise RunFolderError(f"{self.source}: {name} must be at most 2^62, got {reprlib.repr(value)}")
        return value

    def optional(self, name: str, kind: type[T]) -> T | None:
        """A value; None if it is absent or null.

        Raises:
            RunFolderError: it has another type.
        """
        return None if self.values.get(name) is None else self.get(name, kind)

    def floats(self, name: str) -> tuple[float, ...]:
        """A list of floats.

        Raises:
            RunFolderError: it is absent, or of another type.
        """
        numbers: list[Any] = self.get(name, list)
        named = Settings({f"{name}[{place}]": number for place, number in enumerate(numbers)}, self.source)
        return tuple(named.get(place, float) for place in named.values)

    def part(self, name: str) -> Mapping[str, Any]:
        """An object within the object; an empty one if it is absent or null.

        Raises:
            RunFolderError: it is of another type.
        """
        found: dict[str, Any] = self.get(name, dict, {})
        return found

    def one_of(self, name: str, choices: Mapping[str, T], default: str | None = None) -> T:
        """The entry of `choices` for a value.

        Raises:
            RunFolderError: the value is none of the choices.
        """
        value = self.get(name, str, default)
        if value not in choices:
            known = ", ".join(choices)
            raise RunFolderError(f"{self.source}: {name} is {reprlib.repr(value)}, and regard reads {known}")
        return choices[value]


def read_settings(folder: Path) -> Settings:
    """The configuration of the model in a folder.

    Raises:
        RunFolderError: there is no complete configuration.
    """
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; expected one with a config.json and a {WEIGHTS}")
    if not (folder / "config.json").is_file():
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


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards in its index.

    Raises:
        RunFolderError: a file is absent, truncated or foreign, or the folder has only pickled weights.
        MissingExtraError: safetensors is not installed.
    """
    if (folder / WEIGHTS).is_file():
        return _read(folder / WEIGHTS)
    if not (folder / INDEX).is_file():
        raise RunFolderError(_why_no_weights(folder))
    names = read_object(folder / INDEX).get("weight_map")
    if not isinstance(names, dict) or not names:
        raise RunFolderError(f"{folder / INDEX} has no weight_map: it does not say where the tensors are")
    tensors: dict[str, Tensor] = {}
    for shard in sorted({Path(str(name)).name for name in names.values()}):  # the base name only: an index is untrusted
        tensors |= _read(folder / shard)
    absent = next((name for name in names if name not in tensors), None)
    if absent is not None:
        raise RunFolderError(f"{folder / INDEX} names the tensor {absent}, which is in none of its files")
    return tensors


def _why_no_weights(folder: Path) -> str:
    pickled = next((path.name for pattern in ("*.bin", "*.pt", "*.pth") for path in sorted(folder.glob(pattern))), None)
    if pickled is None:
        return f"{folder} has no {WEIGHTS} and no {INDEX}: it holds no weights that regard reads"
    return (
        f"{folder} has its weights as {pickled} only, a pickle, which can run code when it is read: regard does not; "
        f"have its owner or transformers save them as {WEIGHTS}"
    )


def _read(path: Path) -> dict[str, Tensor]:
    library = safetensors_library()
    try:
        with tensor_errors(path):
            tensors: dict[str, Tensor] = library.torch.load_file(path)
    except (DataError, OSError) as error:
        raise RunFolderError(f"{path} cannot be read ({error}): absent, cut short or another format") from None
    return tensors
