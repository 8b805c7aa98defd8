"""A folder written by Hugging Face's `save_pretrained`: its settings and tensors, and the model that transformers loads
from it, without network. No code of the folder is run.
"""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import ArgumentError, DataError, RegardError, RunFolderError
from regard.files.atomic import read_json
from regard.files.model_folder import PICKLED, WEIGHTS, OnProgress, no_progress, refuse_other_kinds, snapshot_of
from regard.files.untrusted import open_tensors, read_torch_tensors
from regard.tensors.memory import human


class Settings(NamedTuple):
    values: dict[str, Any]
    source: Path


def read_settings(folder: Path) -> Settings:
    """The configuration of the model in a folder, which is its `source.parent`: of a cache, the snapshot."""
    folder = snapshot_of(folder)
    if not folder.is_dir():
        raise RunFolderError(f"{folder} is not a folder; expected one with a config.json and a {WEIGHTS}")
    if not (folder / "config.json").is_file():
        refuse_other_kinds(folder)
        raise RunFolderError(f"{folder} is not a Hugging Face folder: it has no config.json")
    return Settings(read_json(folder / "config.json"), folder / "config.json")


def read_tensors(folder: Path, tell: OnProgress = no_progress) -> dict[str, Tensor]:
    """All tensors of model.safetensors or pytorch_model.bin, or of the shards in an index. A warning says where they
    come from a pickle, which `torch.load(weights_only=True)` reads without running code."""
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
    names = read_json(index).get("weight_map")
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


MOST_LAYERS, LAYER_BYTES = 4_096, 100_000
"""The most layers that are made for a folder, and the memory of a layer's modules without its weights."""


class Loaded(NamedTuple):
    model: Any
    """In evaluation mode, float32, on the CPU."""
    absent: tuple[str, ...]
    """Parameters that are in no file of the folder: they are random."""


def load_folder(folder: Path, tell: OnProgress = no_progress) -> Loaded:
    """Load the model of a folder, of the class that its config.json names, or else of the one for its `model_type`.
    `tell` is called with the bytes of weights read so far."""
    settings = read_settings(folder)
    folder = settings.source.parent
    library = transformers_library()
    _refuse_own_code(folder, settings.values, library)
    tensors = read_tensors(folder, tell)
    _check_counts(settings)
    with quiet(library), _refusing(folder):
        config = library.AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
        kind, is_named = _class_of(config, library)
        model, found = kind.from_pretrained(
            None, config=config, state_dict=tensors, dtype="float32", output_loading_info=True,
            ignore_mismatched_sizes=True,
        )  # fmt: skip
        if other := sorted(found["mismatched_keys"]):
            name, got, wanted = other[0]
            raise RunFolderError(
                f"{folder}: its config.json is of another size than its weights, in {len(other)} of the parameters: "
                f"{name} has the shape {tuple(got)}, and the config wants {tuple(wanted)}; take both from one model"
            )
        absent = tuple(sorted(found["missing_keys"]))
        if absent and (is_named or len(absent) == len(model.state_dict())):
            raise RunFolderError(
                f"{folder} has no weights for {len(absent)} of the parameters of {kind.__name__}, such as {absent[0]}: "
                "its files belong to another model, or are not all there"
            )
        return Loaded(model.eval(), absent)


def transformers_library() -> Any:
    try:
        import transformers
    except ImportError:
        raise ArgumentError("a Hugging Face folder is loaded by transformers: pip install transformers") from None
    return transformers


@contextmanager
def quiet(library: Any) -> Iterator[None]:
    logging = library.utils.logging
    before, had_bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity(logging.CRITICAL)
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
        if had_bars:
            logging.enable_progress_bar()


@contextmanager
def _refusing(folder: Path) -> Iterator[None]:
    try:
        yield
    except RegardError:
        raise
    except Exception as error:  # of any kind: transformers raises it for a foreign folder
        said = " ".join(str(error).split())
        raise RunFolderError(f"{folder}: transformers cannot load it: {type(error).__name__}: {said:.400}") from error


def _refuse_own_code(folder: Path, values: Mapping[str, Any], library: Any) -> None:
    kind = values.get("model_type")
    if isinstance(kind, str) and kind in library.CONFIG_MAPPING:
        return
    if "auto_map" in values:
        raise RunFolderError(
            f"{folder} holds a model whose code is in the folder, and regard runs none of it: transformers does with "
            "trust_remote_code=True; load the model so in Python, and call regard.view(model, inputs)"
        )
    raise RunFolderError(
        f"{folder / 'config.json'}: model_type is {kind!r:.80}, which transformers {library.__version__} does not know"
    )


def _check_counts(settings: Settings) -> None:
    """Refuse more layers than memory holds, before they are made one by one. A number may also mean no layers of this
    model, such as a default of its family, so it is compared with nothing else in the folder."""
    level: list[Mapping[str, Any]] = [settings.values]
    while level:
        for name, value in (pair for values in level for pair in values.items()):
            if "layer" in name and type(value) is int and value > MOST_LAYERS:
                raise RunFolderError(
                    f"{settings.source}: {name} is {value}, and modules for so many layers take "
                    f"{human(value * LAYER_BYTES)} of memory: expected at most {MOST_LAYERS:,}"
                )
        level = [inner for values in level for inner in values.values() if isinstance(inner, dict)]


def _class_of(config: Any, library: Any) -> tuple[Any, bool]:
    for name in config.architectures or ():
        kind: Any = getattr(library, name, None) if isinstance(name, str) else None
        is_model = isinstance(kind, type) and issubclass(kind, library.PreTrainedModel)
        if is_model and getattr(kind, "config_class", None) is type(config):
            return kind, True
    with torch.device("meta"):  # the class alone is wanted
        return type(library.AutoModel.from_config(config, trust_remote_code=False)), False
