"""Crash-safe checkpoints: safetensors and JSON, complete before they get their names.

    folder/best/  checkpoint.json  model-<checksum>.safetensors
    folder/last/  checkpoint.json  model-... optimizer-... random-... average-... (if one is kept)
    folder/kept/step-00000500/     like best: the model of a validation that is kept

`checkpoint.json`, the manifest, names the files of one checkpoint with their sizes and checksums. It is replaced last,
so that a process may die at any time: the manifest names complete files, old or new.

With several ranks the first writes.
"""

import re
from collections.abc import Container, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor, nn

from regard.errors import ArgumentError, RunFolderError
from regard.files.atomic import read_json, temporary_of
from regard.files.own_files import refuse_links, refuse_links_in, remove_empty
from regard.files.sealed import SEAL, read_sealed, write_sealed
from regard.tasks.training.checkpoint_names import KEPT, TRAINED
from regard.tasks.training.distributed.ranks import ALONE, Ranks
from regard.tasks.training.tensor_files import Tensors, is_own_file, is_own_name, read_part, write_part

FORMAT = 1
_KEPT_NAME = re.compile("step-[0-9]+")


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
    """The best and the last checkpoint under one folder, and the models kept after validations.

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

    def save_last(self, state: TrainingState, ranks: Ranks = ALONE) -> None:
        """Replace the last checkpoint. Every rank must call this method.

        Raises:
            RunFolderError: there is a link in its place.
            OSError: a rank could not write its part; the checkpoint before is still there.
        """
        parts = {"model": state.model, "optimizer": state.optimizer, "random": state.random}
        if state.average is not None:
            parts["average"] = state.average
        _write_checkpoint(self._to_write("last"), parts, state.position, ranks)

    def save_model(self, which: str, model: Mapping[str, Tensor], position: Position, ranks: Ranks = ALONE) -> None:
        """Replace a checkpoint of only the model: the best, or a kept one. Errors and ranks as in `save_last`."""
        _write_checkpoint(self._to_write(which), {"model": dict(model)}, position, ranks)

    def kept(self) -> list[str]:
        """The names of the kept models, oldest first."""
        return [name for name in self._places() if name.startswith(KEPT) and self.has(name)]

    def remove(self, which: str) -> None:
        """Remove a checkpoint, if there is one. Foreign files stay, and with them their folder."""
        folder = self._to_write(which)
        if not folder.is_dir():
            return
        named = _names_in_manifest(folder)
        # The manifest first, so that a half-removed checkpoint does not count.
        (folder / "checkpoint.json").unlink(missing_ok=True)
        _remove_leftovers(folder, before=named)
        remove_empty(folder)

    def remove_all(self) -> None:
        for which in self._places():
            self.remove(which)
        remove_empty(self.folder / KEPT)

    def sweep(self) -> None:
        """Remove the leftovers of a dead process: temporary files, and tensor files missing from all manifests."""
        for which in self._places():
            folder = self.folder / which
            named = _names_in_manifest(folder)
            if named or (which.startswith(KEPT) and not self.has(which)):
                _remove_leftovers(folder, but=named)
            else:  # a damaged or absent manifest: any tensor file may be needed
                _remove_leftovers(folder, but={path.name for path in folder.glob("*.safetensors")})
            if not self.has(which):
                remove_empty(folder)

    def refuse_strangers(self) -> None:
        """Refuse links, files and foreign folders in the places of checkpoints, before one is written or removed."""
        for name in ("best", "last", TRAINED, KEPT):
            path = self.folder / name
            refuse_links_in(path)
            if path.exists() and not path.is_dir():
                raise RunFolderError(f"{path} is a file where a folder of checkpoints belongs: move it away")
        for which in self._places():
            _refuse_stranger(self.folder / which)

    def _to_write(self, which: str) -> Path:
        folder = self.folder / which
        refuse_links(*(self.folder / above for above in list(Path(which).parents)[:-1]), folder)
        return folder

    def _places(self) -> list[str]:
        kept = (path for path in self.folder.glob(f"{KEPT}/step-*") if _KEPT_NAME.fullmatch(path.name))
        names = ["best", "last", TRAINED, *sorted(f"{KEPT}/{path.name}" for path in kept)]
        return [name for name in names if (self.folder / name).is_dir()]

    def has(self, which: str) -> bool:
        return (self.folder / which / "checkpoint.json").is_file()

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
        folder = self.folder / "last"
        manifest = _read_manifest(folder)
        files = manifest["files"]
        model, optimizer = (read_part(folder, name, files.get(name)) for name in ("model", "optimizer"))
        random = read_part(folder, "random", files.get("random"))
        average = read_part(folder, "average", files["average"]) if "average" in files else None
        return TrainingState(model, optimizer, random, _read_position(folder, manifest), average)

    def load_model(self, which: str) -> Tensors:
        """Read the model of a checkpoint on the CPU, the moving average if it has one."""
        folder = self.folder / which
        files = _read_manifest(folder)["files"]
        model = read_part(folder, "model", files.get("model"))
        return model | (read_part(folder, "average", files["average"]) if "average" in files else {})

    def position(self, which: str) -> Position:
        """The position of training in a checkpoint; raises RunFolderError as `load_last`."""
        folder = self.folder / which
        return _read_position(folder, _read_manifest(folder))


def kept_name(step: int) -> str:
    """The name of a kept model.

    >>> kept_name(500)
    'kept/step-00000500'
    """
    return f"{KEPT}/step-{step:08d}"


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


def _write_checkpoint(
    folder: Path, parts: Mapping[str, Mapping[str, Tensor]], position: Position, ranks: Ranks
) -> None:
    """Let the first rank write the parts and then the manifest. All ranks raise its error."""

    def write() -> None:
        folder.mkdir(parents=True, exist_ok=True)
        files = {name: write_part(folder, name, tensors) for name, tensors in parts.items()}
        before = _names_in_manifest(folder)
        write_sealed(folder / "checkpoint.json", {"format": FORMAT, "position": asdict(position), "files": files})
        _remove_leftovers(folder, but={one["name"] for one in files.values()}, before=before)

    ranks.gather(lambda: write() if ranks.rank == 0 else None)


def _remove_leftovers(folder: Path, *, but: Iterable[str] = (), before: Container[str] = ()) -> None:
    """Remove our files in a folder, except these names. Foreign files stay. Ours are the files of the last manifest,
    and those named after the checksum of their content. Windows keeps a file that another process is reading: the next
    checkpoint removes it."""
    spared = {"checkpoint.json", *but}
    for path in [path for path in folder.iterdir() if path.name not in spared and not path.is_symlink()]:
        is_half_written = _is_own_name(temporary_of(path) or "")
        if is_half_written or (path.name in before and is_own_name(path.name)) or is_own_file(path):
            with suppress(PermissionError):
                path.unlink(missing_ok=True)


def _is_own_name(name: str) -> bool:
    return name == "checkpoint.json" or is_own_name(name)


def _names_in_manifest(folder: Path) -> set[str]:
    """The tensor files of a folder's manifest; none if it is absent, damaged or without checksum."""
    try:
        if SEAL not in read_json(folder / "checkpoint.json"):
            return set()
        return {str(entry["name"]) for entry in _read_manifest(folder)["files"].values()}
    except (RunFolderError, AttributeError, KeyError, TypeError):
        return set()


