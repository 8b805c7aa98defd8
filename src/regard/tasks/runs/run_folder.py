"""The folder of a training run: it holds everything to use the model, to look at it, and to train further.

config.json       the task, its settings, and the versions of Python and of the libraries
run.toml          the task and the settings again, to be edited and passed to `regard train --config`
prepared.json     counts of the data, fingerprints of the tokenizers, checksums; written once all are ready
tokenizer.json    or source_tokenizer.json and target_tokenizer.json
data/             the tokenised text
best/  last/      checkpoints
kept/             models of the latest validations, if some are to be kept
trained/          the best model by training, if `regard choose` put another in its place
ctranslate2/      the best model as CTranslate2 reads it, once it has searched for the run
metrics.jsonl     train.log     tensorboard/
.new/             while a run is being replaced: the new run, until its data have been read
"""

import platform
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.errors import RegardError, RunFolderError
from regard.files.atomic import is_temporary, temporary_of
from regard.files.own_files import refuse_links_in, remove_empty
from regard.files.sealed import read_sealed, write_sealed
from regard.tasks.runs.serialisation import from_plain, read_toml, to_plain, write_toml
from regard.tasks.training.checkpoint_names import KEPT, TRAINED
from regard.version import installed_version

if TYPE_CHECKING:
    from regard.tasks.training.checkpoints import Checkpoints

