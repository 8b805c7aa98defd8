"""One call under audit: its facts, the positions of its queries, and the model's arguments on its sequences."""

from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, RegardError, ShapeError
from regard.tensors.tile_sizes import fitting, ranges
from regard.watching.checks.facts import Facts, allowed_pairs, facts_of
from regard.watching.checks.roles import Role, config_of, is_of_decoder, reads_memory, role_of
from regard.watching.checks.told import (
    DOCUMENTS,
    ENDS,
    IDS,
    NUMBERED,
    PadToken,
    SequencePart,
    Told,
    are_ids,
    arguments,
    documents_among,
    handed,
    ids_in,
    is_pair_of,
    masks_of,
    padding_of,
)
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS
from regard.watching.kept.sequences import SequenceStep
from regard.watching.observed import EmbeddedIds, Observed, Record


@dataclass(frozen=True, slots=True, eq=False)
class UserTold:
    causal: bool | None = None
    keep: Tensor | None = None
    """The real tokens among the keys, bool (B, S)."""
    documents: Tensor | None = None
    """The document of each position, (B, S)."""
    crossing: Container[tuple[str, int]] = ()
    """Calls whose keys are of another sequence, by module and number."""

    def __post_init__(self) -> None:
        keep, documents = self.keep, self.documents
        if not isinstance(self.causal, bool | None):
            raise ArgumentError(f"causal= takes True, False or None, got {self.causal!r}")
        if keep is not None and (keep.dtype != torch.bool or keep.dim() != 2):
            raise ShapeError(f"padding= takes a bool tensor (B, S), True = a real token; got {keep.dtype} {keep.shape}")
        if documents is not None and (documents.is_floating_point() or documents.dim() != 2):
            raise ShapeError(
                f"documents= takes an integer tensor (B, S), the document of each token; got {documents.dtype} "
                f"{documents.shape}"
            )


