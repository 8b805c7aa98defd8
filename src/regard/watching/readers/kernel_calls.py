"""Observe the kernels of other packages by their public functions: FlashAttention, torch's `varlen_attn`.

Each document of a packed call is a sequence of the map: packed vectors are held as they are, and laid out when the map
is read.
"""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from regard.call.biases.base import Bias, BlockBias
from regard.call.masks.base import And, Mask
from regard.call.masks.basic import Causal, Lengths
from regard.call.masks.patterns import Window
from regard.call.normalizations import Normalization, Softmax, SoftmaxWithSink
from regard.call.scores.base import ScaledDot, Score, SoftCapped
from regard.call.shapes import Rows, Sizes, index_tensor
from regard.functional import make_call
from regard.kernels.base import Call
from regard.maps.sources.factors import Factors
from regard.tensors.fresh import Fresh
from regard.tensors.undisturbed import undisturbed, with_graph
from regard.watching.kept.evidence import Evidence
from regard.watching.kept.mask_reading import GivenMask
from regard.watching.kept.rebuilding import CallRebuilding, Rebuilding, Rebuilt
from regard.watching.kept.retention import RetentionPolicy
from regard.watching.readers.attention_calls import AttentionCall, LaidOut
from regard.watching.readers.kernel_lse import KernelLse
from regard.watching.running.observed_call import CallVectors, Observation


@dataclass(frozen=True, slots=True, eq=False)
class KernelRows:
    """The sequences of a tensor (N, T, H, D), or of a packed one, (total, H, D)."""

    number: int
    """N."""
    length: int
    """T: the positions of the longest sequence."""
    starts: Tensor | None = None
    """(N,): where each packed sequence begins; None for rows of a batch."""
    counts: Tensor | None = None
    """(N,): how many positions each has; None if all have T."""

    @classmethod
    def of_batch(cls, tensor: Tensor, counts: Tensor | None = None) -> "KernelRows":
        return cls(tensor.shape[0], tensor.shape[1], None, None if counts is None else counts.long())

    @classmethod
    def packed(cls, ends: Tensor, longest: object = None, counts: Tensor | None = None) -> "KernelRows":
        """Documents by their cumulative lengths 0, n_1, n_1 + n_2, ...; `counts` are the positions in use."""
        starts = ends[:-1].long().clone()
        counts = ends.long().diff() if counts is None else counts.long()
        if longest is None:
            longest = counts.max() if len(counts) else 0
        return cls(len(starts), int(longest), starts, counts)  # type: ignore[call-overload]

    def laid_out(self, tensor: Tensor) -> Tensor:
        """The vectors as (N, H, T, D), with zeros behind the end of each sequence."""
        if self.counts is None:
            return tensor.transpose(1, 2)
        places = torch.arange(self.length, device=tensor.device)
        behind = (places >= self.counts[:, None])[:, :, None, None]
        if self.starts is not None:
            # (A place behind the end of the last document is that of some vector.)
            tensor = tensor[(self.starts[:, None] + places).clamp(max=max(len(tensor) - 1, 0))]
        return tensor.masked_fill(behind, 0).transpose(1, 2)

    def row_states(self, states: Tensor) -> Tensor:
        """Numbers of rows as (N, H, T): from (N, H, T), which may be longer, or of packed sequences from (H, total)."""
        if self.counts is None or self.starts is None:
            return states[..., : self.length]
        if states.dim() == 3:
            return states[..., : self.length]
        return self.laid_out(states.mT[..., None])[..., 0]

    def document_of(self, row: int) -> tuple["KernelRows", Tensor, Tensor]:
        """The document of a packed row alone, its number (1,), and the row's place in it (1,)."""
        assert self.starts is not None
        number = torch.searchsorted(self.starts, torch.full((1,), row, device=self.starts.device), right=True) - 1
        return self.take(number), number, (row - self.starts[number]).clamp(max=self.length - 1)

    def take(self, number: Tensor) -> "KernelRows":
        starts, counts = (None if one is None else one[number] for one in (self.starts, self.counts))
        return replace(self, number=1, starts=starts, counts=counts)


