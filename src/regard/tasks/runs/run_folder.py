"""The folder of a training run: it holds all that is needed to use the model, to look at it, and to train further.

config.json       the task, its settings, and the versions of Python and of the libraries
run.toml          the task and the settings again, to be edited and passed to `regard train --config`
prepared.json     counts of the data, fingerprints of the tokenizers, checksums; written once all are ready
tokenizer.json    or source_tokenizer.json and target_tokenizer.json
data/             the tokenised text
best/  last/      checkpoints
kept/             models of the latest validations, if some are to be kept
trained/          the best model by training, if `regard choose` put another in its place
metrics.jsonl     train.log     tensorboard/
.new/             while a run is being replaced: the new run, until its data have been read
"""

import platform
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

from regard.errors import RunFolderError
from regard.storage.atomic import is_temporary
from regard.storage.sealed import read_sealed, write_sealed
from regard.tasks.runs.serialisation import from_plain, to_plain
from regard.tasks.runs.toml import write_toml
from regard.training.checkpoints import KEPT, Checkpoints

T = TypeVar("T")
FORMAT = 2
"""The version of the format of config.json."""
REPLACEMENT = ".new"
"""The folder in which a run is prepared that is to replace this one."""
CONTENTS = (
    "config.json",
    "run.toml",
    "prepared.json",
    "tokenizer.json",
    "source_tokenizer.json",
    "target_tokenizer.json",
    "metrics.jsonl",
    "train.log",
    "data",
    "best",
    "last",
    "kept",
    "trained",
    "tensorboard",
    REPLACEMENT,
)
"""All files and folders of a run."""
PACKAGES = ("regard", "torch", "numpy", "tokenizers", "safetensors", "lightning-fabric")
"""The packages whose versions config.json records."""


class RunFolder:
    """The paths in a run folder, and its configuration."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.config_file = path / "config.json"
        self.prepared_file = path / "prepared.json"
        self.metrics_file = path / "metrics.jsonl"
        self.log_file = path / "train.log"
        self.tensorboard = path / "tensorboard"
        self.data = path / "data"
        self.checkpoints = Checkpoints(path)

    def holds_a_run(self) -> bool:
        """Whether training has begun here."""
        return self.config_file.is_file()

    def begin(self, task: str, config: Any) -> None:
        """Make the folder and write the configuration; files that do not belong to a run are never touched.

        Raises:
            RunFolderError: the folder holds a run already, or files that are not a run's.
            OSError: the folder cannot be made or written to.
        """
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; name a folder for the run")
        if self.holds_a_run():
            raise RunFolderError(
                f"{self.path} already holds a run: go on with it (--resume), replace it (--overwrite), "
                "or name another folder (--out)"
            )
        if self.path.exists() and not all(map(is_temporary, self.path.iterdir())):
            raise RunFolderError(f"{self.path} is not empty and holds no run; name another folder (--out)")
        self.sweep()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(task, config)

    @contextmanager
    def replacement(self) -> Iterator["RunFolder"]:
        """A folder for a new run, which takes the place of this one when the block ends, and is deleted if it fails.

        Whenever the process dies, the run that is then in the folder can be resumed or replaced.
        """
        beside = RunFolder(self.path / REPLACEMENT)
        shutil.rmtree(beside.path, ignore_errors=True)
        try:
            yield beside
            self._clear(*(name for name in CONTENTS if name not in (self.config_file.name, REPLACEMENT)))
            # As when a run begins, config.json comes first and prepared.json, which says that all is ready, last.
            order = (self.config_file.name, *(name for name in CONTENTS if name != self.prepared_file.name))
            for name in dict.fromkeys([*order, self.prepared_file.name]):
                if (beside.path / name).exists():
                    (beside.path / name).replace(self.path / name)
        finally:
            shutil.rmtree(beside.path, ignore_errors=True)

    def sweep(self) -> None:
        """Remove what a killed process left half done: temporary files as large as the text, incomplete models."""
        shutil.rmtree(self.path / REPLACEMENT, ignore_errors=True)
        for folder in (self.path, self.data, self.path / "best", self.path / "last", *self._kept()):
            for path in folder.glob("*.tmp") if folder.is_dir() else ():
                if is_temporary(path):
                    path.unlink(missing_ok=True)
        for folder in self._kept():
            if not (folder / "checkpoint.json").exists():
                shutil.rmtree(folder)
        self.checkpoints.sweep()

    def discard(self) -> None:
        """Undo `begin`: remove the files of the run, and the folder if nothing else is in it."""
        self._clear()
        if not any(self.path.iterdir()):
            self.path.rmdir()

    def write_config(self, task: str, config: Any) -> None:
        """Write the configuration, and the versions of Python and of the libraries.

        Raises:
            OSError: it cannot be written.
        """
        versions = {"python": platform.python_version()} | {name: _version(name) for name in PACKAGES}
        record = {"format": FORMAT, "task": task, "config": to_plain(config), "versions": versions}
        # config.json comes first, as it makes the folder a run: if the process dies, --resume can write the rest.
        write_sealed(self.config_file, record)
        write_toml(self.path / "run.toml", task, config)

    def read_config(self, task: str, cls: type[T]) -> T:
        """The configuration of the run.

        Raises:
            RunFolderError: there is no run here, it is of another task, or this version cannot read its settings.
        """
        record = self._read_record()
        if record.get("format") != FORMAT or record.get("task") != task or "config" not in record:
            raise RunFolderError(
                f"{self.config_file} is not the configuration of a {task} run that this version reads: "
                f"expected format {FORMAT}, got task {record.get('task')!r}, format {record.get('format')!r}"
            )
        return from_plain(cls, record["config"], source=self.config_file)

    def task(self) -> str:
        """The task of the run.

        Raises:
            RunFolderError: there is no run here.
        """
        return str(self._read_record().get("task"))

    def _read_record(self) -> dict[str, Any]:
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; expected one that `regard train --out` made")
        if not self.holds_a_run():
            raise RunFolderError(f"{self.path} is not a run folder: it has no config.json; `regard train` makes one")
        return read_sealed(self.config_file)

    def _kept(self) -> list[Path]:
        """The folders of kept models."""
        return [path for path in self.path.glob(f"{KEPT}/step-*") if path.is_dir()]

    def _clear(self, *names: str) -> None:
        """Remove the files of a run, or those of `names`, and nothing else."""
        for path in (self.path / name for name in names or CONTENTS):
            if path.is_dir() and not path.is_symlink():
                shutil.rmtree(path)
            else:
                path.unlink(missing_ok=True)


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