@dataclass(eq=False)
class AuditedCall:
    call: Observed
    facts: Facts
    modules: Mapping[str, nn.Module]
    user: UserTold
    step: SequenceStep | None = None
    """Its place in a sequence of calls with one cache."""
    before: "AuditedCall | None" = None
    """The call before it in that sequence."""
    embeddings: Sequence[EmbeddedIds] = ()
    earlier: "AuditedCall | None" = None
    """The call of the same module before it, of any sequence."""
    grows: bool = False
    """True if the keys of its module grow from call to call, as under a cache."""
    pads: PadToken | None = None
    encoder: "AuditedCall | None" = None
    """The latest call before it in the encoder of a pair."""

    @property
    def name(self) -> str:
        return self.call.name

    @cached_property
    def crosses(self) -> bool:
        is_told = (self.name, self.call.index) in self.user.crossing
        return is_told or self.call.crosses is True or reads_memory(self.modules, self.name)

    @property
    def sizes(self) -> Any:
        return self.call.sizes

    @property
    def weights(self) -> Any:
        return self.call.map

    @property
    def device(self) -> torch.device:
        return self.facts.seen.first.device

    @property
    def is_attention(self) -> bool:
        """True for attention over positions: its weights are of pairs, and its keys no blocks."""
        return self.call.kind in ("attention", "cross-attention") and self.call.blocks is None

    @property
    def mixes_positions(self) -> bool:
        return self.is_attention or (self.call.is_of_positions and self.call.blocks is None)

    @cached_property
    def module(self) -> nn.Module | None:
        return self.modules.get(self.name)

    @cached_property
    def config(self) -> Any:
        """The config of transformers of the nearest module with one; None for other models."""
        return config_of(self.modules, self.name)

    @cached_property
    def role(self) -> Role:
        return role_of(self)

    @cached_property
    def part(self) -> SequencePart | None:
        """The sequence of the queries in a pair; "own" outside of one, and None if it is not known."""
        frames = self.call.arguments
        pairs = [number for number, frame in enumerate(frames) if is_pair_of(frame)]
        if not pairs:
            return "own"
        if self.crosses:
            return "target"
        of_pair = list(ids_in(frames[pairs[-1]]))
        for ids in (tensor for frame in frames[pairs[-1] + 1 :] for _, tensor in ids_in(frame)):
            return "target" if any(part == "target" and torch.equal(ids, one) for part, one in of_pair) else "source"
        if (is_decoder := is_of_decoder(self.modules, self.name)) is not None:
            return "target" if is_decoder else "source"
        fitting = {part for part, tensor in of_pair if tensor.shape[1] == self.sizes.queries}
        return None if len(fitting) != 1 else "target" if "target" in fitting else "source"

    @cached_property
    def key_part(self) -> SequencePart | None:
        return self.part if not self.crosses else "source" if self.part in ("own", "target") else None

    def ids(self, part: SequencePart | None, length: int) -> Told | None:
        """The ids of the tokens of a sequence, (B, length)."""
        if part is None:
            return None
        found = (one for one in handed(self.call, IDS, length) if are_ids(one.values))
        return next((one.told() for one in found if one.is_of(part, IDS[one.name])), None)

    @cached_property
    def offset(self) -> int | None:
        """The position of the first query among the keys; None if it is not known."""
        if self.crosses or self.call.kind == "cross-attention":
            return None
        if self.step is not None and self.is_later_step:
            return self.step.first - self.step.start
        return 0 if self.sizes.queries == self.sizes.keys else None

    @property
    def is_later_step(self) -> bool:
        return self.grows and self.before is not None

    # -- padding -----------------------------------------------------------------------------------------

    @cached_property
    def keep(self) -> Told | None:
        """The real tokens among the keys, bool (B, S); None if nothing tells of any padding."""
        if self.user.keep is not None:
            return self._by_user(self.user.keep, "padding=")
        if not self.mixes_positions or self.key_part is None or self._is_of_another_tower:
            return None
        return padding_of(self)

    def _by_user(self, given: Tensor, source: str) -> Told | None:
        """The user's statement on each key; None for another shape, and for a source whose target has it too."""
        shape = (self.sizes.flat_batch, self.sizes.keys)
        is_of_target = self.key_part == "source" and self.ids("target", self.sizes.keys) is not None
        fits = given.shape in (shape, (1, self.sizes.keys)) and not is_of_target
        return Told(given.to(self.device).expand(shape), source) if fits else None

    @property
    def _is_of_another_tower(self) -> bool:
        """True for a part without tokens, such as a vision tower, beside a part with."""
        config, root = self.config, getattr(self.modules.get(""), "config", None)
        return config is not None and config is not root and not hasattr(config, "vocab_size")

    @cached_property
    def real_queries(self) -> Tensor:
        """The rows of real tokens, bool (B, T)."""
        batch, queries = self.sizes.flat_batch, self.sizes.queries
        if self.keep is not None and self.offset is not None and 0 <= self.offset <= self.sizes.keys - queries:
            return self.keep.values[:, self.offset : self.offset + queries]
        own = next(masks_of(self.call, "target", queries), None) if self.crosses and self.part == "target" else None
        return torch.ones(batch, queries, dtype=torch.bool, device=self.device) if own is None else own.values

    @cached_property
    def counted(self) -> Tensor:
        """The rows of real tokens with a key, bool (B, T)."""
        return self.real_queries & self.live_rows

    # -- documents and kinds of tokens -------------------------------------------------------------------

    @cached_property
    def documents(self) -> Told | None:
        """The document of each key, (B, S); None if nothing tells of more than one."""
        if not self.mixes_positions or self.offset != 0:
            return None
        if self.user.documents is not None:
            return self._by_user(self.user.documents, "documents=")
        if self._is_of_another_tower:
            return None
        ends = (one for one in arguments(self.call) if one.name in ENDS)
        flat = handed(self.call, (*DOCUMENTS, "position_ids", *NUMBERED), self.sizes.keys)
        named = {one.name: one for one in reversed([*flat, *ends])}
        found = documents_among({name: one.values for name, one in named.items()}, self.real_keys)
        if found is None:
            return None
        told = named[found[0]].told(found[1].to(self.device))
        return replace(told, source=f"the restarts of {told.source}") if found[0] == "position_ids" else told

    @cached_property
    def types(self) -> Told | None:
        """The kinds of the tokens, (B, S)."""
        is_asked = self.is_attention and self.offset == 0 and not self._is_of_another_tower
        found = handed(self.call, ("token_type_ids", "mm_token_type_ids"), self.sizes.keys) if is_asked else ()
        return next((one.told() for one in found), None)

    @cached_property
    def prefix(self) -> Told | None:
        """The tokens of a prefix by its length, bool (B, S); None where its mask has no prefix."""
        is_asked = self.is_attention and self.offset == 0 and self.facts.mask.pattern in ("prefix", "causal")
        for one in arguments(self.call) if is_asked else ():
            lengths, keys = one.values, self.sizes.keys
            is_of_lengths = "prefix" in one.name and lengths.shape == (self.sizes.flat_batch,) and are_ids(lengths)
            if is_of_lengths and 0 < int(lengths.max()) < keys and int(lengths.min()) >= 0:
                return one.told(torch.arange(keys, device=lengths.device) < lengths[:, None])
        return None

    @cached_property
    def position_table(self) -> int | None:
        """The table of positions that the model reads: by ids that rise by one in each row, and are no tokens."""
        if self.before is not None and self.grows:
            return self.before.position_table
        for one in self._embedded():
            ids = torch.atleast_2d(one.ids)
            if len(ids) in (1, self.sizes.flat_batch) and ids.shape[1] > 1 and bool((ids.diff(dim=-1) == 1).all()):
                tokens = self.ids(self.part, ids.shape[1])
                if tokens is None or not torch.equal(tokens.values, ids.expand_as(tokens.values)):
                    return one.table
        return None

    @cached_property
    def positions(self) -> Told | None:
        """The positions (B, T) that the model gives its queries: by the table of positions, or an argument."""
        shape, table = (self.sizes.flat_batch, self.sizes.queries), self.position_table
        of_table = (torch.atleast_2d(one.ids) for one in self._embedded() if one.table == table)
        if (ids := next(of_table, None)) is not None:
            return Told(ids.expand(shape), "the table of positions") if len(ids) in (1, shape[0]) else None
        given = list(handed(self.call, ("position_ids",), shape[1]))
        return given[-1].told() if given else None

    @property
    def are_types_embedded(self) -> bool:
        """True if a table of the model was read by the kinds of the tokens."""
        types = self.types
        return types is not None and any(torch.equal(one.ids, types.values) for one in self._embedded())

    def _embedded(self) -> Iterator[EmbeddedIds]:
        """The ids for as many queries that tables were read by before the call, the latest first."""
        for one in reversed(self.embeddings):
            is_read = one.at < self.call.at and one.fresh.changed() is None
            if is_read and one.ids.dim() in (1, 2) and one.ids.shape[-1] == self.sizes.queries:
                yield one

    # -- visible pairs -----------------------------------------------------------------------------------

    def chunks(self) -> Iterator[range]:
        sizes = self.sizes
        yield from ranges(sizes.queries, fitting(CHUNK_ELEMENTS, sizes.flat_batch * sizes.heads * sizes.keys))

    def sees(self, rows: range) -> Tensor:
        """The pairs that reached the kernel, bool (B or 1, H or 1, rows, S): by the mask, or by weights but 0."""
        factors = self.call.factors
        return self.block(rows) != 0 if factors is None else allowed_pairs(factors.call, rows)

    def block(self, rows: range, of: Any = None) -> Tensor:
        """The weights of some rows, (B, H, rows, S), or those of another map `of` the call."""
        sizes = self.sizes
        found: Tensor = (self.weights if of is None else of).block(rows, range(sizes.keys))
        return found.reshape(sizes.flat_batch, sizes.heads, len(rows), sizes.keys)

    @property
    def live(self) -> Tensor:
        """The rows with a key, bool (B or 1, H or 1, T)."""
        return self.facts.seen.live.unflatten(0, self.facts.seen.shape)

    @property
    def live_rows(self) -> Tensor:
        """The rows with a key in any head, bool (B or 1, T)."""
        return self.live.any(1)

    @property
    def seen_keys(self) -> Tensor:
        """The keys that any row sees, bool (B or 1, S)."""
        return self.facts.seen.keys.unflatten(0, self.facts.seen.shape).any(1)

    @property
    def real_keys(self) -> Tensor:
        """The keys that are no padding as far as is known, bool (B, S)."""
        if self.keep is not None:
            return self.keep.values
        return torch.ones(self.sizes.flat_batch, self.sizes.keys, dtype=torch.bool, device=self.device)

    def back(self, rows: range, offset: int) -> Tensor:
        """How many positions each key is before the query, below 0 after it: (rows, S)."""
        own = torch.arange(rows.start, rows.stop, device=self.device)[:, None] + offset
        return own - torch.arange(self.sizes.keys, device=self.device)

    @property
    def is_exact(self) -> bool:
        """True if the visible pairs are those of a mask; of weights, an allowed pair may have the weight 0."""
        return self.facts.seen.is_exact


