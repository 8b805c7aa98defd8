"""The folder of a training run: it holds everything to use the model, to look at it, and to train further.

run.toml          the task and the settings; a folder with this file is a run of regard's, and no other folder is
config.json       the same, with a checksum, and the versions of Python and of the libraries
prepared.json     counts of the data, fingerprints of the tokenizers, checksums; written once all are ready
tokenizer.json    or source_tokenizer.json and target_tokenizer.json
data/             the tokenised text
last.safetensors  best.safetensors  checkpoints
ctranslate2/      the best model as CTranslate2 reads it, once it has searched for the run
metrics.jsonl     train.log     tensorboard/
.new/             while a run is being replaced: the new run, until its data have been read
"""

import platform
import reprlib
import shutil
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from regard.errors import RegardError, RunFolderError
from regard.files.atomic import (
    checksum_of_file,
    is_file_below,
    read_checksummed,
    refuse_links,
    remove_empty,
    temporary_of,
    write_checksummed,
)
from regard.tasks.runs.serialisation import from_plain, read_toml, to_plain, write_toml
from regard.tasks.text.tokenizers import Tokenizer
from regard.version import installed_version

if TYPE_CHECKING:
    from regard.tasks.training.checkpoints import Checkpoints

T = TypeVar("T")
FORMAT = 4
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
    *("run.toml", "config.json", "last.safetensors", "best.safetensors"),
    *("tokenizer.json", "source_tokenizer.json", "target_tokenizer.json", "metrics.jsonl", "train.log"),
    "prepared.json",
)
"""All files of a run. A new run gets the first two at once, and the last when it is ready."""
STORES = ("data/train", "data/valid")
"""The folders of tokens."""
FOLDERS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(STORES, ("tokens.npy", "starts.npy", "about.json")),
    "data": ("valid.jsonl",),
    "tensorboard": ("events.out.tfevents.*",),
    ENGINE: ENGINE_FILES,
    REPLACEMENT: (),
}
"""All folders of a run, with the patterns of the files a run has in them."""
PACKAGES = ("regard", "torch", "numpy", "tokenizers", "safetensors", "lightning-fabric")
"""The packages whose versions config.json records."""


class RunFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.marker = path / "run.toml"
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

    def is_ours(self) -> bool:
        try:
            return self.marker.is_file() and read_toml(self.marker)[0] is not None
        except RegardError:
            return False

    def holds_a_run(self) -> bool:
        return self.is_ours() and self.config_file.is_file()

    def has_lost_its_marker(self) -> bool:
        """Whether a run.toml that names no task any more stands beside our own sealed settings."""
        try:
            return self.marker.is_file() and not self.is_ours() and "task" in self._read_record()
        except RegardError:
            return False

    def begin(self, task: str, config: Any) -> None:
        self.refuse_taken()
        self.sweep()
        self.path.mkdir(parents=True, exist_ok=True)
        self.write_config(task, config)

    def refuse_taken(self) -> None:
        if self.path.exists() and not self.path.is_dir():
            raise RunFolderError(f"{self.path} is a file; name a folder for the run")
        if self.holds_a_run():
            raise RunFolderError(
                f"{self.path} already holds a run: go on with it (--resume), replace it (--overwrite), "
                "or name another folder (--out)"
            )
        # A run that ended before it had a config.json has nothing to lose.
        if self.path.exists() and not self.is_ours() and not all(map(temporary_of, self.path.iterdir())):
            raise RunFolderError(
                f"{self.path} is not empty and holds no run (no run.toml of regard's): name another folder (--out)"
            )

    @contextmanager
    def replacement(self) -> Iterator["RunFolder"]:
        """A folder for a new run, which takes the place of this one when the block ends, and is deleted if it fails.

        Whenever the process dies, the run in the folder can be resumed or replaced.
        """
        beside = RunFolder(self.path / REPLACEMENT)
        beside.discard()
        try:
            yield beside
            settings, others = FILES[:2], FILES[2:]
            self._clear(*others)
            for name in (*settings, *FOLDERS, *others):
                _move(beside.path / name, self.path / name)
        finally:
            beside.discard()

    def sweep(self) -> None:
        """Remove the remains of a killed process: temporary files as large as the text or a checkpoint."""
        RunFolder(self.path / REPLACEMENT).discard()
        self._sweep_temporaries()

    def discard(self) -> None:
        if self.path.is_dir() and not self.path.is_symlink():
            self._clear(*FILES)
            self._sweep_temporaries()
            remove_empty(self.path)

    def refuse_odd_files(self) -> None:
        """Refuse a pipe, a device or a folder in the place of a file of a run: reading it might never end."""
        paths = [self.path / name for name in FILES]
        for folder, patterns in self._folders():
            if folder.exists() and not folder.is_dir():
                raise RunFolderError(f"{folder} is a file where a run has a folder: move it away")
            paths += [path for pattern in patterns for path in folder.glob(pattern)]
        for path in paths:
            if path.exists() and not path.is_file():
                raise RunFolderError(f"{path} is no regular file, and a run has one of that name: move it away")

    def refuse_links(self) -> None:
        """Refuse links behind which training would replace files or add to them. A link in the place of another file is
        itself replaced."""
        refuse_links(self.log_file, self.metrics_file, *(folder for folder, _ in self._folders()))

    def write_config(self, task: str, config: Any) -> None:
        record = {"format": FORMAT, "task": task, "config": to_plain(config), "versions": versions_of(PACKAGES)}
        write_toml(self.marker, task, config)  # first: if the process dies, the folder can be known for ours
        write_checksummed(self.config_file, record)

    def read_config(self, task: str, cls: type[T]) -> T:
        record = self._read_record()
        if not {"format", "task", "config"} <= set(record):
            raise RunFolderError(
                f"{self.config_file} is not the configuration of a {task} run: expected format {FORMAT}"
            )
        if record["format"] != FORMAT:
            raise RunFolderError(
                f"{self.path} holds a run of another version of regard, which this one can neither read nor go on with "
                f"(expected format {FORMAT}, got format {record['format']!r}): train it again, into another folder"
            )
        if record["task"] != task:
            raise RunFolderError(f"{self.path} holds a run of {record['task']}, and this needs one of {task}")
        self._check_copy(cls)
        return from_plain(cls, record["config"], source=self.config_file)

    def _check_copy(self, cls: type[T]) -> None:
        """Refuse a run.toml that `regard train --config` would refuse, such as one that lost its end."""
        if not self.marker.exists():
            return
        try:
            from_plain(cls, read_toml(self.marker)[1], source=self.marker)
        except RegardError as error:
            raise RunFolderError(f"{error}; mend it: config.json has the settings of the run") from None

    def task(self) -> str:
        return str(self._read_record().get("task"))

    def _read_record(self) -> dict[str, Any]:
        if not self.path.is_dir():
            raise RunFolderError(f"{self.path} is not a folder; expected one that `regard train --out` made")
        self.refuse_odd_files()
        if not self.config_file.exists():
            raise RunFolderError(f"{self.path} is not a run folder: it has no config.json; `regard train` makes one")
        return read_checksummed(self.config_file)

    def _clear(self, *files: str) -> None:
        for name in files:
            (self.path / name).unlink(missing_ok=True)
        shutil.rmtree(self.path / ENGINE / REPLACEMENT, ignore_errors=True)
        for folder, patterns in self._folders():
            for path in [path for pattern in patterns for path in folder.glob(pattern)]:
                path.unlink()
            if folder.name != REPLACEMENT:
                remove_empty(folder)

    def _sweep_temporaries(self) -> None:
        for folder, patterns in ((self.path, FILES), *self._folders()):
            for path in folder.iterdir() if folder.is_dir() else ():
                target = temporary_of(path)
                if target is not None and any(fnmatch(target, pattern) for pattern in patterns):
                    path.unlink(missing_ok=True)
        for name in (*STORES, "data"):
            remove_empty(self.path / name)

    def _folders(self) -> Iterator[tuple[Path, tuple[str, ...]]]:
        return ((self.path / name, patterns) for name, patterns in FOLDERS.items())


