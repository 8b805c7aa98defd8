"""Named tensors and a record as one safetensors file, with checksums of both.

The header's `__metadata__` has two texts: `regard`, JSON of the record, of the crc32 of each tensor and of the aliases,
such as {"model/output.weight": "model/embedding.weight"} for tied weights, which are stored once; and `crc32`, the
checksum of that text.
"""

import json
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from regard.errors import DataError, RunFolderError
from regard.files.atomic import replacing
from regard.files.untrusted import open_tensors, parse_json

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
