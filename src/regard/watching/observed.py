"""The record of a watch: every saved call, and the skipped calls with the reasons."""

import math
import threading
from collections import Counter, deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from regard.call.shapes import Sizes
from regard.errors import GradientError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.factors import Factors
from regard.maps.sources.summary import Summarize, SummarySource
from regard.tensors.fresh import Fresh
from regard.tensors.guards import is_recorded, is_transformed
from regard.tensors.torch_private import DisableTorchFunction
from regard.tensors.undisturbed import recorded, undisturbed
from regard.watching.kept.arguments import KeptArguments, ModuleArguments, is_small, kept
from regard.watching.kept.evidence import AnyEvidence
from regard.watching.kept.output_gradients import ITSELF, NO_GRAPH, called
from regard.watching.kept.rebuilding import RowProof, prove, prove_all
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.kept.sequences import Moment, Sequences
from regard.watching.running.module_kinds import has_no_attention
from regard.watching.running.observed_call import Interceptor, KeysChosen, ObservedCall, has_compiled
from regard.watching.running.thread_state import is_in_backward

if TYPE_CHECKING:
    from regard.maps.sources.compression import Compression


MOST_PROOFS = 256
"""The calls whose rebuilt rows are held until they are compared."""


class BlockKeys(NamedTuple):
    """The last keys of a call, each made of a block of tokens."""

    number: int
    rate: int
    made: "Observed | None"
    """The call of the compressor; None if it was not read in this run of the model."""

    @property
    def source(self) -> "Compression | None":
        from regard.maps.sources.compression import Compression  # (few models need it)

        source = None if self.made is None or self.made.map is None else self.made.map.source
        return source if isinstance(source, Compression) and source.queries == self.number else None


OF_ONE_RANK = "its heads are those of this rank, numbered from 0: its parameters are split over {} ranks"


def ranks_of(module: nn.Module) -> int:
    """Over how many ranks the parameters are split while the module runs; a parameter that FSDP gathered is whole."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return 1
    from torch.distributed.tensor import DTensor  # (it takes a second)

    split = [
        math.prod(one.device_mesh.size(axis) for axis, at in enumerate(one.placements) if at.is_shard())
        for one in module.parameters()
        if isinstance(one, DTensor)
    ]
    return max(split, default=1)


class EmbeddedIds(NamedTuple):
    """Ids of tokens, of positions or of kinds that a table was read by."""

    at: int
    """How many calls were observed before."""
    ids: Tensor
    fresh: Fresh
    table: int


@dataclass(slots=True, eq=False)
class Observed:
    name: str
    index: int
    how: str
    made: AttentionMap | None
    factors: Factors | None = None
    """The source tensors of the map; None for statistics only, or for an unreadable call."""
    softmax: AttentionMap | None = None
    """The softmax before the model's changes to the weights, if any."""
    is_stored: bool = False
    notes: list[str] = field(default_factory=list)
    error: float | str | None = None
    """With `verify`: the largest error of the rebuilt output over the largest value, or the reason for its absence."""
    proof: RowProof | None = None
    """The rebuilt rows, until they are read; None if they fit."""
    is_other: bool = False
    at: int = 0
    """How many calls its thread had observed until then, this one included."""
    run: int | None = None
    token: object = None
    crosses: bool | None = None
    """True if its keys are made of another sequence than its queries; None if that is not known."""
    changed: tuple[tuple[str, bool | Tensor], ...] = ()
    """How masks of zeros and ones changed its scores: clauses, and whether they are true."""
    chooser: KeysChosen | None = None
    """The choice by the module that last chose among as many keys, or blocks, for as many queries; None without one."""
    blocks: "BlockKeys | None" = None
    """The blocks of tokens among its keys; None without any."""
    kind: str = "attention"
    """One of the kinds of a report."""
    arguments: tuple[KeptArguments, ...] = ()
    dropout: float = 0.0
    """The share of the weights that the kernel dropped."""
    is_over_queries: bool = False
    """True if the weights of each key sum to 1, over queries of its own sequence."""
    is_part: bool = False
    """True if the softmax was over more keys than the weights have, as with a sink beside them."""
    has_keys: Tensor | None = None
    """Whether each row of its own softmax had a score that no mask made low; None if that is not known."""
    is_evaluated: bool = False
    ranks: int = 1
    """Over how many ranks the parameters of its module are split: its heads are those of this rank."""

    @property
    def map(self) -> AttentionMap | None:
        if self.proof is not None:
            fault, self.proof = self.proof.fault(), None
            if fault is not None:
                self.refuse(fault)
        return self.made

    @property
    def over_tokens(self) -> AttentionMap | None:
        """The map with tokens for keys: that of blocks, times the mean over channels of their shares; None without."""
        if self.blocks is None or self.map is None:
            return self.map
        from regard.maps.sources.compression import OverTokens

        of, weights = self.blocks.source, self.map.source
        if of is None or not weights.has_blocks or self.map.shape[-1] != of.positions + of.queries:
            return None
        names = replace(weights.dimensions, keys="positions")
        return AttentionMap(OverTokens(weights, of.over_heads(self.sizes.heads), names))

    @property
    def is_of_positions(self) -> bool:
        return self.kind not in ("cross-attention", "attention over depth", "compression")

    @property
    def sizes(self) -> Sizes:
        if self.factors is not None:
            return self.factors.sizes
        assert self.map is not None
        *lead, queries, keys = self.map.shape
        has_heads = self.map.dimensions.has_heads_last
        batch, heads = (lead[:-1], lead[-1]) if has_heads else (lead, 1)
        return Sizes(tuple(batch), heads, heads, queries, keys, has_heads)

    def refuse(self, reason: str) -> None:
        """Drop the map, because it turned out not to be the module's attention."""
        self.made, self.softmax, self.factors, self.proof, self.notes = None, None, None, None, [reason]