def _move(source: Path, target: Path) -> None:
    if not source.is_dir():
        if source.exists():
            source.replace(target)
        return
    target.mkdir(parents=True, exist_ok=True)
    for path in source.iterdir():
        _move(path, target / path.name)
    source.rmdir()


def versions_of(packages: Iterable[str]) -> dict[str, str | None]:
    return {"python": platform.python_version()} | {name: installed_version(name) for name in packages}


SUMS = {"bytes": int, "crc32": str}
"""The types of the values of `checksum_of_file`."""


def write_prepared(folder: RunFolder, record: Mapping[str, Any]) -> None:
    """Write prepared.json, which says that the text is ready: the tokenizers and all of data/ must be complete."""
    paths = [*folder.path.glob("*tokenizer.json"), *(path for path in folder.data.rglob("*") if path.is_file())]
    files = {path.relative_to(folder.path).as_posix(): checksum_of_file(path) for path in sorted(paths)}
    write_checksummed(folder.prepared_file, {**record, "files": files})


def read_prepared(folder: RunFolder) -> dict[str, Any]:
    prepared, path = read_checksummed(folder.prepared_file), folder.prepared_file
    files = prepared.get("files", {})
    if not isinstance(files, dict):
        raise RunFolderError(f"{path}: files must be an object, got {reprlib.repr(files)}; copy it again")
    for name, sums in files.items():
        # A name with a path out of the folder would have a stranger's file read, and its checksum told.
        if not is_file_below(name) or not isinstance(sums, dict) or {n: type(s) for n, s in sums.items()} != SUMS:
            raise RunFolderError(f"{path}: {name[:80]!r} has {reprlib.repr(sums)} as its checksum; copy it again")
    return prepared


def check_file(path: Path, folder: RunFolder, prepared: Mapping[str, Any]) -> None:
    expected: Mapping[str, Any] | None = prepared.get("files", {}).get(path.relative_to(folder.path).as_posix())
    if expected is None:
        return
    try:
        found = checksum_of_file(path)
    except OSError as error:
        raise RunFolderError(f"cannot read {path} ({error.strerror}), and the run needs it; copy it again") from None
    if found != expected:
        kind = "tokenizer" if path.name.endswith("tokenizer.json") else "tokenised text"
        raise RunFolderError(
            f"{path} is not the {kind} that {folder.path} was trained with: expected {_said(expected)}, "
            f"got {_said(found)}; it is another run's or damaged: copy it again"
        )


def load_tokenizer(folder: RunFolder, name: str = "tokenizer.json", key: str = "fingerprint") -> Tokenizer:
    prepared, path = read_prepared(folder), folder.path / name
    check_file(path, folder, prepared)
    tokenizer = Tokenizer.load(path)
    if tokenizer.fingerprint() != prepared.get(key):
        raise RunFolderError(f"{path} is not the tokenizer that {folder.path} was trained with")
    return tokenizer


def check_prepared(folder: RunFolder) -> None:
    """Check that all prepared files are still as they were; this reads every file once."""
    prepared = read_prepared(folder)
    for name in prepared.get("files", {}):
        check_file(folder.path / name, folder, prepared)


def _said(sums: Mapping[str, Any]) -> str:
    return f"{sums['bytes']} bytes of checksum {sums['crc32']}"
