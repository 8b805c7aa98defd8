"""Nothing is removed or overwritten that a run did not write: behind links, in its folders, or beside an output."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from regard.errors import RegardError, RunFolderError
from regard.tasks.pictures.save import PictureFiles, save_pictures
from regard.tasks.registry import task_of
from regard.tasks.runs.run_folder import FOLDERS
from regard.tasks.training.checkpoints import Checkpoints
from regard.tasks.translation.bulk import opened
from regard.tasks.translation.train import train_translation
from tests.tasks.damaged_runs import settings_of, snapshot
from tests.tasks.small_runs import small_config

HOWS: dict[str, dict[str, Any]] = {"resume": {"resume": True}, "overwrite": {"overwrite": True}}


@pytest.fixture
def strangers(tmp_path: Path) -> Path:
    folder = tmp_path / "strangers"
    (folder / "step-00000001").mkdir(parents=True)
    for name in ("model.safetensors", "model-00001-of-00002.safetensors", "model-12345678.safetensors", "tokens.npy",
                 ".model.safetensors.12.tmp", "events.out.tfevents.1", "step-00000001/model.safetensors"):  # fmt: skip
        (folder / name).write_text(f"the content of {name}")
    return folder


@pytest.mark.parametrize("name", [*FOLDERS, "train.log", "metrics.jsonl"])
def test_nothing_is_written_or_removed_behind_a_link(begun_copy: Path, strangers: Path, name: str) -> None:
    path, target = begun_copy / name, strangers if name in FOLDERS else strangers / "mine"
    if path.is_dir():
        shutil.copytree(path, strangers, dirs_exist_ok=True)
        shutil.rmtree(path)
    elif path.exists():
        path.rename(target)
    path.symlink_to(target)
    before, theirs = snapshot(begun_copy), snapshot(strangers)
    for how in HOWS.values():
        with pytest.raises(RunFolderError, match=rf"run/{name} is a link to .*strangers"):
            train_translation(settings_of(begun_copy, steps=6), **how)
        assert (snapshot(begun_copy), snapshot(strangers)) == (before, theirs)


@pytest.mark.parametrize("how", HOWS)
@pytest.mark.parametrize("name", ["last.safetensors", "config.json", "run.toml"])
def test_a_link_in_the_place_of_a_file_is_replaced(begun_copy: Path, strangers: Path, name: str, how: str) -> None:
    (begun_copy / name).rename(strangers / "mine")
    (begun_copy / name).symlink_to(strangers / "mine")
    theirs = snapshot(strangers)
    train_translation(settings_of(begun_copy, steps=6), **HOWS[how])
    assert snapshot(strangers) == theirs
    assert not (begun_copy / name).is_symlink()


def test_the_run_folder_itself_may_be_a_link(begun_copy: Path, tmp_path: Path) -> None:
    now = tmp_path / "now"
    now.symlink_to(begun_copy)
    train_translation(settings_of(now, steps=6), resume=True)
    train_translation(settings_of(now, steps=2), overwrite=True)
    assert now.is_symlink()
    assert Checkpoints(begun_copy).position("last").step == 2


FOREIGN = {
    "config.json": '{"model_type": "gpt2", "n_embd": 16}', "model.safetensors": "weights", "tokenizer.json": "{}",
    "train.log": "a log", "metrics.jsonl": "numbers", "last.safetensors": "theirs", "data/train/tokens.npy": "tokens",
    "tensorboard/events.out.tfevents.1": "curves", "run.toml": "title = 'theirs'",
}  # fmt: skip


@pytest.mark.parametrize("how", [{}, {"resume": True}, {"overwrite": True}])
def test_a_folder_without_our_marker_is_nobodys_to_replace(tmp_path: Path, how: dict[str, Any]) -> None:
    """Files of a run's names are a downloaded model's, or another trainer's."""
    config = small_config(tmp_path, steps=2)
    for name, content in FOREIGN.items():
        (config.out / name).parent.mkdir(parents=True, exist_ok=True)
        (config.out / name).write_text(content)
    before = snapshot(config.out)
    with pytest.raises(RunFolderError, match=r"is not empty and holds no run \(no run\.toml of regard's\)"):
        train_translation(config, **how)
    assert snapshot(config.out) == before


PIPES = ["best.safetensors", "last.safetensors", "source_tokenizer.json", "run.toml", "prepared.json", "train.log"]


