"""Named tensors on disk as safetensors: in one file, or in one file for each rank with an index in the manifest.

A part of a checkpoint (the model, say) is described in the manifest either as one file

    {"name": ..., "bytes": ..., "crc32": ..., "aliases": {"output.weight": "embedding.weight"}}

or as one file for each rank; file k has the rows of a tensor from row offsets[k] on

    {"shards": [{"name": ..., "bytes": ..., "crc32": ...}, ...],
     "tensors": {"embedding.weight": {"shape": [37, 32], "offsets": [0, 19]}, ...}, "aliases": {...}}

A reader takes the rows that it needs, from any number of files.
"""

import re
import reprlib
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.errors import DataError, RegardError, RunFolderError
from regard.storage.atomic import write_atomically
from regard.storage.own_files import is_file_below
from regard.storage.sealed import checksum_of_file
from regard.storage.untrusted import safetensors_library, tensor_errors
from regard.training.distributed.ranks import Ranks
from regard.training.distributed.shares import Share, is_shared_out, share

Tensors = dict[str, Tensor]
"""Tensors by name."""

READ_BYTES = 2**20
"""The bytes of a file that are read at a time to check it."""

_OWN_NAME = re.compile(r"[a-z]+(?:-[0-9]{5,}-of-[0-9]{5,})?-([0-9a-f]{8})\.safetensors")


class SavedTensor(NamedTuple):
    """A tensor on disk that has not been read yet."""

    shape: tuple[int, ...]
    rows: Callable[[int, int], Tensor]
    """Reads the rows from the first number up to the second, which is not included."""
    read: Callable[[], Tensor]
    """Reads the whole tensor."""


Place = Callable[[str, SavedTensor], Tensor]
"""Reads the part that a rank needs of the tensor with that name."""


def whole(_name: str, saved: SavedTensor) -> Tensor:
    """Read all of the tensor."""
    return saved.read()


# -- writing -------------------------------------------------------------------------------------------


def write_part(folder: Path, part: str, tensors: Mapping[str, Tensor], ranks: Ranks) -> dict[str, Any]:
    """Write the parts of some tensors that this rank holds. `describe` takes the answers of all ranks together.

    Tensors that are not shared out are the same on all ranks, and the first rank writes them.

    Raises:
        OSError: the file could not be written.
    """
    if not any(is_shared_out(value) for value in tensors.values()):
        if ranks.rank:
            return {}
        owners, aliases = _without_aliases(tensors)
        return {**_write(folder, part, owners), "aliases": aliases}
    shares = {name: mine for name, value in tensors.items() if (mine := _mine(value, ranks.rank)) is not None}
    owners, aliases = _without_aliases({name: mine.rows for name, mine in shares.items()})
    return {
        "shard": _write(folder, f"{part}-{ranks.rank:05}-of-{ranks.world_size:05}", owners),
        "tensors": {name: {"shape": [*shares[name].shape], "first": shares[name].first} for name in owners},
        "aliases": aliases,
    }


