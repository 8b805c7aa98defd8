"""The factors of an observed linear recurrence, and those of the calls whose state it goes on from."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from regard.call.shapes import Dimensions
from regard.kernels.recurrence import Recurrence
from regard.maps.sources.linear_recurrent import LinearRecurrent
from regard.maps.sources.values import of_heads, widened
from regard.watching.kept.evidence import AnyEvidence, Evidence, KnownEvidence, Prints, joined_prints
from regard.watching.kept.factors import undisturbed, with_graph
from regard.watching.kept.rebuilding import Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.saved_tensor import SavedTensor

T = TypeVar("T", Tensor, SavedTensor)
PROVED = 16
"""How many of the first rows may be rebuilt as the proof of a map."""
OPEN = 16
"""How many calls of a module may still go on."""


class Shared(NamedTuple):
    """What all calls of a recurrence have in common."""

    heads: int
    scale: float
    by_delta: bool
    is_unit: bool = False
    """Whether the function gives queries and keys the length 1."""


@dataclass(frozen=True, slots=True, eq=False)
class Factored(Generic[T]):
    """The factors of consecutive positions, (B, G, T, ...)."""

    query: T
    key: T
    decay: T | None
    """(B, H, T, 1 or D)."""
    beta: T | None
    """(B, H, T)."""

    def tensors(self) -> list[T]:
        return [one for one in (self.query, self.key, self.decay, self.beta) if one is not None]


class Link(NamedTuple):
    """Positions in a chain of calls, and for each row of the last call its row there; None: the same."""

    positions: Factored[SavedTensor]
    rows: Tensor | None


class Ended(NamedTuple):
    """A call that may go on: its last state, its chain, and the fingerprints of all keys."""

    state: Tensor
    chain: tuple[Link, ...]
    prints: Prints | None


@dataclass(frozen=True, slots=True, eq=False)
class KeptRecurrence(LinearRecurrent):
    """The weights of one call, over its own keys and those of the calls before it."""

    chain: tuple[Link, ...]
    shared: Shared
    layout: tuple[int, ...]
    names: Dimensions
    graph: bool

    @property
    def shape(self) -> torch.Size:
        lengths = [link.positions.key.tensor.shape[2] for link in self.chain]
        return torch.Size((*self.layout, lengths[-1], sum(lengths)))

    @property
    def recurrence(self) -> Recurrence:
        """Raises OverwrittenError if the model has written to a factor."""
        for saved in self._saved():
            saved.check()
        with (with_graph if self.graph else undisturbed)():
            return recurrence_of([_chosen(link.positions, link.rows) for link in self.chain], self.shared)

    def tensors(self) -> list[Tensor]:
        return [saved.tensor for saved in self._saved()]

    def _saved(self) -> list[SavedTensor]:
        return [saved for link in self.chain for saved in link.positions.tensors()]


def recurrence_of(parts: list[Factored[Tensor]], shared: Shared) -> Recurrence:
    """The recurrence of consecutive positions, with the queries of the last ones."""

    def of(name: str, missing: float = 0.0) -> Tensor | None:
        found = [getattr(part, name) for part in parts]
        some = next((x for x in found if x is not None), None)
        if some is None:
            return None
        sizes = [(*some.shape[:2], part.key.shape[2], *some.shape[3:]) for part in parts]
        filled = [some.new_full(n, missing) if x is None else x for x, n in zip(found, sizes, strict=True)]
        whole = torch.cat(filled, 2)
        return whole.repeat_interleave(shared.heads // whole.shape[1], 1).flatten(0, 1)

    query, key = of_heads(parts[-1].query, shared.heads), of("key")
    assert key is not None
    if shared.is_unit:
        query, key = (x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6) for x in map(widened, (query, key)))
    return Recurrence(query, key, shared.scale, of("decay"), of("beta", 1.0), by_delta=shared.by_delta)


def kept_recurrence(
    policy: RetentionPolicy,
    name: str,
    given: Factored[Tensor],
    shared: Shared,
    before: Tensor | None,
    after: Tensor | None,
) -> tuple[KeptRecurrence, AnyEvidence, bool]:
    """The source of a call's map, the evidence for the next one, and whether it has the keys of all earlier positions.

    A call goes on from another one if its first state is the last state there, row by row.
    """
    kept = Factored(
        policy.keep(given.query, f"the queries of {name}"),
        policy.keep(given.key, f"the keys of {name}"),
        None if given.decay is None else policy.keep(given.decay, f"the decays of {name}"),
        None if given.beta is None else policy.keep(given.beta, f"the write strengths of {name}"),
    )
    chain: tuple[Link, ...] = (Link(kept, None),)
    prints = None
    ended = policy.ended.setdefault(name, [])
    found = None if before is None else next((f for one in reversed(ended) if (f := _goes_on(one, before))), None)
    if found is not None:
        chain, prints = (*found.chain, *chain), found.prints
    evidence: AnyEvidence = Evidence(given.query, given.key, given.key)
    if policy.where != "summary" and (after is not None or found is not None):
        evidence = KnownEvidence(joined_prints(prints, evidence.printed()))
        if after is not None:
            ended[:] = [*ended[1 - OPEN :], Ended(after.detach(), chain, evidence.prints)]
    names = Dimensions.of_call(1, has_heads=True)
    layout = (given.query.shape[0], shared.heads)
    made = KeptRecurrence(chain, shared, layout, names, policy.graph)
    return made, evidence, before is None or found is not None


def _goes_on(one: Ended, before: Tensor) -> Ended | None:
    """A call's end, with its rows in the order of this state; None if it is another state."""
    state = one.state.to(before)
    if state.shape[1:] != before.shape[1:]:
        return None
    if torch.equal(state, before):
        return one
    same = torch.stack([(state == row).flatten(1).all(1) for row in before])
    if not bool(same.any(1).all()):
        return None
    rows = same.int().argmax(1)
    chain = tuple(Link(p, rows if r is None else r[rows]) for p, r in one.chain)
    prints = one.prints
    if prints is not None:
        prints = Prints(prints.queries, prints.keys[rows], prints.memory, prints.filled)
    return Ended(before, chain, prints)


