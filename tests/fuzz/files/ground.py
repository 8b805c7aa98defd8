"""The ground `files`: one file of a folder is damaged, and the folder is used."""

import atexit
import os
import shutil
import tempfile
from functools import cache
from pathlib import Path

import torch
from hypothesis import note

from regard.errors import LONGEST, RegardError
from tests.fuzz.drawing import Drawn
from tests.fuzz.files.exhibits import EXHIBITS, WORDS, Exhibit
from tests.fuzz.files.mutations import mutate

SHORTEST = 10


@cache
def _room() -> Path:
    room = Path(tempfile.mkdtemp(prefix="regard-fuzz-"))
    atexit.register(shutil.rmtree, room, ignore_errors=True)
    return room


@cache
def _made(name: str) -> Path:
    exhibit = next(e for e in EXHIBITS if e.name == name)
    folder = _room() / "made" / name.replace(" ", "_")
    folder.mkdir(parents=True)
    torch.manual_seed(0)
    exhibit.make(folder)
    return folder


def case(drawn: Drawn) -> None:
    exhibit = drawn.of(EXHIBITS)
    made = _made(exhibit.name)
    folder = _room() / "damaged"
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(made, folder)
    if (folder / "run").is_dir():
        _move_run(made, folder)
    bystander = _room() / "bystander"
    bystander.mkdir(exist_ok=True)
    (bystander / "model.safetensors").write_text(WORDS)
    for _ in range(drawn.of([1, 1, 2])):
        _damage(drawn, folder, bystander)
    use = drawn.of(sorted(exhibit.uses))
    note(f"then {use}")
    before = _snapshot(folder)
    strange = {name: content for name, content in before.items() if content == WORDS.encode()}
    _use(exhibit, use, folder)
    assert (bystander / "model.safetensors").read_text() == WORDS, "a file outside the folder was changed"
    after = _snapshot(folder)
    assert strange.items() <= after.items(), "a stranger's file in the folder was changed"
    assert [p.name for p in bystander.iterdir()] == ["model.safetensors"], "a file was written outside the folder"
    if use not in exhibit.writes:
        assert after == before, f"{use} only reads, and has changed the folder"


def _move_run(made: Path, folder: Path) -> None:
    for name in ("config.json", "run.toml"):
        path = folder / "run" / name
        path.write_text(path.read_text(encoding="utf-8").replace(str(made), str(folder)), encoding="utf-8")


def _damage(drawn: Drawn, folder: Path, bystander: Path) -> None:
    files = sorted(p for p in folder.rglob("*") if p.is_file() and not p.is_symlink())
    if not files:
        return
    path = drawn.of(files)
    name = path.relative_to(folder)
    match drawn.of(["content"] * 8 + ["gone", "swapped", "link", "folder"]):
        case "gone":
            path.unlink()
            note(f"{name} is gone")
        case "swapped":
            other = drawn.of(files)
            shutil.copy(other, path) if other != path else None
            note(f"{name} is a copy of {other.relative_to(folder)}")
        case "link":
            _link(drawn, path, bystander)
            note(f"{name} or its folder is a link to somewhere else")
        case "folder":
            path.unlink()
            path.mkdir()
            note(f"{name} is a folder")
        case _:
            before = path.read_bytes()
            how = mutate(drawn, path)
            after = path.read_bytes() if path.is_file() else b""
            note(f"{name} ({how}): {_difference(before, after)}")


def _difference(before: bytes, after: bytes) -> str:
    pairs = enumerate(zip(before, after, strict=False))
    at = next((n for n, (a, b) in pairs if a != b), min(len(before), len(after)))
    return f"at {at} of {len(before)} bytes {before[at : at + 120]!r} became {after[at : at + 120]!r}"


def _link(drawn: Drawn, path: Path, bystander: Path) -> None:
    if drawn.chance() and path.parent.name == "data":
        folder = path.parent
        shutil.rmtree(folder)
        folder.symlink_to(bystander, target_is_directory=True)
        return
    path.unlink()
    path.symlink_to(bystander / "model.safetensors")


def _use(exhibit: Exhibit, use: str, folder: Path) -> None:
    here = os.getcwd()
    try:
        exhibit.uses[use](folder)
    except (RegardError, OSError) as error:
        words = str(error)
        assert len(words) <= LONGEST, f"a message of {len(words)} characters"
        assert len(words) >= SHORTEST, f"a message of {words!r}"
    assert os.getcwd() == here


def _snapshot(folder: Path) -> dict[str, bytes | str]:
    found: dict[str, bytes | str] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        found[name] = os.readlink(path) if path.is_symlink() else path.read_bytes() if path.is_file() else "folder"
    return found
