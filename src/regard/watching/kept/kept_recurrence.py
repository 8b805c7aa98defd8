"""The factors of an observed linear recurrence, and those of the calls whose state it goes on from."""

from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.shapes import Dimensions
from regard.kernels.recurrence import Recurrence
from regard.maps.sources.linear_recurrent import LinearRecurrent
from regard.maps.sources.values import of_heads, widened
from regard.tensors.fresh import Fresh
from regard.tensors.undisturbed import undisturbed, with_graph
from regard.watching.kept.evidence import AnyEvidence, Evidence, KnownEvidence, Prints, joined_prints
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy

PROVED = 16
"""How many of the first rows are rebuilt for all heads."""
OPEN = 16


class Shared(NamedTuple):
    heads: int
    scale: float
    by_delta: bool
    is_unit: bool = False
    """Whether the function gives queries and keys the length 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Factored:
    """The factors of consecutive positions, (B, G, T, ...)."""

    query: Tensor
    key: Tensor
    decay: Tensor | None = None
    """(B, H, T, 1 or D)."""
    beta: Tensor | None = None
    """(B, H, T)."""
    rates: Tensor | None = None
    """(1, H, 1, D), by which the decay of a head is multiplied: Mamba's A, beside its steps."""
    read: Tensor | None = None
    """(B, H, T, D), the vector a of a removal; None for none, or for the delta rule."""
    removed: Tensor | None = None
    """(B, H, T, D), its vector b."""

    def named(self) -> dict[str, Tensor]:
        found = ((one.name, getattr(self, one.name)) for one in fields(self))
        return {name: one for name, one in found if one is not None}

    def mapped(self, change: Callable[[Tensor, str], Tensor]) -> "Factored":
        return Factored(**{name: change(one, name) for name, one in self.named().items()})


class Link(NamedTuple):
    """Positions in a chain of calls, and for each row of the last call its row there; None: the same."""

    positions: Factored
    fresh: Fresh
    rows: Tensor | None


class Ended(NamedTuple):
    """A call that may go on: its last state, its chain, and the fingerprints of all keys."""

    state: Tensor
    chain: tuple[Link, ...]
    prints: Prints | None


@dataclass(frozen=True, slots=True, eq=False)
class KeptRecurrence(LinearRecurrent):
    chain: tuple[Link, ...]
    shared: Shared
    layout: tuple[int, ...]
    names: Dimensions
    graph: bool

    @property
    def shape(self) -> torch.Size:
        lengths = [link.positions.key.shape[2] for link in self.chain]
        return torch.Size((*self.layout, lengths[-1], sum(lengths)))

    @property
    def dtype(self) -> torch.dtype:
        return torch.promote_types(self._query.dtype, torch.float32)

    @property
    def device(self) -> torch.device:
        return self._query.device

    @property
    def key_width(self) -> int:
        return self._query.shape[-1]

    @property
    def _query(self) -> Tensor:
        return self.chain[-1].positions.query

    @property
    def recurrence(self) -> Recurrence:
        """Raises OverwrittenError if the model has written to a factor."""
        return self.of_some(range(self.flat_heads))

    def of_some(self, flat_heads: range) -> Recurrence:
        first, *others = (link.fresh for link in self.chain)
        first.joined(*others).check()
        with (with_graph if self.graph else undisturbed)():
            parts = [_chosen(link.positions, link.rows) for link in self.chain]
            return recurrence_of(parts, self.shared, None if len(flat_heads) == self.flat_heads else flat_heads)

    def tensors(self) -> list[Tensor]:
        return [tensor for link in self.chain for tensor in link.fresh.tensors()]


def recurrence_of(parts: list[Factored], shared: Shared, flat_heads: range | None = None) -> Recurrence:
    def of_flat(x: Tensor) -> Tensor:
        if flat_heads is None:
            return of_heads(x, shared.heads)
        flat = torch.arange(flat_heads.start, flat_heads.stop, device=x.device)
        return x[flat // shared.heads, flat % shared.heads // (shared.heads // x.shape[1])]

    def of(name: str, missing: float = 0.0) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        some = next((x for x in found if x is not None), None)
        if some is None:
            return None
        sizes = [(*some.shape[:2], part.key.shape[2], *some.shape[3:]) for part in parts]
        filled = [some.new_full(n, missing) if x is None else x for x, n in zip(found, sizes, strict=True)]
        return of_flat(filled[0] if len(filled) == 1 else torch.cat(filled, 2))

    query, key, rates, read, removed = of_flat(parts[-1].query), of("key"), parts[-1].rates, of("read"), of("removed")
    assert key is not None
    if shared.is_unit:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in map(widened, (query, key)))
    decay = of("decay")
    if decay is not None and rates is not None:
        decay = decay * of_flat(rates.expand(len(parts[-1].query), -1, -1, -1))
    removal = None if read is None or removed is None else (read, removed)
    return Recurrence(query, key, shared.scale, decay, of("beta", 1.0), removal, by_delta=shared.by_delta)


