"""Named tensors on disk, as one safetensors file whose name holds its checksum.

A part of a checkpoint (the model, say) is described in the manifest as

    {"name": ..., "bytes": ..., "crc32": ..., "aliases": {"output.weight": "embedding.weight"}}
"""

import re
import reprlib
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from regard.errors import DataError, RegardError, RunFolderError
from regard.files.atomic import write_atomically
from regard.files.own_files import is_file_below
from regard.files.sealed import checksum_of_file
from regard.files.untrusted import safetensors_library, tensor_errors

Tensors = dict[str, Tensor]


_OWN_NAME = re.compile(r"[a-z]+-([0-9a-f]{8})\.safetensors")


def write_part(folder: Path, part: str, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Write some tensors, and describe the file for the manifest. Equal names of files have equal content."""
    owners, aliases = _without_aliases(tensors)
    whole = {name: value.detach().cpu().contiguous() for name, value in owners.items()}
    content = safetensors_library().torch.save(whole)
    checksum = f"{zlib.crc32(content):08x}"
    name = f"{part}-{checksum}.safetensors"
    write_atomically(folder / name, content)
    return {"name": name, "bytes": len(content), "crc32": checksum, "aliases": aliases}


def is_own_name(name: str) -> bool:
    """True for names in the form of `write_part`."""
    return _OWN_NAME.fullmatch(name) is not None


def is_own_file(path: Path) -> bool:
    """True if `write_part` wrote a file: its name ends in the checksum of its content."""
    named = _OWN_NAME.fullmatch(path.name)
    return named is not None and path.is_file() and checksum_of_file(path)["crc32"] == named[1]


def read_part(folder: Path, part: str, entry: Any) -> Tensors:
    """Read the tensors of a part, checked against its entry in the manifest."""
    try:
        file = _open_checked(folder, entry)
        tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (it is no mapping)
        return tensors | {alias: tensors[owner] for alias, owner in entry["aliases"].items()}
    except RegardError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, safetensors_library().SafetensorError):
        raise RunFolderError(f"the checkpoint at {folder} holds no {part}") from None


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
    try:
        found = checksum_of_file(path)
    except (FileNotFoundError, IsADirectoryError):
        raise RunFolderError(f"{path} is missing, and the checkpoint needs it") from None
    if found["bytes"] != entry["bytes"]:
        raise RunFolderError(
            f"{path} has {found['bytes']} bytes, expected {reprlib.repr(entry['bytes'])}: it was cut short"
        )
    if found["crc32"] != entry["crc32"]:
        raise RunFolderError(f"{path} was altered: its checksum is not the one written with it")
