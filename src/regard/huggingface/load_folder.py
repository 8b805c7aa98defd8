"""A folder of `save_pretrained`, loaded by transformers: without network, and without code of the folder."""

import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch

from regard.errors import ArgumentError, RegardError, RunFolderError
from regard.files.model_folder import OnProgress, no_progress
from regard.huggingface.folder import Settings, read_settings, read_tensors
from regard.tensors.memory import human

MOST_LAYERS, LAYER_BYTES = 4_096, 100_000
"""The most layers that are made for a folder, and the memory of a layer's modules without its weights."""


class Loaded(NamedTuple):
    model: Any
    """In evaluation mode, float32, on the CPU."""
    absent: tuple[str, ...]
    """Parameters that are in no file of the folder: they are random."""


def load_folder(folder: Path, tell: OnProgress = no_progress) -> Loaded:
    """Load the model of a folder, of the class that its config.json names.

    A class that transformers does not know is replaced by the one for the `model_type`. `tell` is called with the bytes
    of weights read so far.

    Raises:
        RunFolderError: the folder is foreign or damaged, needs code of its own, or holds another model's weights.
        ArgumentError: transformers is not installed.
    """
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
    """The package `transformers`; raises ArgumentError where it is not installed."""
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
    except Exception as error:  # of any kind: it is what transformers makes of a foreign folder
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
