"""Files that are the old ones or the new ones: through errors, kills, full disks and limits."""

import os
import threading
from pathlib import Path

import pytest

from regard.errors import RunFolderError
from regard.files import atomic
from regard.files.atomic import OPENS_FOLDERS, read_json, replacing, temporary_of, write_atomically, write_json


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_reader_sees_the_old_file_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "x"
    write_atomically(path, b"old")
    with replacing(path) as file, path.open("rb") as reader:
        file.write(b"new, but not yet")
        file.flush()
        assert reader.read() == path.read_bytes() == b"old"
        assert all(temporary_of(other) for other in tmp_path.iterdir() if other != path)
    assert path.read_bytes() == b"new, but not yet"
    assert names(tmp_path) == ["x"]


def test_an_error_in_the_block_leaves_the_old_file_and_nothing_else(tmp_path: Path) -> None:
    write_atomically(tmp_path / "x", "old")

    def write_half() -> None:
        with replacing(tmp_path / "x") as file:
            file.write(b"half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert (tmp_path / "x").read_text() == "old"
    assert names(tmp_path) == ["x"]


def test_an_error_without_a_name_gets_one_and_others_keep_theirs(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '.*x'"), replacing(tmp_path / "x"):
        raise OSError(28, "No space left on device")
    with pytest.raises(OSError, match="somewhere else"), replacing(tmp_path / "x"):
        raise OSError(28, "No space left on device", "somewhere else")
    with pytest.raises(FileNotFoundError), replacing(tmp_path / "absent" / "x"):
        pass
    assert names(tmp_path) == []


def test_what_is_written_is_on_the_disk_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In this order, without which a power cut may leave a name without bytes."""
    done: list[str] = []
    real_sync, real_replace = os.fsync, os.replace

    def sync(descriptor: int) -> None:
        [path] = [
            path for path in (tmp_path, *tmp_path.iterdir()) if os.path.samestat(path.stat(), os.fstat(descriptor))
        ]
        done.append(f"sync {path.name}")
        real_sync(descriptor)

    def replace(source: Path, target: Path) -> None:
        done.append(f"rename {Path(source).name}")
        real_replace(source, target)

    monkeypatch.setattr(os, "fsync", sync)
    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "x", b"1")
    temporary = f".x.{threading.get_native_id()}.tmp"
    of_folder = [f"sync {tmp_path.name}"] if OPENS_FOLDERS else []
    assert done == [f"sync {temporary}", f"rename {temporary}", *of_folder]


def test_threads_that_write_to_one_path_do_not_mix(tmp_path: Path) -> None:
    path, start = tmp_path / "x", threading.Barrier(4)
    contents = [bytes([n]) * 1_000_000 for n in range(4)]

    def write(content: bytes) -> None:
        start.wait()
        for _ in range(5):
            write_atomically(path, content)

    threads = [threading.Thread(target=write, args=(content,)) for content in contents]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert path.read_bytes() in contents
    assert names(tmp_path) == ["x"]


def test_json_that_is_not_ours(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    write_json(path, {"é": [1, None]})
    assert read_json(path) == {"é": [1, None]}
    for content, message in (
        ("[]", "holds a JSON list, expected an object"),
        ("{", "is not whole JSON"),
        ('"\\', "not whole"),
    ):
        path.write_text(content)
        with pytest.raises(RunFolderError, match=message):
            read_json(path)
    with pytest.raises(RunFolderError, match="is missing"):
        read_json(tmp_path / "absent.json")


def test_a_seal_is_broken_by_any_other_value(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    atomic.write_checksummed(path, {"step": 1, "name": "a"})
    whole = path.read_text()
    for before, after in (("1", "2"), ('"a"', '"b"'), ('"step"', '"stop"')):
        path.write_text(whole.replace(before, after, 1))
        with pytest.raises(RunFolderError, match="was altered"):
            atomic.read_checksummed(path)
    path.write_text(whole)
    assert atomic.read_checksummed(path) == {"step": 1, "name": "a"}
