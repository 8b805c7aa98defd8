"""The atlas: one HTML page over a folder of statistics, or over two side by side; and its table as CSV."""

import csv
import html
import io
import json
import zlib
from base64 import b64encode
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from regard.corpus.comparing import LEVEL, Changes, changes
from regard.corpus.measured_folder import MeasuredFolder
from regard.errors import TooLargeError
from regard.files.atomic import file_errors, write_atomically
from regard.views.html.arrays import as_text
from regard.views.html.page import document_of, one_module, page_colours, resource

MEGABYTE = 1e6
USED = ("page_codec.js", "page_numbers.js", "page_scale.js", "page_dom.js")
"""The parts of the page of a model that the atlas has too."""
PARTS = ("atlas_numbers.js", "atlas_table.js", "atlas_head.js", "atlas.js")
EXAMPLE = ("value", "id", "query", "at_query", "start", "tokens", "keys", "key_tokens", "weights")
COLUMNS = ("layer", "head", "statistic", "count", "mean", "deviation")
COMPARED = ("other_count", "other_mean", "other_deviation", "difference", "low", "high", "changed")


@dataclass(frozen=True, eq=False)
class Atlas:
    """The statistics of every head over one corpus or two, as a page and as CSV."""

    before: MeasuredFolder
    after: MeasuredFolder | None = None
    changes: Changes | None = None

    @property
    def folders(self) -> list[MeasuredFolder]:
        """One or two."""
        return [self.before] if self.after is None else [self.before, self.after]

    def csv(self) -> str:
        """The table: a line for each head and statistic, with the differences where there are two folders."""
        written = io.StringIO()
        lines = csv.writer(written)
        lines.writerow([*COLUMNS, *(COMPARED if self.changes else ())])
        for h, (layer, head) in enumerate(self.before.heads):
            for name in self._statistics():
                cells: list[Any] = [layer, head, name]
                for one in self.folders:
                    at = h, one.statistics.index(name)
                    cells += [int(one.count[at]), *(_text(numbers[at]) for numbers in (one.mean, one.deviation))]
                if self.changes is not None:
                    at = h, self.changes.statistics.index(name)
                    found = (self.changes.difference, self.changes.low, self.changes.high)
                    cells += [*(_text(one[at]) for one in found), int(self.changes.changed[at])]
                lines.writerow(cells)
        return written.getvalue()

    def page(self, *, budget_mb: float = 12.0) -> str:
        """The page: one document that loads nothing.

        Args:
            budget_mb: the most millions of bytes. The examples are spent last: the strongest of each head first.

        Raises:
            TooLargeError: the table alone takes more.
            DataError: a file of examples is damaged.
        """
        from regard.corpus.examples import STRONGEST

        folders = self.folders
        names = _short_names([one.path for one in folders])
        title = f"{names[0]}: every head over the corpus" if self.after is None else f"{names[0]} and {names[1]}"
        about: dict[str, Any] = {
            "title": title,
            "names": names,
            "about": [one.about() for one in folders],
            "level": LEVEL,
            "strongest": STRONGEST,
            "unlike": "" if self.changes is None else self.changes.unlike,
            "colours": page_colours(),
            "table": _packed(self._table()),
        }
        parts = {
            "title": html.escape(title),
            "style": "\n".join(resource(name) for name in ("page.css", "atlas.css")),
            "script": one_module(resource(name) for name in (*USED, *PARTS)),
            "render": "atlas",
        }
        most = max(int(one.settings["examples"]) for one in folders)
        tables = [one.examples() for one in folders]
        for kept in range(most, -1, -1):
            note = f"The page has the {kept} strongest of {most} examples of each head." if kept < most else ""
            data = {**about, "note": note, "examples": [_examples(table, self._statistics(), kept) for table in tables]}
            text = document_of({**parts, "data": as_text(data)})
            if (size := len(text.encode())) <= budget_mb * MEGABYTE:
                return text
        raise TooLargeError(
            f"the table of {len(self.before.heads):,} heads takes {size / MEGABYTE:.2f} MB of {budget_mb:.2f}: measure "
            "fewer --layers, --heads or --statistics"
        )

    def save(self, path: str | PathLike[str]) -> Path:
        """Write the page to a file, all of it or nothing.

        Raises:
            FileError: the file cannot be written; an older one stays as it was.
        """
        return _written(path, self.page())

    def save_csv(self, path: str | PathLike[str]) -> Path:
        """Write the table to a file, likewise.

        Raises:
            FileError: the file cannot be written.
        """
        return _written(path, self.csv())

    def _statistics(self) -> list[str]:
        return self.before.statistics if self.changes is None else self.changes.statistics

    def _table(self) -> dict[str, Any]:
        from regard.corpus.tables import EDGES

        names = self._statistics()
        return {
            "heads": self.before.heads,
            "statistics": names,
            "edges": _numbers(EDGES),
            "of": [_totals(one, names) for one in self.folders],
            "changes": None
            if self.changes is None
            else {
                **{name: _numbers(getattr(self.changes, name)) for name in ("difference", "low", "high")},
                "changed": self.changes.changed.tolist(),
            },
        }


