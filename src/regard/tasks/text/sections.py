"""Large corpora in sections that fit into memory. Rows are shuffled, but read from disk in runs of neighbours."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

Integers = npt.NDArray[np.integer]
Indices = npt.NDArray[np.int64]

SECTION_ROWS = 2**20
"""The rows of a section. They bound the memory: about 100 bytes per row while their batches are planned."""
RUN_ROWS = 2**8
"""Neighbouring rows of a run, read from disk together."""


def sections(count: int, *, seed: int, epoch: int) -> Iterator[Indices]:
    """The rows 0 to count - 1 in sections, each row in one section. The random choice differs from epoch to epoch.

    Up to 2**20 rows are one section, in their order. If there are more, runs of 256 neighbours are shuffled, and a
    section consists of many such runs from all parts of the corpus. The memory holds one section, and 8 bytes for
    each run.

    >>> [rows.tolist() for rows in sections(5, seed=0, epoch=0)]
    [[0, 1, 2, 3, 4]]
    """
    if count <= SECTION_ROWS:
        yield np.arange(count)
        return
    runs = np.random.default_rng([seed, epoch, 0, 1]).permutation(-(-count // RUN_ROWS))
    for chosen in np.array_split(runs, -(-len(runs) * RUN_ROWS // SECTION_ROWS)):
        rows = (chosen[:, None] * RUN_ROWS + np.arange(RUN_ROWS)).ravel()
        yield rows[rows < count]
