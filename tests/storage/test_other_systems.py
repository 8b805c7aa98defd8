"""What only Linux or POSIX has is not needed: modules, functions and folders that can be opened."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from regard.errors import RunFolderError
from regard.storage import atomic, locks
from regard.storage.atomic import write_atomically
from regard.storage.locks import locked

# What Windows lacks is hidden before anything of ours is imported, but not from the standard library and from torch,
# which have other ways there. Then all of our modules are imported but for the two that are Triton's programs, and a
# model is trained and used.
WITHOUT = """
import importlib, os, pkgutil, signal, subprocess, sys
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
for found in pkgutil.walk_packages(regard.__path__, "regard."):
    if "." in found.name and not found.name.endswith(("__main__", ".worker", ".triton_rows", ".triton_additive")):
        importlib.import_module(found.name)
from regard.cli.main import run_command
from regard.training.reporting.memory import resident_bytes
assert resident_bytes() == 0
folder = Path(sys.argv[1])
(folder / "pairs.tsv").write_text("".join(f"{n} times {m}\\t{m} mal {n}\\n" for n in range(8) for m in range(8)))
tiny = "--transformer.dim 8 --transformer.num-heads 2 --transformer.feed-forward-dim 8 --tokenizer characters"
tiny += " --transformer.encoder-layers 1 --transformer.decoder-layers 1 --warmup-steps 1 --device cpu --pictures 0"
run = str(folder / "run")
where = ["--data", str(folder / "pairs.tsv"), "--out", run]
assert run_command(["train", *where, "--steps", "2", *tiny.split()]) == 0
assert run_command(["translate", run, "1 times 2", "--device", "cpu"]) == 0
"""


def test_nothing_that_only_posix_has_is_needed(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", WITHOUT, str(tmp_path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "the best model is in" in done.stderr


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