def _refuse_stranger(folder: Path) -> None:
    """Check that a checkpoint's folder holds one of ours, or the leftovers of an unfinished one."""
    path = folder / "checkpoint.json"
    try:
        manifest = read_json(path) if path.exists() else None
    except RunFolderError:
        return  # damaged, as only ours can be: its readers raise
    if manifest is not None and not {"format", "files"} <= set(manifest):
        raise RunFolderError(f"{path} is not a list of files that regard wrote: move {folder} away")
    if manifest is None and folder.parent.name != KEPT:  # kept models are only added
        for one in sorted(folder.iterdir()):
            if not _is_own_name(temporary_of(one) or "") and not is_own_file(one):
                raise RunFolderError(f"{folder} holds {one.name} and no checkpoint of regard's: move it away")


def _read_manifest(folder: Path) -> dict[str, Any]:
    if not (folder / "checkpoint.json").is_file():
        raise RunFolderError(f"no checkpoint at {folder}: expected a checkpoint.json there; train first")
    manifest = read_sealed(folder / "checkpoint.json")
    if manifest.get("format") != FORMAT or not isinstance(manifest.get("files"), dict):
        raise RunFolderError(
            f"{folder / 'checkpoint.json'} is not a checkpoint that this version reads: "
            f"expected format {FORMAT}, got {manifest.get('format')!r}"
        )
    return manifest


def _read_position(folder: Path, manifest: dict[str, Any]) -> Position:
    """The position in a manifest. Fields missing from older versions have their initial values."""
    position, known = manifest.get("position"), {field.name: field.default for field in fields(Position)}
    if not isinstance(position, dict) or not position or not set(position) <= set(known):
        raise RunFolderError(f"{folder / 'checkpoint.json'}: the position has not the fields {sorted(known)}")
    for name, value in position.items():
        numbers = (int,) if isinstance(known[name], int) else (int, float)
        is_count = type(value) is int and value < 0 and isinstance(known[name], int)
        if is_count or (type(value) not in numbers and not (value is None and known[name] is None)):
            raise RunFolderError(f"{folder / 'checkpoint.json'}: {name} must be a number of 0 or more, got {value!r}")
    return Position(**position)


def _shape(tensors: Mapping[str, Tensor], name: str) -> str:
    return str(tuple(tensors[name].shape)) if name in tensors else "absent"
