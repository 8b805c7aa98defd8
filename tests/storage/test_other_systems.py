"""What only Linux or POSIX has is not needed: modules, functions, folders that can be opened, files in use replaced."""

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regard.errors import RunFolderError
from regard.files import atomic, locks
from regard.files.atomic import write_atomically
from regard.files.locks import locked
from tests import ROOT

# What Windows lacks is hidden before anything of ours is imported, but not from the standard library and from torch,
# which have other ways there. Then all of our modules are imported but for the two that are Triton's programs.
HIDING = """
import importlib, os, pkgutil, signal, subprocess, sys
from tests.storage.windows import refuse_as_windows_does
import lightning_fabric, matplotlib.backends.backend_agg, rich.progress, tokenizers, tyro
import torch.utils.tensorboard
hidden = ["fcntl", "grp", "posix", "pwd", "resource", "termios"]
for name in hidden:
    sys.modules[name] = None
for name in ["fork", "getuid", "geteuid", "killpg", "pread", "sched_getaffinity", "sysconf", "uname", "setsid"]:
    delattr(os, name)
for name in ["SIGKILL", "SIGHUP", "SIGUSR1", "SIGXFSZ"]:
    delattr(signal, name)
from pathlib import Path
real = open
def without_proc(path, *arguments, **options):
    if str(path).startswith("/proc/"):
        raise FileNotFoundError(2, "No such file or directory", str(path))
    return real(path, *arguments, **options)
import builtins
builtins.open = without_proc
import regard
alone = ("__main__", ".worker", *(f".triton_{name}" for name in ("additive", "rows", "columns", "ranks", "scores")))
for found in pkgutil.walk_packages(regard.__path__, "regard."):
    if "." in found.name and not found.name.endswith(alone):
        importlib.import_module(found.name)
def refused(*_, **__):
    raise TypeError("Fabric moves what it sums to the device, and Apple's GPUs have no float64")
lightning_fabric.Fabric.all_reduce = refused
from regard.files import atomic, locks
atomic.OPENS_FOLDERS = locks.OPENS_FOLDERS = False
refuse_as_windows_does(sys.argv[1])
"""

# A model is trained, goes on, is replaced and used. On Linux what Windows refuses is refused meanwhile.
USING = """
import importlib.util, sys
from pathlib import Path
from regard.cli.main import run_command
folder = Path(sys.argv[1])
lines = [f"{n} times {m}" for n in range(8) for m in range(8)]
(folder / "lines").write_text("\\n".join(lines) + "\\n")
(folder / "pairs.tsv").write_text("".join(f"{line}\\t{line[::-1]}\\n" for line in lines))
tiny = "--transformer.dim 8 --transformer.num-heads 2 --transformer.feed-forward-dim 8 --tokenizer characters"
tiny += " --transformer.encoder-layers 1 --transformer.decoder-layers 1 --warmup-steps 1 --device cpu --pictures 0"
tiny += " --validate-every 1 --save-every 1 --ema-decay 0.5"
run = str(folder / "run")
where = ["--data", str(folder / "pairs.tsv"), "--out", run]
def do(*arguments):
    assert run_command(arguments) == 0, arguments
do("train", *where, "--steps", "2", *tiny.split())
do("train", "--resume", "--out", run, "--steps", "4")
left = sorted(path.name for path in (folder / "run").rglob("*.safetensors"))
assert left == ["best.safetensors", "last.safetensors"], left
do("train", "--overwrite", *where, "--steps", "2", *tiny.split())
for more in ([], ["--overwrite"]):
    output = ["--output", str(folder / "answers"), *more, "--device", "cpu"]
    do("translate", run, "--input", str(folder / "lines"), *output)
engine = ["--engine", "ctranslate2"] if importlib.util.find_spec("ctranslate2") else []
do("translate", run, "1 times 2", "--device", "cpu", *engine)
"""


@pytest.mark.slow
def test_nothing_that_only_posix_has_is_needed(tmp_path: Path) -> None:
    script = HIDING + USING if sys.platform == "linux" else USING
    command = [sys.executable, "-c", script, str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the best model is in" in done.stderr


@pytest.fixture
def windows(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_file_that_somebody_reads_is_replaced_later(
    windows: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    real, refusals = os.replace, iter([True, True, False])

    def replace(source: Path, target: Path) -> None:
        if next(refusals):
            raise PermissionError(13, "Access is denied", str(target))
        real(source, target)

    monkeypatch.setattr(os, "replace", replace)
    write_atomically(tmp_path / "file", "new")
    assert (tmp_path / "file").read_text() == "new"


def test_a_file_that_stays_in_use_stays_as_it_was(
    windows: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    write_atomically(tmp_path / "file", "old")

    def replace(source: Path, target: Path) -> None:
        raise PermissionError(13, "Access is denied", str(target))

    monkeypatch.setattr(os, "replace", replace)
    monkeypatch.setattr(atomic, "PATIENCE_S", 0.05)
    with pytest.raises(PermissionError, match="file"):
        write_atomically(tmp_path / "file", "new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("file", "old")]


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


@pytest.mark.skipif(os.name == "nt", reason="Windows does not list the open files of a process")
def test_a_lock_ends_with_its_block_however_that_ends(tmp_path: Path) -> None:
    def interrupted() -> None:
        with locked(tmp_path, refusal="no"):
            with pytest.raises(RunFolderError, match="no"), locked(tmp_path, refusal="no"):
                pass
            raise KeyboardInterrupt

    descriptors = len(os.listdir("/dev/fd"))
    for _ in range(3):
        with pytest.raises(KeyboardInterrupt):
            interrupted()
    assert len(os.listdir("/dev/fd")) == descriptors
    assert not list(tmp_path.iterdir())  # no file is made for it, and its descriptor dies with the process


def test_where_there_are_no_locks_nobody_is_kept_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unsupported(_descriptor: int, *, blocking: bool) -> bool:
        raise OSError(errno.ENOTSUP, "Operation not supported")

    monkeypatch.setattr(locks, "lock_descriptor", unsupported)
    with locked(tmp_path, refusal="no"), locked(tmp_path, refusal="no"):
        pass
