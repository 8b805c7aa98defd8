"""The batches of stored pairs for the training loop."""

from collections.abc import Iterator
from typing import Any

import numpy as np

from regard.errors import DataError
from regard.tasks.text.batches import Batch, collate, plan_batches
from regard.tasks.text.pair_store import TokenStore
from regard.tasks.text.sections import Indices, sections
from regard.tasks.training.losses import BatchSize


class TokenBatches:
    """The batches of a store for the training loop, without the pairs that exceed a limit (end marks counted)."""

    def __init__(
        self,
        store: TokenStore,
        *,
        max_length: int,
        max_tokens: int,
        seed: int,
        rank: int = 0,
        world_size: int = 1,
    ) -> None:
        self._store, self._max_length, self._seed = store, max_length, seed
        self._plan: dict[str, Any] = {"max_tokens": max_tokens, "seed": seed, "rank": rank, "world_size": world_size}

    def __len__(self) -> int:
        return sum(len(self._fitting(rows)) for rows in sections(len(self._store), seed=0, epoch=0))

    def count(self) -> int:
        return sum(len(plan) for _, plan in self._plans(epoch=0))

    def epoch(self, epoch: int, start: int) -> Iterator[Batch]:
        is_empty = True
        for rows, plan in self._plans(epoch):
            is_empty = False
            for chosen in plan[start:]:
                yield self._batch(rows[chosen])
            start = max(start - len(plan), 0)
        if is_empty:
            raise DataError(
                f"there is no pair of at most {self._plan['max_tokens']} tokens (--batch-tokens), with at most "
                f"{self._max_length} on either side (--max-length): raise them"
            )

    def size(self, batch: Batch) -> BatchSize:
        return BatchSize(batch.tokens, batch.padded_tokens)

    def _plans(self, epoch: int) -> Iterator[tuple[Indices, list[Indices]]]:
        """The pairs that fit, and which of them each batch has; for each section of an epoch."""
        for number, rows in enumerate(sections(len(self._store), seed=self._seed, epoch=epoch)):
            fitting = self._fitting(rows)
            if len(fitting):
                lengths = self._store.lengths(fitting)
                yield fitting, plan_batches(*lengths, epoch=epoch, section=number, **self._plan)

    def _batch(self, rows: Indices) -> Batch:
        return collate([self._store.source(i) for i in rows], [self._store.target(i) for i in rows])

    def _fitting(self, rows: Indices) -> Indices:
        source, target = self._store.lengths(rows)
        longest = np.maximum(source, target) + 1 <= self._max_length
        return rows[longest & (source + target + 2 <= self._plan["max_tokens"])]
