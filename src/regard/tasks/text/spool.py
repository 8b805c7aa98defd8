"""Text read once from its source, and then from disk as often as needed."""

import json
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

from regard.files.atomic import naming

BLOCK_CHARACTERS = 2**20
"""A block is written when it has so many characters. This limits the memory and the number of calls of JSON."""
_SIZE_BYTES = 8


class Spool(AbstractContextManager["Spool"]):
    """Records of text in an unnamed file, about as large as the text, which the system removes when it is closed or
    the process dies. A record is a text or a sequence of texts that JSON can hold (a tuple comes back as a list)."""

    def __init__(self, records: Iterable[Any], folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115  (closed by __exit__)
        self._count = self._end = 0
        try:
            for block in _blocks(records):
                self._write(block, folder)
        except BaseException:
            self._file.close()
            raise

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Any]:
        at = 0
        while at < self._end:
            self._file.seek(at)
            size = int.from_bytes(self._file.read(_SIZE_BYTES), "little")
            at += _SIZE_BYTES + size
            yield from json.loads(self._file.read(size))

    def __exit__(self, *exception: object) -> None:
        self._file.close()

    def _write(self, block: list[Any], folder: Path) -> None:
        content = json.dumps(block, ensure_ascii=False, separators=(",", ":")).encode()
        with naming(folder):  # the file has no name
            self._file.write(len(content).to_bytes(_SIZE_BYTES, "little") + content)
            self._file.flush()
        self._count += len(block)
        self._end += _SIZE_BYTES + len(content)


def _blocks(records: Iterable[Any]) -> Iterator[list[Any]]:
    block: list[Any] = []
    characters = 0
    for record in records:
        block.append(record)
        characters += len(record) if isinstance(record, str) else sum(map(len, record))
        if characters >= BLOCK_CHARACTERS:
            yield block
            block, characters = [], 0
    if block:
        yield block
