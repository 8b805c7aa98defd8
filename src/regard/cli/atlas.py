"""`regard atlas`: the heads of a model over a corpus, to look at and to compare."""

import sys
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Annotated

import tyro

from regard.cli.loading import loading
from regard.cli.shared import Command, PositionalPath, refuse_first
from regard.corpus.settings import extra_package
from regard.errors import ArgumentError

Stats = Annotated[PositionalPath, tyro.conf.arg(help="a folder of statistics that `regard measure` has made.")]
Other = Annotated[
    tyro.conf.Positional[Path | None],
    tyro.conf.arg(
        help="another, of a second checkpoint or corpus: the heads that changed are printed, with intervals."
    ),
]


@dataclass(frozen=True, slots=True)
class AtlasCommand(Command):
    """Look at the heads of a model over a corpus, and see which ones changed between two.

    --out writes one page that works offline: a table of heads, sorted and filtered by a statistic; for each head the
    distribution over documents and its strongest examples. Of two folders the heads that changed are printed:
    `regard measure --compare A B` does the same. The intervals of all differences hold together, at 95 %; documents
    with one id are pairs.
    """

    stats: Stats
    other: Other = None
    _: KW_ONLY
    out: Path | None = None
    """the page to write, an .html file."""
    csv: Path | None = None
    """write the table to this file too; - is standard output, where nothing else is then printed."""

    def check(self) -> None:
        refuse_first(
            (
                self.other is None and self.out is None and self.csv is None,
                "give --out page.html, --csv FILE, or a second folder to compare with",
            ),
            *((one is not None and one.is_dir(), f"{one} is a folder; name a file") for one in (self.out, self.csv)),
        )
        if self.other is not None and self.other.suffix in (".html", ".csv") and not self.other.is_dir():
            raise ArgumentError(f"{self.other} is no folder: name a file to write by --out or --csv")
        extra_package("pyarrow", extra="measure")

    def work(self) -> None:
        with loading():
            from regard.corpus.atlas_page import atlas

        made, is_piped = atlas(self.stats, self.other), self.csv == Path("-")
        if self.csv is not None and not is_piped:
            made.save_csv(self.csv)
        if self.out is not None:
            made.save(self.out)
        if is_piped:
            sys.stdout.write(made.csv())
        elif made.changes is not None:
            print(made.changes)
        else:
            print(*(path for path in (self.out, self.csv) if path is not None), sep="\n")