def _chosen(positions: Factored[SavedTensor], rows: Tensor | None) -> Factored[Tensor]:
    def of(saved: SavedTensor | None) -> Tensor | None:
        return None if saved is None else saved.tensor if rows is None else saved.tensor[rows]

    query, key = of(positions.query), of(positions.key)
    assert query is not None
    assert key is not None
    return Factored(query, key, of(positions.decay), of(positions.beta))


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentRebuilding(Rebuilding):
    """The output of a recurrence. Some rows are some of the first: a later one would take all positions before it."""

    given: Factored[Tensor]
    shared: Shared
    value: Tensor
    output: Tensor
    before: Tensor | None

    @property
    def queries(self) -> int:
        return min(self.output.shape[2], PROVED)

    def some(self, rows: range) -> Rebuilt:
        found = self._first(rows.stop)
        return Rebuilt(found.rebuilt[:, :, rows.start :], found.output[:, :, rows.start :], found.values)

    def whole(self) -> Rebuilt:
        return self._first(self.output.shape[2])

    def _first(self, count: int) -> Rebuilt:
        cut: Callable[[Tensor], Tensor] = lambda x: x.detach()[:, :, :count]  # noqa: E731
        given = self.given
        first = Factored(
            cut(given.query), cut(given.key), None if given.decay is None else cut(given.decay),
            None if given.beta is None else cut(given.beta),
        )  # fmt: skip
        value = of_heads(widened(cut(self.value)), self.shared.heads)
        before = None if self.before is None else self.before.detach().flatten(0, 1)
        recurrence = recurrence_of([first], self.shared)
        rebuilt = recurrence.chunked().product(value.to(recurrence.dtype), before)[0]
        output = cut(self.output)
        return Rebuilt(rebuilt.view(output.shape), output, value)