def atlas(stats: str | PathLike[str], other: str | PathLike[str] | None = None) -> Atlas:
    """Look at the statistics of every head over a corpus: `save` writes a page, `csv` has the table.

    The page has a table of heads, sorted and filtered by a statistic; for each head the distribution over documents and
    the strongest examples as text, with the attended tokens coloured. Two folders stand side by side, with the
    differences that hold: see `compare_statistics`.

    Args:
        stats: a folder that `regard measure` made.
        other: another: of a second checkpoint, or of a second corpus.

    Raises:
        ArgumentError: a folder holds no finished statistics, or the two cannot be compared.
        DataError: a file is damaged.
        MissingExtraError: pyarrow is not installed.
    """
    before = MeasuredFolder.read(stats)
    if other is None:
        return Atlas(before)
    after = MeasuredFolder.read(other)
    return Atlas(before, after, changes(before, after))


def _written(path: str | PathLike[str], text: str) -> Path:
    with file_errors(path):
        write_atomically(path, text)
    return Path(path)


def _short_names(paths: list[Path]) -> list[str]:
    """The last parts of paths by which they differ.

    >>> _short_names([Path("runs/a/stats"), Path("runs/b/stats")])
    ['a/stats', 'b/stats']
    """
    whole = [path.resolve().parts for path in paths]
    for count in range(1, max(map(len, whole)) + 1):
        names = ["/".join(one[-count:]) for one in whole]
        if len(set(names)) == len(names):
            break
    return names


def _totals(folder: MeasuredFolder, names: list[str]) -> dict[str, Any]:
    at = [folder.statistics.index(name) for name in names]
    return {
        "count": folder.count[:, at].tolist(),
        "mean": _numbers(folder.mean[:, at]),
        "deviation": _numbers(folder.deviation[:, at]),
        "histogram": folder.histogram[:, at].tolist(),
    }


def _examples(table: Any, names: list[str], kept: int) -> dict[int, str]:
    """The examples of each layer by "head statistic", packed: the page unpacks a layer when it is read."""
    by_layer: dict[int, dict[str, list[list[Any]]]] = {}
    for one in table.to_pylist() if kept else ():
        if one["rank"] < kept and one["statistic"] in names:
            of_heads = by_layer.setdefault(one["layer"], {})
            cells = [_numbers(one[name]) if name in ("value", "at_query", "weights") else one[name] for name in EXAMPLE]
            of_heads.setdefault(f"{one['head']} {one['statistic']}", []).append(cells)
    return {layer: _packed(of_heads) for layer, of_heads in by_layer.items()}


def _packed(value: Any) -> str:
    return b64encode(zlib.compress(json.dumps(value, separators=(",", ":")).encode(), 6)).decode()


def _numbers(values: Any) -> Any:
    """Numbers with nine digits, which tell every float32 from the next; null for one that is none."""
    if isinstance(values, np.ndarray | list):
        return [_numbers(one) for one in values]
    return float(f"{values:.9g}") if np.isfinite(values) else None


def _text(value: Any) -> str:
    return f"{value:.9g}" if np.isfinite(value) else ""
