"""Crash-safe checkpoints, each one safetensors file that is replaced in one step, with checksums.

    folder/last.safetensors   model/... optimizer/... random/... average/... (if there is a moving average)
    folder/best.safetensors   model/...

With several ranks the first writes. The header's `__metadata__` has two texts: `regard`, JSON of the position of
training, of the crc32 of each tensor and of the aliases, such as {"model/output.weight": "model/embedding.weight"} for
tied weights, which are stored once; and `crc32`, the checksum of that text.
"""

import json
import random
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, DataError, RegardError, RunFolderError
from regard.files.atomic import replacing
from regard.files.untrusted import open_tensors, parse_json
from regard.tasks.config import TrainingConfig
from regard.tasks.training.distributed import ALONE, Ranks
from regard.tasks.training.optimizers import adamw, muon

Tensors = dict[str, Tensor]

FORMAT = 2
DTYPES = {
    torch.float64: "F64", torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16", torch.bool: "BOOL",
    torch.int64: "I64", torch.int32: "I32", torch.int16: "I16", torch.int8: "I8", torch.uint8: "U8",
}  # fmt: skip
"""The names of dtypes in the format."""


def write_tensors(path: Path, tensors: Mapping[str, Tensor], record: Mapping[str, Any]) -> None:
    """Replace a file in one step. The library's own writer would hold the bytes of all tensors twice, and its error
    of a full disk is no OSError."""
    owners, aliases = _without_aliases(tensors)
    sums = {name: _checksum(value) for name, value in owners.items()}
    about = json.dumps({"format": FORMAT, **record, "crc32": sums, "aliases": aliases})
    header: dict[str, Any] = {"__metadata__": {"regard": about, "crc32": _checksum_of_text(about)}}
    end = 0
    for name, value in owners.items():
        begin, end = end, end + value.nbytes
        header[name] = {"dtype": DTYPES[value.dtype], "shape": list(value.shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with replacing(path) as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for value in owners.values():
            file.write(_bytes_of(value))


class TensorFile:
    def __init__(self, path: Path, file: Any) -> None:
        self.path = path
        self._file = file
        metadata = file.metadata() or {}
        if not {"regard", "crc32"} <= set(metadata):
            raise RunFolderError(f"{path} is no checkpoint of regard's: its header has no position of training")
        if _checksum_of_text(metadata["regard"]) != metadata["crc32"]:
            raise self._altered("the header")
        self.record: dict[str, Any] = parse_json(metadata["regard"])
        if (found := self.record.get("format")) != FORMAT:
            raise RunFolderError(f"{path} is of another version: expected format {FORMAT}, got {found!r}")
        if set(file.keys()) != set(self.record["crc32"]):
            raise self._altered("the list of tensors")

    def part(self, part: str) -> Tensors:
        """The tensors of a part: `part("model")` has "weight" for "model/weight"."""
        owners = {name: name for name in self.record["crc32"]} | self.record["aliases"]
        mine = {name: owner for name, owner in owners.items() if name.startswith(f"{part}/")}
        tensors = {owner: self._checked(owner) for owner in set(mine.values())}
        return {name.removeprefix(f"{part}/"): tensors[owner] for name, owner in mine.items()}

    def _checked(self, name: str) -> Tensor:
        value: Tensor = self._file.get_tensor(name)
        if _checksum(value) != self.record["crc32"][name]:
            raise self._altered(name)
        return value

    def _altered(self, place: str) -> RunFolderError:
        return RunFolderError(f"{self.path} was altered: {place} has not the checksum written with it; copy it again")


@contextmanager
def open_checked(path: Path) -> Iterator[TensorFile]:
    try:
        with open_tensors(path) as file:
            yield TensorFile(path, file)
    except FileNotFoundError:
        raise RunFolderError(f"no checkpoint at {path}: train first") from None
    except DataError as error:
        raise RunFolderError(str(error)) from None
    except (LookupError, TypeError):
        raise RunFolderError(f"{path} holds something else than its header says: copy it again") from None


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, str]]:
    """The tensors on the CPU, wide elements first, tied weights only under their first names; and the other names,
    each with the first one. Readers map the file, and want each tensor at a multiple of its elements' size."""
    first: dict[object, str] = {}
    owners: Tensors = {}
    aliases: dict[str, str] = {}
    for name, value in tensors.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if first.setdefault(place, name) == name:
            owners[name] = value.detach().cpu().contiguous()
        else:
            aliases[name] = first[place]
    return dict(sorted(owners.items(), key=lambda item: (-item[1].element_size(), item[0]))), aliases


def _bytes_of(value: Tensor) -> Any:
    return value.reshape(-1).view(torch.uint8).numpy()


def _checksum(value: Tensor) -> str:
    """Of dtype, shape and elements: another dtype or shape would make other numbers of the same bytes."""
    kind = f"{DTYPES.get(value.dtype)} {list(value.shape)}"
    return f"{zlib.crc32(_bytes_of(value), zlib.crc32(kind.encode())):08x}"


def _checksum_of_text(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


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


def chosen_optimizer(
    config: TrainingConfig, model: nn.Module, output: nn.Module, **settings: Any
) -> torch.optim.Optimizer:
    decay = config.weight_decay
    if config.optimizer == "muon":
        return muon(model, aside=[output], rate=config.muon_rate, weight_decay=decay, **settings)
    return adamw(model, weight_decay=decay, **settings)