@dataclass(frozen=True, slots=True, eq=False)
class Slopes(BlockBias):
    """ALiBi by slopes of each sequence: -m |i + offset - j|, as FlashAttention's documentation has it."""

    slopes: Tensor
    """(B or 1, H)."""
    offset: int | Tensor
    """A tensor (B,) gives each sequence its own."""

    def block(self, rows: Rows, columns: Rows, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        i, j = index_tensor(rows, query.device)[:, None], index_tensor(columns, query.device)
        return self._of(i, j, self.slopes[..., None, None])

    def pairs(self, rows: Tensor, columns: Tensor, *, query: Tensor, key: Tensor, sizes: Sizes) -> Tensor:
        i, j = (part[:, None, None, None, None] for part in (rows, columns))
        return self._of(i, j, self.slopes[..., None, None])

    def select(self, batches: Tensor, heads: Tensor) -> Bias:
        slopes = self.slopes[batches if len(self.slopes) > 1 else 0, heads]
        return Slopes(slopes[:, None], self.offset[batches] if isinstance(self.offset, Tensor) else self.offset)

    def _of(self, i: Tensor, j: Tensor, slopes: Tensor) -> Tensor:
        offset = self.offset[:, None, None, None] if isinstance(self.offset, Tensor) else self.offset
        return slopes * -(i + offset - j).abs()


@dataclass(frozen=True, slots=True, eq=False)
class KernelForm:
    scale: float | None = None
    """None for 1 / sqrt(D)."""
    left: int | None = None
    """The farthest earlier key of a query; None for all."""
    right: int | None = None
    """The farthest later key: 0 is causal; None for all."""
    cap: float = 0.0
    """The scores become cap tanh(scores / cap); 0 for none."""
    slopes: Tensor | None = None
    """Those of ALiBi, (H,) or (N, H)."""
    sink: Tensor | None = None
    """The score of one more key of value 0, of each head."""
    dropout: float = 0.0

    def call(self, query: Tensor, key: Tensor, rows: KernelRows, columns: KernelRows) -> Call:
        """The call of vectors laid out, (N, H, T, D) and (N, G, S, D)."""
        score: Score = ScaledDot(self.scale)
        score = SoftCapped(score, self.cap) if self.cap > 0 else score
        sink = self.sink
        weighing: Normalization = Softmax() if sink is None else SoftmaxWithSink(sink.reshape(-1).to(query.dtype))
        call, _ = make_call(query, key, key, score=score, normalization=weighing, mask=None, bias=None, dropout=0.0)
        offset = self._offset(rows, columns)
        masks = [m.bind(call.sizes, query.device) for m in self._masks(rows, columns, offset, query.device)]
        bias = None
        if self.slopes is not None:
            slopes = self.slopes.to(torch.promote_types(self.slopes.dtype, torch.float32))
            bias = Slopes(slopes.reshape(-1, query.shape[1]), offset)
        mask = None if not masks else masks[0] if len(masks) == 1 else And(tuple(masks))
        return replace(call, mask=mask, bias=bias)

    def _offset(self, rows: KernelRows, columns: KernelRows) -> int | Tensor:
        if rows.counts is columns.counts and rows.length == columns.length:
            return 0
        if rows.counts is None and columns.counts is None:
            return columns.length - rows.length
        keys = columns.length if columns.counts is None else columns.counts
        return keys - (rows.length if rows.counts is None else rows.counts)

    def _masks(
        self, rows: KernelRows, columns: KernelRows, offset: int | Tensor, device: torch.device
    ) -> list[Mask]:  # fmt: skip
        masks: list[Mask] = []
        if self.left is not None:
            right = rows.length + columns.length if self.right is None else self.right
            masks.append(Window(self.left, right, offset))
        elif self.right is not None:
            masks.append(Causal(offset + self.right))
        if rows.counts is not None:
            keys = torch.full((), columns.length, device=device) if columns.counts is None else columns.counts[:, None]
            is_real = torch.arange(rows.length, device=device) < rows.counts[:, None]
            masks.append(Lengths(torch.where(is_real, keys, 0), per_query=True))
        elif columns.counts is not None:
            masks.append(Lengths(columns.counts))
        return masks

    def of_one(self, number: Tensor) -> "KernelForm":
        if self.slopes is None or self.slopes.dim() == 1:
            return self
        return replace(self, slopes=self.slopes[number])


@dataclass(slots=True, kw_only=True, eq=False)
class KernelCall(AttentionCall):
    """One call of tensors (N, T, H, D), or packed, (total, H, D)."""

    rows: KernelRows
    columns: KernelRows
    form: KernelForm

    @classmethod
    def of(
        cls, function: str, vectors: tuple[Tensor, Tensor, Tensor], sequences: tuple[KernelRows, KernelRows],
        form: KernelForm, *, output: Tensor, lse: Tensor | None = None,
    ) -> "KernelCall":  # fmt: skip
        """The call of queries, keys and values; `lse` is (N, H, T), or of packed sequences (H, total)."""
        kernel = KernelLse()
        kernel.operator, kernel.lse = function, lse
        return cls(
            query=vectors[0], key=vectors[1], value=vectors[2], rows=sequences[0], columns=sequences[1], form=form,
            output=output, how=function, dropped=form.dropout, kernel=kernel,
        )  # fmt: skip

    def computed(self) -> tuple[Tensor, Tensor]:
        return self.rows.laid_out(self.query), self.columns.laid_out(self.key)

    def call_of(self, query: Tensor, key: Tensor) -> Call:
        return self.form.call(query, key, self.rows, self.columns)

    def mask_of(self, sizes: Sizes, policy: RetentionPolicy) -> tuple[GivenMask, Mask | None]:
        return GivenMask(fresh=Fresh(slopes=self.form.slopes, sinks=self.form.sink)), None

    def value_layout(self, sizes: Sizes) -> LaidOut:
        return self.columns.laid_out

    def output_layout(self, sizes: Sizes) -> LaidOut:
        return self.rows.laid_out

    def read(self, policy: RetentionPolicy, name: str) -> Observation:
        if self.rows.starts is None:
            return AttentionCall.read(self, policy, name)
        query, key, rows, columns, form = self.query, self.key, self.rows, self.columns, self.form
        sizes = Sizes((rows.number,), query.shape[-2], key.shape[-2], rows.length, columns.length, True)
        sources, fresh = Fresh(), self.mask_of(sizes, policy)[0].fresh
        query = policy.keep(query, f"queries of {name}", sources)
        key = policy.keep(key, f"keys of {name}", sources)

        def call() -> Call:
            return form.call(rows.laid_out(query), columns.laid_out(key), rows, columns)

        factors = Factors(
            call, self._state(policy, fresh), sizes=sizes, fresh=fresh, sources=sources,
            of_kernel=self.kernel.operator, within=with_graph if policy.graph else undisturbed,
        )  # fmt: skip
        beside = self.beside(policy, name, sizes, query.dtype)
        notes = [f"packed documents, each a sequence of the map: {rows.number}"]
        return Observation(
            factors, notes, "dropout" if self.dropped else PackedRebuilding(self, factors), beside=beside
        )

    def state(self, call: Call, given: GivenMask, policy: RetentionPolicy, fresh: Fresh) -> Tensor | None:
        return self._state(policy, fresh)

    def _state(self, policy: RetentionPolicy, fresh: Fresh) -> Tensor | None:
        # Kernels differ in whether a sink counts.
        if policy.graph or self.kernel.lse is None or self.form.sink is not None:
            return None
        states = self.rows.row_states(self.kernel.lse.detach()).to(self.query.device)
        if self.rows.counts is not None:
            places = torch.arange(self.rows.length, device=states.device)
            states = states.masked_fill((places >= self.rows.counts[:, None])[:, None], -torch.inf)
        # The row of a query without keys has +inf here, and -inf in a map.
        return policy.keep(states.masked_fill(states == torch.inf, -torch.inf).contiguous(), "log-sum-exp", fresh)

    def evidence(self, call: Call, fresh: Fresh | None) -> Evidence | None:
        return None if self.rows.counts is not None else AttentionCall.evidence(self, call, fresh)

    def query_key_value(self) -> CallVectors:
        return CallVectors(*self.computed(), self.columns.laid_out(self.value))


@dataclass(frozen=True, slots=True, eq=False)
class PackedRebuilding(Rebuilding):
    """The output of a packed call. A row is rebuilt from its own document: all of them laid out may be far larger."""

    of: KernelCall
    factors: Factors

    @property
    def queries(self) -> int:
        return len(self.of.query)

    def some(self, rows: range) -> Rebuilt:
        one, place = self._document(rows)
        return one.some(place)

    def whole(self) -> Rebuilt:
        return self._of(self.of.form, self.of.rows, self.of.columns).whole()

    def rounding(self, rows: range) -> Tensor:
        one, place = self._document(rows)
        return one.rounding(place)

    def _document(self, rows: range) -> tuple[CallRebuilding, Any]:
        of = self.of
        own, number, place = of.rows.document_of(min(rows.start, self.queries - 1))
        return self._of(of.form.of_one(number), own, of.columns.take(number)), place

    def _of(self, form: KernelForm, rows: KernelRows, columns: KernelRows) -> CallRebuilding:
        of, output = self.of, self.of.output
        assert output is not None, "it is read after it ran"
        call = form.call(rows.laid_out(of.query.detach()), columns.laid_out(of.key.detach()), rows, columns)
        rebuilt = rows.laid_out(output.detach())
        return CallRebuilding(call, columns.laid_out(of.value.detach()), rebuilt, self.factors)
