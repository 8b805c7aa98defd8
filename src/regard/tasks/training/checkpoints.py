"""Crash-safe checkpoints, each one safetensors file that is replaced in one step.

    folder/last.safetensors   model/... optimizer/... random/... average/... (if there is a moving average)
    folder/best.safetensors   model/...

The header has the position of training and the checksums: `tensor_files`. With several ranks the first writes.
"""

import random
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict, TypeVar, Unpack

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError, RunFolderError
from regard.tasks.config import TrainingConfig
from regard.tasks.training.distributed import ALONE, Ranks
from regard.tasks.training.optimizers import adamw, muon
from regard.tasks.training.tensor_files import TensorFile, Tensors, open_checked, write_tensors


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The progress of training. With the tensors it is enough to continue as if training had never stopped."""

    step: int = 0
    epoch: int = 0
    """The pass over the data of the next batch, from 0."""
    batch: int = 0
    """The index of the next batch in that pass, from 0."""
    best_value: float | None = None
    """The lowest validation loss so far."""
    best_step: int = 0
    patience_used: int = 0
    """The number of validations since then."""
    loss_total: float = 0.0
    """The sum of the loss since it was last logged."""
    loss_count: int = 0
    """The number of tokens in that sum."""
    skipped_batches: int = 0


class TrainingState(NamedTuple):
    model: Tensors
    optimizer: Tensors
    random: Tensors
    position: Position
    average: Tensors | None = None


class Checkpoints:
    """The best and the last checkpoint under one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, which: str) -> Path:
        return self.folder / f"{which}.safetensors"

    def save_last(self, state: TrainingState, ranks: Ranks = ALONE) -> None:
        """Replace the last checkpoint. Every rank must call this method."""
        parts = {"model": state.model, "optimizer": state.optimizer, "random": state.random}
        if state.average is not None:
            parts["average"] = state.average
        self._write("last", parts, state.position, ranks)

    def save_model(self, which: str, model: Mapping[str, Tensor], position: Position, ranks: Ranks = ALONE) -> None:
        """Replace a checkpoint of only the model, the best. Errors and ranks as in `save_last`."""
        self._write(which, {"model": dict(model)}, position, ranks)

    def has(self, which: str) -> bool:
        return self.path(which).is_file()

    def has_better(self, position: Position, *, by: str = "loss") -> bool:
        """True if the best checkpoint beats a model at `position`, the best of its run. This happens if the process
        died between saving the best checkpoint and the last one, and the run then resumed with other settings: the step
        of the best checkpoint may not be validated again."""
        try:
            kept = self.position("best")
        except RunFolderError:  # there is no best checkpoint, or it cannot be read
            return False
        if kept.best_value is None or position.best_value is None:
            return False
        return kept.best_value < position.best_value if by == "loss" else kept.best_value > position.best_value

    def load_last(self) -> TrainingState:
        """Read the last checkpoint; raises RunFolderError if it is absent, cut short, altered, or another program's."""
        with open_checked(self.path("last")) as file:
            model, optimizer, random = (file.part(name) for name in ("model", "optimizer", "random"))
            if not model or "torch" not in random:
                raise RunFolderError(f"{file.path} holds a model and no state of training: copy the file again")
            return TrainingState(model, optimizer, random, _position_of(file), file.part("average") or None)

    def load_model(self, which: str) -> Tensors:
        with open_checked(self.path(which)) as file:
            return file.part("model") | file.part("average")

    def position(self, which: str) -> Position:
        with open_checked(self.path(which)) as file:
            return _position_of(file)

    def _write(self, which: str, parts: Mapping[str, Tensors], position: Position, ranks: Ranks) -> None:
        def write() -> None:
            path = self.path(which)
            path.parent.mkdir(parents=True, exist_ok=True)
            tensors = {f"{part}/{name}": value for part, named in parts.items() for name, value in named.items()}
            write_tensors(path, tensors, {"position": asdict(position)})

        ranks.gather(lambda: write() if ranks.rank == 0 else None)


def fill_model(model: nn.Module, tensors: Tensors, *, source: Path) -> None:
    check_fit(model, tensors, source=source)
    model.load_state_dict(tensors)


def check_fit(model: nn.Module, tensors: Tensors, *, source: Path) -> None:
    """Raise RunFolderError, with the first difference, if a checkpoint's names or shapes differ from a model's."""
    ours = model.state_dict()
    for name in [*ours, *tensors]:
        if name not in tensors or name not in ours or ours[name].shape != tensors[name].shape:
            raise RunFolderError(
                f"{source} does not fit the model: {name} is {_shape(ours, name)} in the model "
                f"and {_shape(tensors, name)} in the checkpoint"
            )


def flatten_optimizer(state: Mapping[str, Any]) -> Tensors:
    """An optimizer's state without hyper-parameters, from its `state_dict`, as tensors named 'parameter:quantity'."""
    names = _parameter_names(state)
    flat = {f"{names[i]}:{key}": value for i, entry in state["state"].items() for key, value in entry.items()}
    for key, value in flat.items():
        if not isinstance(value, Tensor):
            raise ArgumentError(f"optimizer state {key} is {type(value).__name__}, expected a tensor")
    return flat


