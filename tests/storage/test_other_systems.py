"""Folders that the system refuses to open, as Windows does."""

import os
from pathlib import Path
from typing import Any

import pytest

from regard.errors import RunFolderError
from regard.storage import atomic, locks
from regard.storage.atomic import write_atomically
from regard.storage.locks import locked


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A system that refuses to open folders."""
    real = os.open

    def refusing(path: Any, *arguments: Any, **options: Any) -> int:
        if os.path.isdir(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(path, *arguments, **options)

    monkeypatch.setattr(os, "open", refusing)
    for module in (atomic, locks):
        monkeypatch.setattr(module, "OPENS_FOLDERS", False)


def test_files_are_replaced_where_folders_cannot_be_opened(windows: None, tmp_path: Path) -> None:
    for content in ("old", "new"):
        write_atomically(tmp_path / "file", content)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["new"]


def test_folders_are_locked_where_they_cannot_be_opened(windows: None, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    with locked(run, refusal="wait"):
        with pytest.raises(RunFolderError, match="wait"), locked(run, refusal="wait"):
            pass
        assert not list(run.iterdir())
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    with locked(run, refusal="wait"):
        pass