LABELS = {
    "query": "queries", "key": "keys", "decay": "decays", "beta": "write strengths", "rates": "rates of decay",
    "read": "vectors that a removal reads by", "removed": "vectors that a removal takes out",
}  # fmt: skip


def kept_recurrence(
    policy: RetentionPolicy,
    name: str,
    given: Factored,
    shared: Shared,
    before: Tensor | None,
    after: Tensor | None,
) -> tuple[KeptRecurrence, AnyEvidence, bool]:
    """The source of the map, the evidence for the next call, and whether it has the keys of all earlier positions: a
    call goes on from another one if its first state is the last state there, row by row."""
    fresh = Fresh()
    kept = given.mapped(lambda x, factor: policy.keep(x, f"{LABELS[factor]} of {name}", fresh))
    chain: tuple[Link, ...] = (Link(kept, fresh, None),)
    prints = None
    ended = policy.ended.setdefault(name, [])
    found = None if before is None else next((f for one in reversed(ended) if (f := _goes_on(one, before))), None)
    if found is not None:
        chain, prints = (*found.chain, *chain), found.prints
    evidence: AnyEvidence = Evidence(given.query, given.key, given.key)
    if policy.where == "summary" and before is not None:
        evidence = KnownEvidence(None)  # Its keys alone would say that it begins anew.
    elif policy.where != "summary" and (after is not None or found is not None):
        evidence = KnownEvidence(joined_prints(prints, evidence.printed()))
        if after is not None:
            ended[:] = [*ended[1 - OPEN :], Ended(after.detach(), chain, evidence.prints)]
    names = Dimensions.of_call(1, has_heads=True)
    layout = (given.query.shape[0], shared.heads)
    made = KeptRecurrence(chain, shared, layout, names, policy.graph)
    return made, evidence, before is None or found is not None


def _goes_on(one: Ended, before: Tensor) -> Ended | None:
    state = one.state.to(before)
    if state.shape[1:] != before.shape[1:]:
        return None
    if torch.equal(state, before):
        return one
    same = torch.stack([(state == row).flatten(1).all(1) for row in before])
    if not bool(same.any(1).all()):
        return None
    rows = same.int().argmax(1)
    chain = tuple(link._replace(rows=rows if link.rows is None else link.rows[rows]) for link in one.chain)
    prints = one.prints
    if prints is not None:
        prints = Prints(prints.queries, prints.keys[rows], prints.memory, prints.filled)
    return Ended(before, chain, prints)


def _chosen(positions: Factored, rows: Tensor | None) -> Factored:
    def of(saved: Tensor, name: str) -> Tensor:
        return saved if rows is None or name == "rates" else saved[rows]

    return positions.mapped(of)


Finish = Callable[[Tensor, int], Tensor]
"""From the output of a recurrence at the first positions (B, H, t, E), and t, the output of the model's function."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRebuilding(Rebuilding):
    """The output of a recurrence. A late row takes all positions before it, and so is proved of one head by its number;
    of all heads where the output mixes them."""

    given: Factored
    shared: Shared
    value: Tensor
    output: Tensor
    before: Tensor | None
    finish: Finish | None = None

    def some(self, rows: range) -> Rebuilt:
        mixes_heads = self.output.shape[1] != self.shared.heads
        flat = None if rows.stop <= PROVED or mixes_heads else rows.start % (len(self.value) * self.shared.heads)
        found = self._first(rows.stop, None if flat is None else range(flat, flat + 1))
        return Rebuilt(found.rebuilt[..., rows.start :, :], found.output[..., rows.start :, :], found.values)

    def whole(self) -> Rebuilt:
        return self._first(self.queries)

    def _first(self, count: int, some: range | None = None) -> Rebuilt:
        """The first positions, (B, H, count, E), or (1, count, E) of one head."""
        first = self.given.mapped(lambda x, name: x.detach() if name == "rates" else x.detach()[:, :, :count])
        value = of_heads(widened(self.value.detach()[:, :, :count]), self.shared.heads)
        before = None if self.before is None else self.before.detach().flatten(0, 1)
        recurrence, output = recurrence_of([first], self.shared, some), self.output.detach()[:, :, :count]
        layout, one = (len(self.value), self.shared.heads, count, -1), slice(None)
        if some is not None:
            one = slice(some.start, some.stop)
            value, before = value[one], None if before is None else before[one]
        rebuilt = recurrence.chunked().product(value.to(recurrence.dtype), before)[0]
        if some is None:
            rebuilt = rebuilt.view(layout)
            return Rebuilt(rebuilt if self.finish is None else self.finish(rebuilt, count), output, value)
        if self.finish is not None:
            # (A finish of each head by itself takes them all.)
            rebuilt = self.finish(rebuilt.expand(*layout[:2], count, -1), count).flatten(0, 1)[one]
        return Rebuilt(rebuilt, output.flatten(0, 1)[one], value)
