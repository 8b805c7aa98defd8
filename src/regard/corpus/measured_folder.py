"""A finished folder of statistics, as it is read: totals of every head, examples, rows."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from regard.corpus.settings import SUCCESS, extra_package, holds_statistics, settings_of
from regard.errors import ArgumentError, DataError, require
from regard.files.atomic import read_checksummed

BATCH_ROWS = 2**16


@dataclass(frozen=True, eq=False, slots=True)
class MeasuredFolder:
    path: Path
    settings: dict[str, Any]
    heads: list[tuple[int, int]]
    """Layers and heads, in order."""
    statistics: list[str]
    count: Any
    """(H, S): the documents that have the number."""
    mean: Any
    """(H, S); NaN without a document."""
    deviation: Any
    """(H, S): standard deviations over documents, with n - 1; NaN for less than two."""
    histogram: Any
    """(H, S, bins): see `regard.corpus.tables`."""

    @classmethod
    def read(cls, path: str | PathLike[str]) -> "MeasuredFolder":
        require(path, (str, PathLike), "path", "the path of a folder")
        extra_package("pyarrow", extra="measure")
        from pyarrow import parquet

        from regard.corpus.tables import BINS

        folder = Path(path)
        if not folder.is_dir():
            raise ArgumentError(f"{folder} is not a folder: name one that `regard measure` has made")
        if not holds_statistics(folder):
            raise ArgumentError(f"{folder} holds no statistics: name a folder that `regard measure` has made")
        if not (folder / SUCCESS).exists():
            raise ArgumentError(f"{folder} is not finished: go on with `regard measure ... --resume`")
        settings = settings_of(folder)
        with _read_whole(folder):
            table = parquet.read_table(folder / "totals")
            rows = list(zip(*(table.column(name).to_pylist() for name in ("layer", "head", "statistic")), strict=True))
            heads = sorted({row[:2] for row in rows})
            known = {name for *_, name in rows}
            statistics = [name for name in settings["statistics"] if name in known]
            at = tuple(
                np.array([(heads.index(row[:2]), statistics.index(row[2])) for row in rows], int).reshape(-1, 2).T
            )
            shape = (len(heads), len(statistics))
            count, histogram = np.zeros(shape, np.int64), np.zeros((*shape, BINS), np.int64)
            sums = np.zeros((2, *shape))
            count[at] = table.column("count").to_numpy()
            histogram[at] = np.array(table.column("histogram").to_pylist(), np.int64).reshape(-1, BINS)
            for one, name in zip(sums, ("sum", "sum_of_squares"), strict=True):
                one[at] = table.column(name).to_numpy()
        if not heads:
            raise DataError(f"{folder} has no measured document: `SELECT error` from its heads/ says why")
        with np.errstate(invalid="ignore", divide="ignore"):
            mean = sums[0] / count
            variance = np.maximum(sums[1] - sums[0] * mean, 0) / np.maximum(count - 1, 0)
        return cls(folder, settings, heads, statistics, count, mean, np.sqrt(variance), histogram)

    def about(self) -> str:
        done = [read_checksummed(path) for path in sorted((self.path / "_done").glob("*.json"))]
        documents, tokens, errors = (sum(one[name] for one in done) for name in ("documents", "tokens", "errors"))
        failed = f"; {errors:,} of the documents could not be measured" if errors else ""
        return f"{documents:,} documents, {tokens:,} tokens{failed}"

    def examples(self) -> Any:
        from pyarrow import parquet

        with _read_whole(self.path):
            return parquet.read_table(self.path / "examples")

    def rows(self, statistics: list[str]) -> Iterator[Any]:
        from pyarrow import parquet

        columns = ["id", "layer", "head", *statistics]
        for path in sorted((self.path / "heads").glob("*.parquet")):
            with _read_whole(self.path), parquet.ParquetFile(path) as file:
                for batch in file.iter_batches(BATCH_ROWS, columns=columns):
                    yield batch.filter(batch.column("layer").is_valid())


@contextmanager
def _read_whole(folder: Path) -> Iterator[None]:
    try:
        yield
    except (extra_package("pyarrow", extra="measure").ArrowException, OSError, ValueError, KeyError) as error:
        raise DataError(f"{folder} cannot be read ({error!s:.200}): measure again into another folder") from error
