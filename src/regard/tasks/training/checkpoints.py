"""Crash-safe checkpoints, each one safetensors file that is replaced in one step.

    folder/last.safetensors   model/... optimizer/... random/... average/... (if there is a moving average)
    folder/best.safetensors   model/...

The header has the position of training and the checksums: `tensor_files`. With several ranks the first writes.
"""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import ArgumentError, RunFolderError
from regard.tasks.training.distributed.ranks import ALONE, Ranks
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
    """The whole content of a checkpoint: tensors by name, and the position."""

    model: Tensors
    optimizer: Tensors
    random: Tensors
    position: Position
    average: Tensors | None = None


class Checkpoints:
    """The best and the last checkpoint under one folder.

    >>> import tempfile
    >>> model = nn.Linear(2, 3)
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     checkpoints = Checkpoints(Path(folder))
    ...     checkpoints.save_model("best", model.state_dict(), Position(step=7, best_value=0.5))
    ...     sorted(checkpoints.load_model("best"))
    ['bias', 'weight']
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, which: str) -> Path:
        return self.folder / f"{which}.safetensors"

    def save_last(self, state: TrainingState, ranks: Ranks = ALONE) -> None:
        """Replace the last checkpoint. Every rank must call this method.

        Raises:
            OSError: a rank could not write; the checkpoint before is still there.
        """
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
        """The position of training in a checkpoint; raises RunFolderError as `load_last`."""
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
    """Copy a checkpoint's tensors into a model; raises RunFolderError as `check_fit`."""
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