class Record(Interceptor):
    """The calls one watch has observed, in their order, and the reasons for those it passed over. `Seen` and the report
    read it."""

    def __init__(
        self,
        model: nn.Module,
        modules: dict[str, nn.Module],
        wanted: Callable[[str], bool],
        policy: RetentionPolicy,
        *,
        verify: bool,
        summary: Summarize | None = None,
    ) -> None:
        self.modules, self.is_compiled = modules, has_compiled(model)
        self.wanted = wanted
        self.policy = policy
        self.keeps_graph = policy.graph
        self.calls: list[Observed] = []
        self.sequences = Sequences()
        self.paths = {id(module): path for path, module in modules.items()}
        self.count: Counter[str] = Counter()
        """How many wanted calls each module made, readable or not."""
        self.ran: set[str] = set()
        """The modules that ran, but for torch's plain ones."""
        self.elsewhere: set[str] = set()
        """Those that ran in threads in which the watch is not open."""
        self.mixes: dict[str, tuple[str, int | None]] = {}
        """How each module without an observed call mixes positions, and how many, if that is known."""
        self.choosers: dict[tuple[int, int], KeysChosen] = {}
        """By the numbers of queries and keys, the last choice of keys by scores."""
        self.embeddings: list[EmbeddedIds] = []
        self.measured: set[str] = set()
        """The modules of which another run of the model told whether they mix positions."""
        self.recomputed: Counter[str] = Counter()
        """The number of each module's calls in backward passes, which are not saved again."""
        self.unreadable: Counter[tuple[str, str]] = Counter()
        """How often something unreadable was observed, by (module path, reason)."""
        self.others: Counter[tuple[str, str]] = Counter()
        """How often a lookalike of attention was observed, by (module path, description)."""
        self.skipped = 0
        self.outside = 0
        self._running: dict[int, tuple[ModuleArguments, KeptArguments]] = {}
        """The arguments of the modules around the latest call by their ids, held so that no other object gets these."""
        self._verify, self._summary = verify, summary
        self._rows = Random(0)
        """Chooses the rebuilt rows. The random state of torch is the model's."""
        self._proofs = deque[RowProof]()
        """The latest ones, whose rows are held."""
        self._lock = threading.RLock()

    def ran_elsewhere(self, module: nn.Module) -> None:
        if (path := self.paths.get(id(module))) is not None and not has_no_attention(module):
            self.elsewhere.add(path)

    def entered(self, module: nn.Module) -> None:
        if (path := self.paths.get(id(module))) is not None:
            self.ran.add(path)
            if path in self.count and is_in_backward():
                self.recomputed[path] += 1

    def mixed(self, path: str, how: str, positions: int | None) -> None:
        self.mixes.setdefault(path, (how, positions))

    def embedded(self, ids: Tensor, table: int, taken: int) -> None:
        if self._summary is None and is_small("", ids):
            self.embeddings.append(EmbeddedIds(taken, *kept(ids), table))

    def chose(self, choice: KeysChosen, queries: int) -> None:
        self.choosers[queries, choice.hidden.shape[-1]] = choice

    def after(self, path: str | None, call: ObservedCall, when: Moment) -> None:
        with self._lock:
            if path is None:
                self.outside += 1
            elif not self.wanted(path):
                self.skipped += 1
            elif is_in_backward():
                self.recomputed.setdefault(path, 1)
            else:
                self._keep(path, call, when)

    def _keep(self, path: str, source: ObservedCall, when: Moment) -> None:
        index = self.count[path]
        self.count[path] += 1
        try:
            if is_transformed():
                raise ShapeError("inside torch.func (vmap, grad) a call has no tensors of its own that could be kept")
            with self._context(path):
                observed = self._read(path, index, source, when)
        except Exception as error:
            notes = [f"{type(error).__name__}: {error}"]
            observed = Observed(path, index, source.how, None, notes=notes, at=when.at)
        self.calls.append(observed)

    def _context(self, path: str) -> AbstractContextManager[object]:
        policy, is_recording = self.policy, is_recorded()
        if policy.gradients is not None:
            policy.gradients.is_recording = is_recording
        if not policy.graph:
            return torch.no_grad()
        if not is_recording:
            raise GradientError(NO_GRAPH.format(called(path)))
        return recorded()

    def _read(self, path: str, index: int, source: ObservedCall, when: Moment) -> Observed:
        reading = source.read(self.policy, path or ITSELF)
        weights, softmax = reading.source, reading.softmax
        if (of := source.origins) is not None and (of.queries.sort, of.keys.sort) != ("positions", "positions"):
            weights = weights.with_dimensions(replace(weights.dimensions, queries=of.queries.sort, keys=of.keys.sort))
        observed = Observed(
            path, index, source.how, AttentionMap(weights), reading.factors,
            softmax=None if softmax is None else AttentionMap(softmax), is_stored=reading.stored is not None,
            notes=reading.notes, at=when.at, run=when.begun, token=source.token,
            crosses=None if source.origins is None else source.origins.crosses, kind=_kind(source),
            changed=() if source.origins is None else source.origins.changed,
            blocks=(blocks := self._blocks(source, when)),
            chooser=self.choosers.get((weights.shape[-2], weights.shape[-1] if blocks is None else blocks.number)),
            arguments=self._arguments(source.arguments), dropout=source.dropped,
            is_over_queries=source.is_over_queries, is_part=source.is_part, has_keys=source.has_keys,
            is_evaluated=not self.modules[""].training, ranks=(ranks := ranks_of(self.modules[path])),
        )  # fmt: skip
        if ranks > 1:
            observed.notes = [*observed.notes, OF_ONE_RANK.format(ranks)]
        if isinstance(reading.rebuilding, str):
            observed.error = reading.rebuilding if self._verify else None
        elif self._verify:
            observed.error, observed.proof = prove_all(reading.rebuilding)
        else:
            observed.proof = prove(reading.rebuilding, self._rows)
        if observed.proof is not None:
            self._proofs.append(observed.proof)
            if len(self._proofs) > MOST_PROOFS:
                self._proofs.popleft().compared()
        before = self._place(path, index, reading.evidence, when)
        if self._summary is not None:
            # Without this a watch would take the functions called here for calls of the model.
            with undisturbed(), DisableTorchFunction():
                observed.made = AttentionMap(SummarySource.of(weights, self._summary))
            observed.softmax = observed.factors = None
        elif before is not None and reading.holds_keys and reading.factors is not None:
            call = next(one for one in reversed(self.calls) if (one.name, one.index) == (path, before))
            _share_keys(call.factors, reading.factors)
        return observed

    def _arguments(self, given: tuple[ModuleArguments, ...]) -> tuple[KeptArguments, ...]:
        if self._summary is not None:
            return ()
        known, self._running = self._running, {}
        for one in given:
            held = known.get(id(one)) or (one, KeptArguments.of(self.paths.get(id(one.module), ""), one))
            self._running[id(one)] = held
        return tuple(kept for _, kept in self._running.values())

    def _blocks(self, source: ObservedCall, when: Moment) -> BlockKeys | None:
        stream = None if source.origins is None else source.origins.keys
        if stream is None or stream.own is None or stream.maker is None:
            return None
        path, rate = self.paths.get(id(stream.maker)), stream.maker.__dict__["compress_rate"]
        made = (one for one in reversed(self.calls) if one.name == path and one.run == when.begun)
        return BlockKeys(stream.blocks, rate, next(made, None))

    def _place(self, path: str, index: int, evidence: AnyEvidence | None, when: Moment) -> int | None:
        try:
            if self._summary is not None:
                self.sequences.queue(path, index, (lambda: None) if evidence is None else evidence.begun(), when)
                return None
            later = None if evidence is None else evidence.later()
            if later is not None and self.sequences.wait(path, index, later, when):
                return None
            return self.sequences.add(path, index, None if evidence is None else evidence.printed(), when)
        except RuntimeError:
            # Tensors without data (FakeTensor) cannot be compared. The map is as good as any.
            return self.sequences.add(path, index, None, when)

    def unread(self, path: str, reason: str) -> None:
        if self.wanted(path):
            with self._lock:
                self.unreadable[path, reason] += 1

    def refuse(self, module: nn.Module, since: int, reason: str) -> None:
        path = self.paths.get(id(module))
        with self._lock:
            for call in self.calls:
                if call.name == path and call.at > since and call.is_stored and call.made is not None:
                    call.refuse(reason)

    def other(self, path: str, reason: str) -> None:
        if self.wanted(path):
            with self._lock:
                self.others[path, reason] += 1

    def withdraw(self, token: object, reason: str) -> None:
        with self._lock:
            for call in self.calls:
                if call.token is token and call.made is not None:
                    call.refuse(reason)
                    call.is_other = True
                    self.others[call.name, reason] += 1


def _kind(call: ObservedCall) -> str:
    if call.kind != "attention" or call.origins is None or not call.origins.crosses:
        return call.kind
    return "attention over depth" if call.origins.keys.sort == "layers" else "cross-attention"


def _share_keys(before: Factors | None, after: Factors) -> None:
    if before is None or before.keys is None or before.is_stale:
        return
    key, longer = before.call.key, after.call.key
    same = key.shape[:2] == longer.shape[:2] and key.shape[3] == longer.shape[3] and key.shape[2] <= longer.shape[2]
    if same and key.dtype == longer.dtype and torch.equal(longer[:, :, : key.shape[2]], key):
        before.share_keys(after)