@pytest.mark.parametrize("name", [*PIPES, "data/train/tokens.npy", "data/train/about.json"])
def test_a_pipe_in_a_run_folder_is_refused(begun_copy: Path, name: str) -> None:
    config = settings_of(begun_copy, steps=6)
    (begun_copy / name).unlink()
    os.mkfifo(begun_copy / name)
    told = rf"run/{name} is no regular file, and a run has one of that name: move it away"
    with pytest.raises(RunFolderError, match=told):
        task_of(begun_copy).load(begun_copy, device="cpu")
    if name != "run.toml":  # without it the folder is none of ours
        for how in HOWS.values():
            with pytest.raises(RunFolderError, match=told):
                train_translation(config, **how)


def test_a_file_or_a_device_in_the_place_of_another(begun_copy: Path) -> None:
    config = settings_of(begun_copy, steps=6)
    shutil.rmtree(begun_copy / "data")
    (begun_copy / "data").write_text("mine")
    with pytest.raises(RunFolderError, match="run/data is a file where a run has a folder"):
        train_translation(config, overwrite=True)
    (begun_copy / "data").unlink()
    (begun_copy / "run.toml").unlink()
    (begun_copy / "run.toml").symlink_to("/dev/zero")
    with pytest.raises(RunFolderError, match=r"run\.toml is no regular file"):
        task_of(begun_copy).load(begun_copy, device="cpu")


@pytest.mark.parametrize("how", HOWS)
def test_files_of_others_in_the_folders_of_a_run_stay(begun_copy: Path, how: str) -> None:
    """Training goes on and replaces its checkpoints beside them; the run is replaced around them."""
    theirs = {}
    for folder in ("last", "data", "tensorboard", "."):
        for name in ("model.safetensors", "model-12345678.safetensors", ".notes.12.tmp", "notes.tmp", "mine/a.txt"):
            path = begun_copy / folder / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_text(f"{folder} {name}")
            theirs[path] = path.read_bytes()
    train_translation(settings_of(begun_copy, steps=6), **HOWS[how])
    assert {path: path.read_bytes() for path in theirs if path.exists()} == theirs
    assert Checkpoints(begun_copy).position("last").step == 6
    train_translation(settings_of(begun_copy, steps=8), resume=True)
    assert Checkpoints(begun_copy).position("last").step == 8


def test_pictures_are_not_written_through_links(tmp_path: Path) -> None:
    (tmp_path / "mine.png").write_text("mine")
    (tmp_path / "attention.png").symlink_to("mine.png")
    with pytest.raises(RunFolderError, match=r"attention\.png is a link to mine\.png"):
        save_pictures([], PictureFiles.at(tmp_path), title="")
    assert (tmp_path / "mine.png").read_text() == "mine"


def write_answers(target: Path, text: str, **how: bool) -> None:
    with opened(target, {}, **{"resume": False, "overwrite": False, **how}) as unfinished:
        assert unfinished is not None
        unfinished.add([], text)
        unfinished.finish()


def test_an_output_that_is_a_link_stays_one(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there/out.txt", tmp_path / "out.txt"
    link.symlink_to(target)
    write_answers(link, "new")  # it leads to no file yet
    assert target.read_text() == "new"
    with pytest.raises(RegardError, match=r"there/out\.txt is there already: replace it"):
        write_answers(link, "again")
    write_answers(link, "again", overwrite=True)
    assert target.read_text() == "again"
    assert link.is_symlink()
    assert sorted(path.name for path in tmp_path.rglob("*")) == ["out.txt", "out.txt", "there"]


@pytest.mark.parametrize("name", ["out.txt.partial", "out.txt.partial.json"])
@pytest.mark.parametrize("how", HOWS)
def test_the_unfinished_file_is_not_written_through_a_link(tmp_path: Path, name: str, how: str) -> None:
    (tmp_path / "mine").write_text("{}")
    (tmp_path / name).symlink_to("mine")
    with pytest.raises(RunFolderError, match=f"{name} is a link to mine"):
        write_answers(tmp_path / "out.txt", "new", **HOWS[how])
    assert (tmp_path / "mine").read_text() == "{}"


@pytest.mark.parametrize(("name", "content"), [("out.txt.partial", "mine"), ("out.txt.partial.json", '{"a": 1}')])
def test_a_file_of_somebody_in_the_place_of_the_unfinished_one(tmp_path: Path, name: str, content: str) -> None:
    (tmp_path / name).write_text(content)
    for how in HOWS.values():
        with pytest.raises(RunFolderError, match=f"{name} is not what regard wrote: move it away"):
            write_answers(tmp_path / "out.txt", "new", **how)
        assert snapshot(tmp_path) == {name: content.encode()}