def unflatten_optimizer(tensors: Tensors, current: Mapping[str, Any], *, source: Path) -> dict[str, Any]:
    """The `state_dict` from the tensors of `flatten_optimizer`, with the hyper-parameters of `current`. The tensors are
    copied: an optimizer keeps them, and Windows does not remove a memory-mapped file in use. Raises RunFolderError for
    tensors of parameters outside this optimizer."""
    indices = {name: index for index, name in _parameter_names(current).items()}
    state: dict[int, Tensors] = {}
    for key, value in tensors.items():
        name, _, quantity = key.rpartition(":")
        if name not in indices:
            raise RunFolderError(f"{source} does not fit the optimizer: it has state for {name or key}")
        state.setdefault(indices[name], {})[quantity] = value.clone()
    return {"state": state, "param_groups": current["param_groups"]}


def _parameter_names(state: Mapping[str, Any]) -> dict[int, str]:
    groups = state["param_groups"]
    if any("param_names" not in group for group in groups):
        raise ArgumentError("the optimizer's parameters need names: give it (name, parameter) pairs")
    return {i: name for group in groups for i, name in zip(group["params"], group["param_names"], strict=True)}


def _position_of(file: TensorFile) -> Position:
    position, known = file.record.get("position"), {field.name: field.default for field in fields(Position)}
    if not isinstance(position, dict) or set(position) != set(known):
        raise RunFolderError(f"{file.path}: the position has not the fields {sorted(known)}")
    for name, value in position.items():
        numbers = (int,) if isinstance(known[name], int) else (int, float)
        is_count = type(value) is int and value < 0 and isinstance(known[name], int)
        if is_count or (type(value) not in numbers and not (value is None and known[name] is None)):
            raise RunFolderError(f"{file.path}: {name} must be a number of 0 or more, got {value!r}")
    return Position(**position)


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "absent"


_NONE = float("nan")
"""Marks the absence of a second Gaussian value: a tensor cannot hold None."""


def seed_everything(seed: int, *, rank: int = 0) -> None:
    """Seed torch (every device), numpy and Python, differently on every rank."""
    mixed = int(np.random.SeedSequence([seed, rank]).generate_state(1)[0])
    random.seed(mixed)
    np.random.seed(mixed)
    torch.manual_seed(mixed)


def get_random_state(device: torch.device) -> dict[str, Tensor]:
    """The states of the generators of torch, numpy and Python, and of the device if it is a GPU."""
    _, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    _, words, gauss = random.getstate()
    state = {
        "torch": torch.get_rng_state(),
        "numpy": torch.tensor([*map(int, keys), int(position), int(has_gauss)]),
        "numpy_gauss": torch.tensor(float(cached), dtype=torch.float64),
        "python": torch.tensor(words),
        "python_gauss": torch.tensor(_NONE if gauss is None else gauss, dtype=torch.float64),
    }
    if device.type == "cuda":
        state["cuda"] = torch.cuda.get_rng_state(device)
    return state


def set_random_state(state: dict[str, Tensor], device: torch.device) -> None:
    try:
        _set(state, device)
    except (KeyError, TypeError, ValueError, RuntimeError, OverflowError) as error:
        raise RunFolderError(f"the random state of the checkpoint is none that can be restored: {error!r}") from None


def _set(state: dict[str, Tensor], device: torch.device) -> None:
    *keys, position, has_gauss = state["numpy"].tolist()
    cached = state["numpy_gauss"].item()
    gauss = state["python_gauss"].item()
    words: tuple[Any, ...] = tuple(state["python"].tolist())
    # The clone is needed: given a row of a larger tensor, torch 2.13 reads at a wrong address and crashes.
    torch.set_rng_state(state["torch"].clone())
    np.random.set_state(("MT19937", np.array(keys, dtype=np.uint32), position, has_gauss, cached))
    random.setstate((3, words, None if gauss != gauss else gauss))
    if "cuda" in state and device.type == "cuda":
        torch.cuda.set_rng_state(state["cuda"].clone(), device)


M = TypeVar("M", bound=nn.Module)


def made_of(make: Callable[[], M]) -> M:
    """The model of `make`; raises ArgumentError for sizes of no model, or of one for which there is no memory."""
    try:
        return make()
    except RegardError:
        raise
    except (RuntimeError, ArithmeticError, MemoryError, ValueError, TypeError) as error:
        said = next(iter(str(error).splitlines()), type(error).__name__)
        raise ArgumentError(f"no model of these sizes can be made: {said}") from None


def filled(make: Callable[[], M], config: Any, tensors: dict[str, Tensor], *, source: Path) -> M:
    most = max((value for name, value in _integers(config) if name.endswith("layers")), default=0)
    if most > len(tensors):
        raise RunFolderError(f"{source} does not fit the model: it has {len(tensors)} tensors, and {most} layers")
    try:
        with torch.device("meta"):
            check_fit(made_of(make), tensors, source=source)
    except ArgumentError as error:
        raise RunFolderError(f"{source} does not fit the model: {error}") from None
    model = made_of(make)
    fill_model(model, tensors, source=source)
    return model


def _integers(config: Any) -> Iterator[tuple[str, int]]:
    for field in fields(config):
        value = getattr(config, field.name)
        if is_dataclass(value):
            yield from _integers(value)
        elif isinstance(value, int):
            yield field.name, value


class AdamSettings(TypedDict, total=False):
    betas: tuple[float, float]
    eps: float


def chosen_optimizer(
    config: TrainingConfig, model: nn.Module, output: nn.Module, **settings: Unpack[AdamSettings]
) -> torch.optim.Optimizer:
    decay = config.weight_decay
    if config.optimizer == "muon":
        return muon(model, aside=[output], rate=config.muon_rate, weight_decay=decay, **settings)
    return adamw(model, weight_decay=decay, **settings)
