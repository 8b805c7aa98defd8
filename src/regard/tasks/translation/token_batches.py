"""The batches of stored pairs for the training loop: as they were cut, or cut anew in every epoch."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from regard.errors import DataError
from regard.tasks.text.batches import Batch, collate, plan_batches
from regard.tasks.text.bpe_dropout import NewCuts
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.sections import Indices, Integers, sections
from regard.tasks.training.losses import BatchSize

FRESH_PAIRS = 2**16
"""The most pairs whose new cuts are held at once: a section of so many is hundreds of batches."""
CUT_TOGETHER_PAIRS = 2**11
"""Pairs cut anew together: the array operations for one batch of them would take three times as long."""


@dataclass(frozen=True, slots=True, eq=False)
class StoredPairs:
    """Pairs as they were cut, which stay on the disk; with their links, if there are any."""

    store: TokenStore
    links: TokenStore | None
    rows: Indices

    def lengths(self) -> tuple[Integers, Integers]:
        return self.store.lengths(self.rows)

    def batch(self, chosen: Indices) -> Batch:
        store, linked, rows = self.store, self.links, self.rows[chosen]
        links = None if linked is None else [(linked.source(i), linked.target(i)) for i in rows]
        return collate([store.source(i) for i in rows], [store.target(i) for i in rows], links=links)


@dataclass(frozen=True, slots=True, eq=False)
class FreshPairs:
    """Pairs in the cuts of one epoch."""

    sources: Sequence[Integers]
    targets: Sequence[Integers]

    @classmethod
    def of(cls, store: TokenStore, rows: Indices, cuts: NewCuts, epoch: int) -> "FreshPairs":
        sides: tuple[list[Integers], list[Integers]] = ([], [])
        for some in np.split(rows, range(CUT_TOGETHER_PAIRS, len(rows), CUT_TOGETHER_PAIRS)):
            stored = [[side(i) for i in some] for side in (store.source, store.target)]
            fresh = cuts(*stored, numbers=some.tolist(), epoch=epoch)
            for kept, new, old in zip(sides, fresh, stored, strict=True):
                kept += [one.astype(before.dtype) for one, before in zip(new, old, strict=True)]
        return cls(*sides)

    def lengths(self) -> tuple[Integers, Integers]:
        return np.array([len(one) for one in self.sources]), np.array([len(one) for one in self.targets])

    def batch(self, chosen: Indices) -> Batch:
        return collate([self.sources[i] for i in chosen], [self.targets[i] for i in chosen])


Section = StoredPairs | FreshPairs
"""Pairs of which batches are planned together: the lengths are without special tokens."""


class TokenBatches:
    """The batches of a store for the training loop, without the pairs that exceed a limit (end marks counted).

    With `cuts` the pairs are cut anew in each epoch, and batches are planned by the lengths they have then. Which
    pairs exceed a limit is decided by the cuts in the store.
    """

    def __init__(
        self,
        store: TokenStore,
        links: TokenStore | None = None,
        *,
        max_length: int,
        max_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
        cuts: NewCuts | None = None,
    ) -> None:
        self._store, self._links, self._cuts = store, links, cuts
        self._max_length, self._seed = max_length, seed
        self._plan: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "rank": rank, "world_size": world_size}

    def __len__(self) -> int:
        return sum(len(self._fitting(rows)) for rows in sections(len(self._store), seed=0, epoch=0))

    def count(self) -> int:
        """The batches of the first epoch; with new cuts, those of its first section in proportion to all pairs."""
        every = self._sections(epoch=0)
        if self._cuts is None:
            return sum(len(self._planned(section, 0, number)) for number, _, section in every)
        first = next(every, None)
        if first is None:
            return 0
        number, rows, section = first
        return round(len(self._planned(section, 0, number)) * len(self) / len(rows))

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        is_empty = True
        for number, _, section in self._sections(epoch):
            is_empty = False
            plan = self._planned(section, epoch, number)
            for chosen in plan[start:]:
                yield section.batch(chosen)
            start = max(start - len(plan), 0)
        if is_empty:
            raise DataError(
                f"there is no pair of at most {self._plan['max_tokens']} tokens (--batch-tokens), with at most "
                f"{self._max_length} on either side (--max-length): raise them"
            )

    def size(self, batch: Batch) -> BatchSize:
        return BatchSize(batch.tokens, batch.padded_tokens)

    def _sections(self, epoch: int) -> Iterator[tuple[int, Indices, Section]]:
        """The sections of an epoch that have pairs: their numbers, the pairs that fit, and these as they are read."""
        most = None if self._cuts is None else FRESH_PAIRS
        for number, rows in enumerate(sections(len(self._store), seed=self._seed, epoch=epoch, most=most)):
            fitting = self._fitting(rows)
            if not len(fitting):
                continue
            if self._cuts is None:
                yield number, fitting, StoredPairs(self._store, self._links, fitting)
            else:
                yield number, fitting, FreshPairs.of(self._store, fitting, self._cuts, epoch)

    def _planned(self, section: Section, epoch: int, number: int) -> list[Indices]:
        return plan_batches(*section.lengths(), epoch=epoch, section=number, **self._plan)

    def _fitting(self, rows: Indices) -> Indices:
        source, target = self._store.lengths(rows)
        longest = np.maximum(source, target) + 1 <= self._max_length
        return rows[longest & (source + target + 2 <= self._plan["max_tokens"])]
