"""Files of numbers with a footer: one that fits is read, any other is refused in one line."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from regard.errors import RunFolderError
from regard.files.mapped import SIGNATURE, open_mapped, write_footer

NO_NUMBER: Any = "5"


@dataclass(frozen=True)
class Counts:
    dtype: str
    count: int

    @property
    def numbers_bytes(self) -> int:
        return self.count * np.dtype(self.dtype).itemsize


def write(path: Path, footer: Counts) -> Path:
    with path.open("wb") as file:
        file.write(np.arange(5, dtype=np.int32).tobytes())
        write_footer(file, footer)
    return path


def test_numbers_and_footer_come_back(tmp_path: Path) -> None:
    raw, footer = open_mapped(write(tmp_path / "x", Counts("<i4", 5)), Counts)
    assert footer == Counts("<i4", 5)
    assert raw.view(footer.dtype).tolist() == [0, 1, 2, 3, 4]
    assert not raw.flags.writeable


@pytest.mark.parametrize(
    "footer", [Counts("<i4", 4), Counts("<i2", 5), Counts("nonsense", 5), Counts("<i4", NO_NUMBER), Counts("O", 5)]
)
def test_a_footer_that_does_not_fit(tmp_path: Path, footer: Counts) -> None:
    with pytest.raises(RunFolderError, match=r"expected a footer that fits .*x, got damaged bytes; delete it"):
        open_mapped(write(tmp_path / "x", footer), Counts)


@pytest.mark.parametrize("record", ["[1]", '{"dtype": "<i4"}', '{"dtype": "<i4", "count": 0, "more": 1}', "{", "\xff"])
def test_a_footer_of_another_kind(tmp_path: Path, record: str) -> None:
    content = record.encode("latin-1")
    (tmp_path / "x").write_bytes(content + len(content).to_bytes(8, "little") + SIGNATURE)
    with pytest.raises(RunFolderError, match="expected a footer that fits"):
        open_mapped(tmp_path / "x", Counts)


def test_a_footer_longer_than_the_file(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(json.dumps({}).encode() + (2**62).to_bytes(8, "little") + SIGNATURE)
    with pytest.raises(RunFolderError, match="expected a footer that fits"):
        open_mapped(tmp_path / "x", Counts)
