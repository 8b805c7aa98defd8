"""The settings of `Measure` and of a corpus: names and numbers, read without torch."""

import sys
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from difflib import get_close_matches
from importlib import import_module
from os import PathLike, fspath
from pathlib import Path
from threading import RLock
from typing import Any, Literal, get_args

from regard.errors import ArgumentError, DataError, RunFolderError, needs
from regard.files.atomic import refuse_links, temporary_of
from regard.files.model_folder import check_texts, is_huggingface
from regard.files.untrusted import parse_toml
from regard.tasks.registry import task_of

SETTINGS_FILE, SUCCESS = "run.toml", "_SUCCESS"
FOLDERS = ("heads", "totals", "examples", "_parts", "_done")


def refuse_out(path: Path, *, resume: bool) -> None:
    if path.exists() and not path.is_dir():
        raise RunFolderError(f"{path} is a file; name a folder (--out)")
    if holds_statistics(path):
        refuse_links(*(path / name for name in (*FOLDERS, SETTINGS_FILE, SUCCESS)))
        if not resume:
            raise ArgumentError(
                f"{path} already holds statistics: go on with them (--resume), or name another folder (--out)"
            )
    elif path.is_dir() and any(temporary_of(one) is None and not _is_first_step(one) for one in path.iterdir()):
        raise ArgumentError(f"{path} is not empty and holds no statistics; name another folder (--out)")


def holds_statistics(path: Path) -> bool:
    return (path / SETTINGS_FILE).is_file() and (path / "_done").is_dir()


def settings_of(path: Path) -> dict[str, Any]:
    try:
        return parse_toml((path / SETTINGS_FILE).read_bytes())
    except DataError as error:
        said = f"{path / SETTINGS_FILE} is {error}; copy it again, or measure into another folder (--out)"
        raise RunFolderError(said) from None


def _is_first_step(path: Path) -> bool:
    return path.name == "_done" and path.is_dir() and not path.is_symlink() and not any(path.iterdir())


MEANS = ("entropy", "distance", "self", "previous", "first", "induction", "duplicate", "top_weight")
"""The statistics that are means over queries, as in `regard.watching.head_table`."""
OF_KEYS = ("received", "top_keys")
"""Those of the attention that each key receives."""
NAMED_STATISTICS = (*MEANS, *OF_KEYS)
USUAL_STATISTICS = ("entropy", "distance", "first", "previous", "induction")

ONE_AT_A_TIME = RLock()
"""Held while a model is loaded or used: the threads of an engine share models, and torch's own threads."""
CorpusEngine = Literal["processes", "ray"]
"""The engine that shares out the shards."""
Own = Callable[[Any, Any], Any]
"""(weights, tokens) -> a number for each head (H,), or for each query (H, T), whose mean is taken."""


# Without slots: Ray derives a class from a callable's, and gives its objects an attribute.
@dataclass(frozen=True)
class MeasureSettings:
    """The settings of `Measure`, which has their meanings."""

    model: str | PathLike[str]
    statistics: Sequence[str] = USUAL_STATISTICS
    _: KW_ONLY
    text: str = "text"
    id: str = "id"
    layers: Sequence[int] = ()
    heads: Sequence[int] = ()
    max_tokens: int | None = None
    keys: int = 8
    threads: int = 1
    device: str = "auto"

    def __post_init__(self) -> None:
        object.__setattr__(self, "model", fspath(self.model))
        for name in ("statistics", "layers", "heads"):
            given = getattr(self, name)
            object.__setattr__(self, name, (given,) if isinstance(given, str | int) else tuple(given))
        if not self.statistics or len(set(self.statistics)) < len(self.statistics):
            raise ArgumentError(f"statistics must be one or more, each once; got {list(self.statistics)}")
        for name in self.statistics:
            if name not in NAMED_STATISTICS and not all(name.partition(":")):
                meant = get_close_matches(name, NAMED_STATISTICS, n=1)
                raise ArgumentError(
                    "statistics: expected names that `regard measure --help` lists, or module:function; "
                    f"got {name!r}{f', perhaps {meant[0]}' if meant else ''}"
                )
        for name, least in (("max_tokens", 2), ("keys", 1), ("threads", 1)):
            _refuse_below(name, getattr(self, name), least)

    @property
    def numbers(self) -> list[str]:
        """The statistics that are a number for each head."""
        return [name for name in self.statistics if name != "top_keys"]


@dataclass(frozen=True, slots=True)
class CorpusJob:
    measure: MeasureSettings
    data: tuple[str, ...]
    out: Path
    resume: bool = False
    workers: int | None = None
    shard_documents: int = 500
    examples: int = 5
    max_errors: int | None = None
    engine: CorpusEngine = "processes"

    def __post_init__(self) -> None:
        for name, least in (("shard_documents", 1), ("examples", 1), ("max_errors", 0), ("workers", 1)):
            _refuse_below(name, getattr(self, name), least)
        if self.engine not in get_args(CorpusEngine):
            raise ArgumentError(f"engine must be one of {', '.join(get_args(CorpusEngine))}; got {self.engine!r}")
        for name in self.measure.statistics:
            if name.startswith("__main__:"):
                raise ArgumentError(f"statistics: no other process has {name}: put the function into a file of its own")

    def check(self) -> None:
        model = Path(self.measure.model)
        if not is_huggingface(model):
            task_of(model)
        else:
            check_texts(model, "save the one that it was trained with beside its weights (save_pretrained)")
        extra_package("pyarrow", extra="measure")
        if self.engine == "ray":
            extra_package("ray", extra="ray")
        from regard.corpus.documents import input_files

        input_files(self.data)
        refuse_out(self.out, resume=self.resume)


def _refuse_below(name: str, value: int | None, least: int) -> None:
    if value is not None and value < least:
        raise ArgumentError(f"{name} must be at least {least}, got {value}")


def named_function(words: str) -> Any:
    """The function of "module:function", imported as by Python, from the working directory too."""
    name, _, function = words.partition(":")
    if str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    return getattr(import_module(name), function)


def extra_package(name: str, *, extra: str) -> Any:
    with needs(name, extra=extra):
        return import_module(name)