T = TypeVar("T")
FORMAT = 3
REPLACEMENT = ".new"
"""The folder for the preparation of a run, or an export, in place of this one."""
ENGINE = "ctranslate2"
"""The folder of the run's own export."""
ENGINE_FILES = (
    *("engine.json", "model.bin", "config.json"),
    *("shared_vocabulary.json", "source_vocabulary.json", "target_vocabulary.json"),
    *("tokenizer.json", "target_tokenizer.json", "tokenizer_config.json"),
)
"""All files of the export. The first names the others with their checksums, and is written last."""
FILES = (
    *("config.json", "run.toml", "tokenizer.json", "source_tokenizer.json", "target_tokenizer.json"),
    *("metrics.jsonl", "train.log", "prepared.json"),
)
"""All files of a run, in the order in which a new run gets them: the first makes it a run, the last makes it ready."""
FOLDERS: dict[str, tuple[str, ...]] = {
    "data": ("train.tokens", "valid.tokens", "valid.jsonl"),
    "tensorboard": ("events.out.tfevents.*",),
    "best": (),
    "last": (),
    TRAINED: (),
    KEPT: (),
    ENGINE: tuple(ENGINE_FILES),
    REPLACEMENT: (),
}
"""All folders of a run, with the patterns of the files a run has in them; `Checkpoints` knows its own."""
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

    @cached_property
    def checkpoints(self) -> "Checkpoints":
        """The models of the run; only they need torch."""
        from regard.tasks.training.checkpoints import Checkpoints

        return Checkpoints(self.path)

    def holds_a_run(self) -> bool:
        return self.config_file.is_file()

    def begin(self, task: str, config: Any) -> None:
        """Make the folder and write the configuration; other files are never touched."""
        self.refuse_taken()
        self.sweep()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(task, config)

    def refuse_taken(self) -> None:
        """Check that a new run can have this folder."""
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; name a folder for the run")
        if self.holds_a_run():
            raise RunFolderError(
                f"{self.path} already holds a run: go on with it (--resume), replace it (--overwrite), "
                "or name another folder (--out)"
            )
        if self.path.exists() and not all(map(is_temporary, self.path.iterdir())):
            raise RunFolderError(f"{self.path} is not empty and holds no run; name another folder (--out)")

    @contextmanager
    def replacement(self) -> Iterator["RunFolder"]:
        """A folder for a new run, which takes the place of this one when the block ends, and is deleted if it fails.

        Whenever the process dies, the run in the folder can be resumed or replaced.
        """
        beside = RunFolder(self.path / REPLACEMENT)
        beside.discard()
        try:
            yield beside
            self._clear(*(name for name in FILES if name != self.config_file.name))
            first, *others, last = FILES
            for name in (first, *FOLDERS, *others, last):
                _move(beside.path / name, self.path / name)
        finally:
            beside.discard()

    def sweep(self) -> None:
        """Remove the remains of a killed process: temporary files as large as the text, incomplete models."""
        RunFolder(self.path / REPLACEMENT).discard()
        self._sweep_temporaries()
        self.checkpoints.sweep()

    def discard(self) -> None:
        """Undo `begin`: remove the files of the run, and the folder if nothing else is in it."""
        if self.path.is_dir() and not self.path.is_symlink():
            self._clear(*FILES)
            self._sweep_temporaries()
            remove_empty(self.path)

    def refuse_strangers(self) -> None:
        """Check that everything with the name of a part of a run is ours, before anything is written or removed.

        The folder itself may be a link: it is where the user wants the run to be.
        """
        for name in (*FILES, *FOLDERS):
            path = self.path / name
            refuse_links_in(path)
            if path.exists() and path.is_dir() != (name in FOLDERS):
                found, wanted = ("folder", "file") if path.is_dir() else ("file", "folder")
                raise RunFolderError(f"{path} is a {found} where a run has a {wanted}: move it away")
        self.checkpoints.refuse_strangers()

    def write_config(self, task: str, config: Any) -> None:
        """Write the configuration, and the versions of Python and of the libraries."""
        record = {"format": FORMAT, "task": task, "config": to_plain(config), "versions": versions_of(PACKAGES)}
        # config.json comes first, as it makes the folder a run: if the process dies, --resume can write the rest.
        write_sealed(self.config_file, record)
        write_toml(self.path / "run.toml", task, config)

    def read_config(self, task: str, cls: type[T]) -> T:
        record = self._read_record()
        if record.get("format") == FORMAT and record.get("task") != task and "config" in record:
            raise RunFolderError(f"{self.path} holds a run of {record.get('task')}, and this needs one of {task}")
        if record.get("format") != FORMAT or "config" not in record:
            raise RunFolderError(
                f"{self.config_file} is not the configuration of a {task} run that this version reads: "
                f"expected format {FORMAT}, got task {record.get('task')!r}, format {record.get('format')!r}"
            )
        self._check_copy(cls)
        return from_plain(cls, record["config"], source=self.config_file)

    def _check_copy(self, cls: type[T]) -> None:
        """Refuse a run.toml that `regard train --config` would refuse, such as one that lost its end."""
        copy = self.path / "run.toml"
        if not copy.exists():
            return
        try:
            from_plain(cls, read_toml(copy)[1], source=copy)
        except RegardError as error:
            raise RunFolderError(f"{error}; mend it, or remove it: a run is used with its config.json") from None

    def task(self) -> str:
        return str(self._read_record().get("task"))

    def _read_record(self) -> dict[str, Any]:
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; expected one that `regard train --out` made")
        if not self.holds_a_run():
            raise RunFolderError(f"{self.path} is not a run folder: it has no config.json; `regard train` makes one")
        return read_sealed(self.config_file)

    def _clear(self, *files: str) -> None:
        """Remove these files of a run, and everything in its folders; other files stay."""
        for name in files:
            (self.path / name).unlink(missing_ok=True)
        self.checkpoints.remove_all()
        shutil.rmtree(self.path / ENGINE / REPLACEMENT, ignore_errors=True)  # it refuses a link
        for name, patterns in FOLDERS.items():
            folder = self.path / name
            if name != REPLACEMENT and folder.is_dir() and not folder.is_symlink():
                for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                    path.unlink()
                remove_empty(folder)

    def _sweep_temporaries(self) -> None:
        for folder, written in {self.path: FILES, self.data: FOLDERS["data"]}.items():
            for path in folder.iterdir() if folder.is_dir() else ():
                if temporary_of(path) in written:
                    path.unlink(missing_ok=True)
        remove_empty(self.data)


def _move(source: Path, target: Path) -> None:
    """Move a file or a folder, if it is there. A folder's files join those in the target."""
    if not source.is_dir():
        if source.exists():
            source.replace(target)
        return
    target.mkdir(exist_ok=True)
    for path in source.iterdir():
        _move(path, target / path.name)
    source.rmdir()


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    """The versions of Python and of packages, None for those that are not installed."""
    return {"python": platform.python_version()} | {name: installed_version(name) for name in packages}