def describe(written: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The entry of a part in the manifest, from the answers of `write_part` on all ranks."""
    if "shard" not in written[0]:
        return written[0]
    tensors: dict[str, Any] = {}
    for number, one in enumerate(written):
        for name, held in one["tensors"].items():
            beyond = held["shape"][0] if held["shape"] else 1
            entry = tensors.setdefault(name, {"shape": held["shape"], "offsets": [beyond] * len(written)})
            entry["offsets"][number] = held["first"]
    aliases = {alias: owner for one in written for alias, owner in one["aliases"].items()}
    return {"shards": [one["shard"] for one in written], "tensors": tensors, "aliases": aliases}


def file_names(entry: Mapping[str, Any]) -> Iterator[str]:
    """The names of the files that an entry of the manifest needs."""
    yield from (str(one["name"]) for one in entry.get("shards", [entry]))


def is_own_name(name: str) -> bool:
    """Whether `write_part` gives names like this one."""
    return _OWN_NAME.fullmatch(name) is not None


def is_own_file(path: Path) -> bool:
    """Whether `write_part` wrote a file: its name ends in the checksum of its content.

    Raises:
        OSError: the file cannot be read.
    """
    named = _OWN_NAME.fullmatch(path.name)
    return named is not None and path.is_file() and checksum_of_file(path)["crc32"] == named[1]


def _mine(tensor: Tensor, rank: int) -> Share | None:
    """The share of a tensor that this rank writes, or None. The first rank writes its share even if that is empty."""
    mine = share(tensor) if is_shared_out(tensor) else Share(tensor, 0, tuple(tensor.shape))
    return mine if rank == 0 or (is_shared_out(tensor) and len(mine.rows)) else None


def _write(folder: Path, stem: str, tensors: Tensors) -> dict[str, Any]:
    """Write one file of tensors. Its name holds its checksum: equal names have equal content."""
    whole = {name: value.detach().cpu().contiguous() for name, value in tensors.items()}
    content = safetensors_library().torch.save(whole)
    checksum = f"{zlib.crc32(content):08x}"
    name = f"{stem}-{checksum}.safetensors"
    write_atomically(folder / name, content)
    return {"name": name, "bytes": len(content), "crc32": checksum}


def _without_aliases(tensors: Mapping[str, Tensor]) -> tuple[Tensors, dict[str, str]]:
    """The tensors, tied weights only once under their first names; and the other names, each with the first name."""
    first: dict[object, str] = {}
    owners: Tensors = {}
    aliases: dict[str, str] = {}
    for name, value in tensors.items():
        place = (value.data_ptr(), value.shape, value.stride(), value.dtype) if value.numel() else name
        if place in first:
            aliases[name] = first[place]
        else:
            first[place] = name
            # safetensors refuses a view into the storage of another tensor as shared, so a view is copied.
            alone = value.untyped_storage().nbytes() == value.nbytes
            owners[name] = value if alone else value.clone()
    return owners, aliases


# -- reading -------------------------------------------------------------------------------------------


def read_part(folder: Path, part: str, entry: Any, place: Place = whole) -> Tensors:
    """Read what `place` takes of the tensors of a part. Files that it does not need are not opened.

    Raises:
        RunFolderError: a file is absent, cut short, altered, or another program's; or the entry of the manifest has
            another form.
    """
    try:
        saved = _Saved(folder, entry)
        tensors = {name: place(name, saved[name]) for name in saved.places}
        return tensors | {alias: tensors[owner] for alias, owner in entry["aliases"].items()}
    except RegardError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, safetensors_library().SafetensorError):
        raise RunFolderError(f"the checkpoint at {folder} holds no {part}") from None


class _Saved:
    """The tensors of a part, and their files. Each file is checked when it is first needed."""

    def __init__(self, folder: Path, entry: Any) -> None:
        self._folder, self._shards = folder, entry.get("shards", [entry])
        self._opened: dict[int, Any] = {}
        self.places: dict[str, tuple[tuple[int, ...], list[int]]]
        if "shards" in entry:
            self.places = {name: (tuple(one["shape"]), one["offsets"]) for name, one in entry["tensors"].items()}
        else:
            file = self._file(0)
            self.places = {name: (tuple(file.get_slice(name).get_shape()), [0]) for name in file.keys()}  # noqa: SIM118

    def __getitem__(self, name: str) -> SavedTensor:
        shape, offsets = self.places[name]

        def rows(start: int, stop: int) -> Tensor:
            found = []
            for number, (first, end) in enumerate(pairwise([*offsets, shape[0]])):
                here = max(start, first), min(stop, end)
                if here[0] < here[1]:
                    found.append(
                        self._slice(number, name, (end - first, *shape[1:]))[here[0] - first : here[1] - first]
                    )
            if len(found) == 1:
                return found[0]
            return torch.cat(found) if found else self._slice(0, name, None)[0:0]

        def read() -> Tensor:
            if len(offsets) == 1 or not shape:
                return self._file(0).get_tensor(name)
            return rows(0, shape[0])

        return SavedTensor(shape, rows, read)

    def _slice(self, number: int, name: str, expected: tuple[int, ...] | None) -> Any:
        piece = self._file(number).get_slice(name)
        if expected is not None and tuple(piece.get_shape()) != expected:
            raise RunFolderError(
                f"{self._folder}: {name} has shape {tuple(piece.get_shape())} in file {number}, and {expected} in the "
                "manifest: they are not of one checkpoint"
            )
        return piece

    def _file(self, number: int) -> Any:
        if number not in self._opened:
            self._opened[number] = _open_checked(self._folder, self._shards[number])
        return self._opened[number]


def _open_checked(folder: Path, entry: dict[str, Any]) -> Any:
    name = entry["name"]
    # A foreign manifest may hold a path.
    if not isinstance(name, str) or "/" in name or not is_file_below(name):
        raise RunFolderError(f"the checkpoint at {folder} names the file {reprlib.repr(name)}, which is not in it")
    path = folder / name
    _check(path, entry)
    try:
        with tensor_errors(path):
            return safetensors_library().safe_open(path, framework="pt")
    except DataError as error:
        raise RunFolderError(str(error)) from None


def _check(path: Path, entry: dict[str, Any]) -> None:
    checksum, size = 0, 0
    try:
        with path.open("rb") as file:
            while piece := file.read(READ_BYTES):
                checksum, size = zlib.crc32(piece, checksum), size + len(piece)
    except (FileNotFoundError, IsADirectoryError):
        raise RunFolderError(f"{path} is missing, and the checkpoint needs it") from None
    if size != entry["bytes"]:
        raise RunFolderError(f"{path} has {size} bytes, expected {reprlib.repr(entry['bytes'])}: it was cut short")
    if f"{checksum:08x}" != entry["crc32"]:
        raise RunFolderError(f"{path} was altered: its checksum is not the one written with it")
