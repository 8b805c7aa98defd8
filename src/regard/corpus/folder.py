"""The folder of statistics, written shard by shard. After any interruption the work can go on.

run.toml            the settings, and hashes and versions of all that decides the bits
heads/              part-NNNNN.parquet: the statistics of every head on every document, a part for each shard
totals/             part-00000.parquet: counts, sums and histograms for each head and statistic
examples/           part-00000.parquet: the documents in which each head is strongest
_parts/             while the work is not finished: the totals and examples of each shard
_done/              NNNNN.json: a shard is finished; written last, with its rows, its errors and a checksum
_SUCCESS            all is finished
"""

import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pyarrow import parquet

from regard.corpus.examples import Examples
from regard.corpus.measured_document import CorpusCounts
from regard.corpus.settings import FOLDERS, SETTINGS_FILE, SUCCESS, holds_statistics, refuse_out, settings_of
from regard.corpus.tables import merged_totals, write_parquet
from regard.errors import ArgumentError, DataError, RegardError, needs
from regard.files.atomic import (
    checksum_of_file,
    file_errors,
    read_checksummed,
    remove_empty,
    temporary_of,
    write_atomically,
    write_checksummed,
)
from regard.files.locks import locked

HEADER = "# The settings of `regard measure`, and all that decides the bits of its files.\n"
ADVICE = "wait for it, or name another folder (--out)"
MERGED = "part-00000.parquet"


class StatisticsFolder:
    def __init__(self, path: Path) -> None:
        self.path = path
        self.success = path / SUCCESS

    # -- beginning -----------------------------------------------------------------------------------------

    @contextmanager
    def open(self, settings: Mapping[str, Any], *, resume: bool) -> Iterator[None]:
        with file_errors(self.path):
            self.path.mkdir(parents=True, exist_ok=True)
        with locked(self.path, refusal=f"another process measures into {self.path}: {ADVICE}"):
            refuse_out(self.path, resume=resume)
            is_new = not holds_statistics(self.path)
            if not is_new:
                self._refuse_others(settings)
            else:
                with file_errors(self.path / SETTINGS_FILE):
                    (self.path / "_done").mkdir(exist_ok=True)
                    write_atomically(self.path / SETTINGS_FILE, HEADER + _toml(settings))
            with file_errors(self.path):
                for name in (".", *(FOLDERS[:3] if self.success.exists() else FOLDERS)):
                    (self.path / name).mkdir(exist_ok=True)
                    for left in (self.path / name).iterdir():
                        if temporary_of(left) is not None:  # a process was killed while it wrote it
                            left.unlink()
            try:
                yield
            except RegardError:
                if is_new:
                    self._discard()
                raise

    def _discard(self) -> None:
        if not any(one.is_file() for name in FOLDERS for one in (self.path / name).iterdir()):
            (self.path / SETTINGS_FILE).unlink()
            for name in (*FOLDERS, "."):
                remove_empty(self.path / name)

    def _refuse_others(self, settings: Mapping[str, Any]) -> None:
        before, now = _flat(settings_of(self.path)), _flat(settings)
        for name in sorted({*before, *now}):
            if before.get(name) != now.get(name):
                theirs, ours = (f"{one.get(name)!s:.80}" for one in (before, now))
                raise ArgumentError(
                    f"{self.path} was begun with {name} {theirs}, and this has {ours}: go on with the same, or name "
                    "another folder (--out)"
                )

    # -- shards --------------------------------------------------------------------------------------------

    def part(self, number: int) -> Path:
        return self.path / "heads" / f"part-{number:05d}.parquet"

    def beside(self, number: int, kind: str) -> Path:
        return self.path / "_parts" / f"{number:05d}.{kind}.parquet"

    def finish_shard(self, number: int, record: CorpusCounts) -> None:
        path = self.path / "_done" / f"{number:05d}.json"
        about: dict[str, Any] = {**record._asdict(), "heads": checksum_of_file(self.part(number))}
        with file_errors(path):
            write_checksummed(path, about)

    def done(self, number: int) -> CorpusCounts | None:
        path = self.path / "_done" / f"{number:05d}.json"
        if not path.exists():
            return None
        about = read_checksummed(path)
        return CorpusCounts(*(about[name] for name in CorpusCounts._fields))

    # -- the end -------------------------------------------------------------------------------------------

    def merge(self, shards: int, *, statistics: Mapping[str, Any], most: int) -> None:
        if not self.success.exists():
            write_parquet(self.path / "totals" / MERGED, merged_totals(self._beside(shards, "totals")), statistics)
            examples = Examples(most)
            for table in self._beside(shards, "examples"):
                examples.merge(table)
            write_parquet(self.path / "examples" / MERGED, examples.table(), statistics)
            with file_errors(self.success):
                write_atomically(self.success, "")
        # A process may have been killed just before.
        shutil.rmtree(self.path / "_parts", ignore_errors=True)

    def _beside(self, shards: int, kind: str) -> Iterator[Any]:
        for number in range(shards):
            path = self.beside(number, kind)
            try:
                yield parquet.read_table(path)
            except Exception as error:
                raise DataError(f"{path} cannot be read ({error!s:.200}): measure again into another folder") from None


def _toml(settings: Mapping[str, Any]) -> str:
    with needs("tomli-w", extra="train"):
        import tomli_w
    return tomli_w.dumps(settings)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """The values of nested settings under the names of their places.

    >>> _flat({"model": {"weights": "a"}, "files": [{"bytes": 1}]})
    {'model.weights': 'a', 'files.0.bytes': 1}
    """
    inner = value.items() if isinstance(value, Mapping) else enumerate(value) if isinstance(value, list) else None
    if inner is None:
        return {name: value}
    return {k: v for key, one in inner for k, v in _flat(one, f"{name}.{key}" if name else str(key)).items()}
