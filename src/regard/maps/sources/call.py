"""The weights of one attention call, computed from its queries, its keys and one normalizer for each row."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from regard.call.masks.basic import Causal
from regard.call.normalizations import Softmax
from regard.call.shapes import UNNAMED, Dimensions, Rows, take, take_rows
from regard.errors import ArgumentError, ShapeError
from regard.kernels import choose_backend, execute
from regard.kernels.base import Backend, Call
from regard.maps.sources.derived import WeightedSource
from regard.maps.sources.dot_scores import BufferedPart, DotFactors
from regard.maps.sources.factors import Factors
from regard.maps.sources.source import NamedSource, Part, Piece, Scratch, Source, Statistic
from regard.maps.sources.values import NOTHING, CallValues, of_heads
from regard.maps.statistics import definitions as st
from regard.maps.statistics.of_softmax import DotSoftmax
from regard.maps.statistics.tiles import ask
from regard.tensors.guards import run_state


@dataclass(frozen=True, slots=True, eq=False)
class CallSource(NamedSource):
    """The weights of an attention call, from its scores and row state; it may have values too."""

    factors: Factors
    shape: torch.Size = field()
    """(batch..., H, T, S)."""
    chosen: Backend | None = None
    """The backend for products; None for the first one able to."""
    may_be_beside: CallValues | None = None
    name: str = ""
    names: Dimensions | None = None
    """The names of its dimensions; None for those of the call's documentation."""
    chosen_key_heads: Tensor | None = None
    """The key heads of a choice of flat heads; None for those of a whole call."""

    @property
    def beside(self) -> CallValues:
        """Values and gradient of the call. None stands for an empty object, because torch.compile cannot make one."""
        return NOTHING if self.may_be_beside is None else self.may_be_beside

    @property
    def call(self) -> Call:
        return self.factors.call

    @property
    def state(self) -> Tensor:
        return self.factors.state_of(self.factors.call)

    @property
    def backend(self) -> Backend:
        return choose_backend(self.factors.form, None) if self.chosen is None else self.chosen

    @property
    def dtype(self) -> torch.dtype:
        return self.factors.form.compute_dtype

    @property
    def device(self) -> torch.device:
        return self.factors.form.query.device

    @property
    def width(self) -> int:
        call = self.factors.form
        return call.score.pair_width(call.query.shape[-1])

    @property
    def dimensions(self) -> Dimensions:
        sizes = self.factors.sizes
        return Dimensions.of_call(len(sizes.batch), has_heads=sizes.has_heads) if self.names is None else self.names

    @property
    def key_heads(self) -> Tensor:
        if self.chosen_key_heads is not None:
            return self.chosen_key_heads
        call = self.factors.form
        of_sequence = torch.arange(call.sizes.kv_heads).repeat_interleave(call.group)
        return of_sequence.repeat(call.sizes.flat_batch)

    @property
    def value(self) -> Tensor | None:
        """The saved values for each flat_head, (flat_heads, S, E)."""
        return None if self.beside.value is None else self.beside.value()

    def tensors(self) -> list[Tensor]:
        return [*self.factors.tensors(), *self.beside.held()]

    def __str__(self) -> str:
        if self.name:
            return self.name
        call = self.call
        mask = "" if call.mask is None else f", {call.mask}"
        return f"{call.normalization} of {call.score}{mask}{'' if call.bias is None else ', with a bias'}"

    def gradient(self, grad_output: Tensor | None, asked: str) -> WeightedSource:
        return WeightedSource(*self._sides(f"{asked}()", grad_output), asked, alone=asked == "gradient")

    def _sides(self, asked: str, grad_output: Tensor | None) -> tuple["CallSource", Tensor, Tensor]:
        """The weights, dO and V. A saved gradient has no graph, so its cofactors need none."""
        if grad_output is None and any(tensor.requires_grad for tensor in self.tensors()):
            return self.mapped(Tensor.detach)._sides(asked, None)  # noqa: SLF001  (its own)
        value = self.beside.values_for(asked)
        expected = (*self.leading, self.queries, value.shape[-1])
        if grad_output is None:
            grad_output = self.beside.gradient_for(asked)
        elif tuple(grad_output.shape) != expected:
            raise ShapeError(f"{asked} needs the output's gradient {expected}, got {tuple(grad_output.shape)}")
        return self, grad_output.reshape(self.flat_heads, *expected[-2:]).to(self.dtype), value.to(self.dtype)

    def columns(self, rows: range) -> range:
        call = self.factors.form
        return range(call.sizes.keys) if call.mask is None else call.mask.key_range(rows, call.sizes)

    def part(self, flat_heads: range, scratch: Scratch | None = None) -> Part:
        call, state = self.factors.read()
        scale = None if scratch is None else _dot_scale(call)
        if scratch is not None and scale is not None:
            return BufferedPart(call, scale, scratch.of(self, lambda: DotFactors(call, state)), flat_heads)
        if len(flat_heads) < state.shape[0] * state.shape[1]:
            call = call.select(torch.arange(flat_heads.start, flat_heads.stop, device=state.device))
            state = state.flatten(0, 1)[flat_heads.start : flat_heads.stop, None]
        return partial(_weights, call, state)

    def softmax_factors(self) -> Factors | None:
        return self.factors if isinstance(self.factors.form.normalization, Softmax) else None

    def pairs(self, rows: Tensor, columns: Tensor) -> Tensor:
        call, state = self.factors.read()
        scores = call.pair_scores(rows, columns)
        return call.normalization.weights(scores[..., None], state[..., rows]).squeeze(-1).flatten(0, 1)

    def points(self, flat_heads: Tensor, rows: Tensor, columns: Tensor) -> Tensor:
        call, state = self.factors.read()
        heads = call.sizes.heads
        if call.bias is not None:
            return Source.points(self, flat_heads, rows, columns)
        batch, head = flat_heads // heads, flat_heads % heads
        owners = batch if heads == 1 else head  # as in `Call.select`
        query, key = call.query[batch, head, rows], call.key[batch, head // call.group, columns]
        score = call.score.select(owners)
        scores = score.block(query[:, None, None].to(self.dtype), key[:, None, None].to(self.dtype))
        if call.mask is not None:
            scores = scores.masked_fill(~call.mask.allowed(batch, head, rows, columns)[:, None, None, None], -torch.inf)
        state = state[batch, head, rows][:, None, None]
        return call.normalization.select(owners).weights(scores, state).flatten()

    def product(self, x: Tensor) -> Tensor:
        return self.laid_out(self._product_by_flat_heads(self.call, x))

    def _product_by_flat_heads(self, call: Call, x: Tensor) -> Tensor:
        call, value = call.for_values(x, self.leading)
        return execute(self.backend, call, value)[0].flatten(0, 1)

    def at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        match statistic:
            case st.Product(x):
                return (self._product_by_flat_heads(self.call, self.laid_out(self._for_flat_heads(x))),)
            case st.Distance(offset):
                return self._distance(self.call, offset)
            case st.Pooled() if not statistic.of_largest and self.backend.name == "fused":
                return self._pooled(self.call, statistic)
        if statistic.needs_tiles:
            return None
        form = DotSoftmax.of(*self.factors.read(), self.backend)
        if form is None:
            return None
        found: tuple[Tensor, ...]
        match statistic:
            case st.Received():
                found = (form.received(),)
            case st.Entropy():
                found = (form.entropy(),)
            case st.ParticipationRatio():
                found = form.participation_ratio()
            case st.TransposedProduct(x):
                found = (form.transposed(self._for_flat_heads(x).unflatten(0, form.state.shape[:2])).mT,)
            case _:
                return None
        return tuple(answer.flatten(0, 1) for answer in found)

    def _for_flat_heads(self, x: Tensor) -> Tensor:
        return x.expand(self.flat_heads, *x.shape[1:])

    def _pooled(self, call: Call, picture: st.Pooled) -> tuple[Tensor] | None:
        rows, columns = picture.grid.rows, picture.grid.columns
        if columns.count > call.query.shape[-1]:
            return None
        indicators = torch.nn.functional.one_hot(columns.owners(self.device), columns.count)
        by_columns = self._product_by_flat_heads(call, indicators.to(self.dtype))
        return (picture.finished(rows.reduce(by_columns, -2, 0, largest=False)[0]),)

    def _distance(self, call: Call, offset: int) -> tuple[Tensor] | None:
        """The distance as a difference of two means, if no query sees a key after it. The means are measured from a
        position near the query: from the first one, the digits of a short distance would cancel."""
        mask, sizes = call.mask, call.sizes
        factors = () if mask is None else mask.factors()
        if not any(isinstance(m, Causal) and isinstance(m.offset, int) and m.offset <= offset for m in factors):
            return None
        j = torch.arange(sizes.keys, device=self.device, dtype=self.dtype)
        step = -(-sizes.keys // 32)
        values = torch.cat([torch.ones_like(j[:, None]), j[:, None] - j[::step]], -1)
        found = self._product_by_flat_heads(call, values)
        i = torch.arange(sizes.queries, device=self.device) + offset
        near = (i // step).clamp(0, found.shape[-1] - 2)
        mean = found.gather(-1, (near + 1).expand(found.shape[:-1])[..., None])[..., 0]
        return ((found[..., 0] * (i - near * step) - mean).clamp_min(0.0),)

    def choose(self, flat_heads: Tensor | None, leading: tuple[int, ...]) -> "CallSource":
        names = Dimensions.unknown(len(leading), UNNAMED)
        if flat_heads is None:
            return replace(self, shape=torch.Size((*leading, *self.shape[-2:])), names=names)
        call = self.call
        state = self.factors.state_of(call).flatten(0, 1)[flat_heads].unsqueeze(1)
        factors = Factors.given(call.select(flat_heads), state)
        beside, key_heads = self.beside.choose(flat_heads), self.key_heads[flat_heads.cpu()]
        shape = torch.Size((*leading, *self.shape[-2:]))
        return CallSource(factors, shape, self.backend, beside, self.name, names, key_heads)

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "CallSource":
        factors, backend = self.factors.mapped(change), self.backend
        # Another device may have no kernel for this dtype.
        form = factors.form
        backend = choose_backend(form, None) if backend.why_not(form, run_state(form.query)) else backend
        beside = self.beside.mapped(change)
        return CallSource(factors, self.shape, backend, beside, self.name, self.names, self.chosen_key_heads)

    def with_value(self, value: Tensor) -> "CallSource":
        """The call with values (batch..., G or H, S, E)."""
        call = self.call
        _, value = call.for_values(value, self.leading)
        return replace(self, may_be_beside=self.beside.with_value(of_heads(value, call.sizes.heads)))


def source_of_call(source: Source, asked: str) -> CallSource:
    return source if isinstance(source, CallSource) else source.refuse(asked)


def _weights(call: Call, state: Tensor, rows: Rows, columns: Rows) -> Piece:
    state, scale = take_rows(state, rows), None
    if isinstance(call.normalization, Softmax) and call.bias is None and call.sizes.heads == call.sizes.kv_heads:
        scale = call.score.dot_scale(call.query.shape[-1])
    if scale is not None:
        logs = _dot_logs(call, state, scale, rows, columns)
        return Piece(logs.exp(), logs)
    scores = call.scores(rows, columns)
    if not isinstance(call.normalization, Softmax):
        return Piece(call.normalization.weights(scores, state).flatten(0, 1))
    logs = (scores - _never_if_no_key(state)[..., None]).flatten(0, 1)
    return Piece(logs.exp(), logs)


def _dot_logs(call: Call, state: Tensor, scale: float, rows: Rows, columns: Rows) -> Tensor:
    """The logarithms (flat_heads, t, s) of the softmax of scaled dot products."""
    query, key, dtype = take(call.query, rows), take(call.key, columns), state.dtype
    if query.dtype != dtype or key.dtype != dtype:  # (A `to` that has nothing to do takes microseconds.)
        query, key = query.to(dtype), key.to(dtype)
    less = _never_if_no_key(state).flatten(0, 1).unsqueeze(-1)  # (An index takes twice the time of a function.)
    logs = torch.baddbmm(less, query.flatten(0, 1), key.flatten(0, 1).mT, beta=-1, alpha=scale)
    if call.mask is None:
        return logs
    masked = call.masked if logs.requires_grad else call.masked_
    return masked(logs.unflatten(0, call.query.shape[:2]), rows, columns).flatten(0, 1)


_never_if_no_key = partial(torch.nan_to_num, nan=torch.nan, posinf=torch.inf, neginf=torch.inf)
"""The log-sum-exp with +inf for -inf, so the weights of a row without keys are exp(-inf) = 0.

Rows without keys exist without a mask too: a compact kernel without a key near, a score function of -inf, an infinite
query.
"""


def _dot_scale(call: Call) -> float | None:
    return call.score.dot_scale(call.query.shape[-1]) if isinstance(call.normalization, Softmax) else None


def log_sum_exp(source: Source) -> Tensor:
    """The row state of a softmax, (batch..., H, T). See `AttentionMap.lse`."""
    call = source_of_call(source, "lse")
    if not isinstance(call.call.normalization.base, Softmax):
        raise ArgumentError(f"lse is the log-sum-exp of a softmax, and this map is {source}: it has none")
    return source.laid_out(call.state.flatten(0, 1))


def largest_score(source: Source) -> Tensor:
    """The largest score of each query, (batch..., H, T). See `AttentionMap.max_logit`."""
    made = source_of_call(source, "max_logit()")
    with torch.no_grad():
        # Under a softmax the largest weight is at least 1 / S, so its logarithm is exact to rounding.
        call = replace(made.call, normalization=Softmax(), dropout=0.0)
        plain = CallSource(Factors.given(call, None), made.shape, choose_backend(call, None))
        state = plain.state.flatten(0, 1)
        found = ask(plain, st.Largest())[0].log() + state
        return source.laid_out(found.masked_fill(state == -torch.inf, -torch.inf))