class NotAsked(Exception):
    """The reason why a question cannot be asked of a call."""


def need(holds: bool, why_not: str) -> None:
    if not holds:
        raise NotAsked(why_not)


def need_one_sequence(call: AuditedCall, *, has_own_keys: bool = False) -> None:
    """Self-attention; with `has_own_keys`, each query has a key of its own."""
    is_one = call.is_attention and not call.crosses and not (has_own_keys and call.sizes.queries > call.sizes.keys)
    need(is_one, "it is no attention over the positions of one sequence")


@dataclass(slots=True, eq=False)
class AuditedRun:
    calls: list[AuditedCall] = field(default_factory=list)
    unread: list[tuple[Observed, str]] = field(default_factory=list)
    """The calls without facts, with the reasons."""


NOT_AUDITED = ("compression", "attention over depth")


def run_of(record: Record, user: UserTold) -> AuditedRun:
    run, pads = AuditedRun(), PadToken.of(record.modules)
    steps = {
        (name, step.call): (sequence.grows is True, step, None if before is None else before.call)
        for name, sequences in record.sequences.of.items()
        for sequence in sequences
        for before, step in zip([None, *sequence.steps], sequence.steps, strict=False)
    }
    known: dict[tuple[str, int | None], AuditedCall] = {}
    latest: dict[str, AuditedCall] = {}
    encoder: AuditedCall | None = None
    for call in (call for call in record.calls if call.kind not in NOT_AUDITED):
        try:
            facts = facts_of(call)
        except RegardError as error:
            run.unread.append((call, str(error)))
            continue
        grows, step, before = steps.get((call.name, call.index), (False, None, None))
        audited = AuditedCall(
            call, facts, record.modules, user, step, known.get((call.name, before)), embeddings=record.embeddings,
            earlier=latest.get(call.name), grows=grows, pads=pads, encoder=encoder,
        )  # fmt: skip
        known[call.name, call.index] = latest[call.name] = audited
        run.calls.append(audited)
        is_whole = audited.sizes.queries == audited.sizes.keys and audited.is_attention and not audited.crosses
        if is_whole and is_of_decoder(record.modules, call.name) is False:
            encoder = audited
    return run
