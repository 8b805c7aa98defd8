"""The weights of a call while it is edited: a call with its mask and bias, factors, and replaced heads."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import Bias
from regard.call.biases.combined import added
from regard.call.masks.base import And, Mask
from regard.functional import Attended, run_call
from regard.kernels import choose_backend
from regard.kernels.base import BackendName, Call
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.combined import ScaledSource, SumSource, row_sums
from regard.maps.sources.source import Source


@dataclass(frozen=True, slots=True, eq=False)
class Replaced:
    weights: Source
    """Those of (B, n) flat_heads, n heads in the order of `heads`."""
    heads: Tensor
    where: Tensor
    """The rows: bool (B or 1, n, T or 1)."""


@dataclass(frozen=True, slots=True, eq=False)
class EditedWeights:
    call: Call
    """The model's call, with the masks and biases of the edits."""
    factor: Tensor | None = None
    """The factor of the weights, (B or 1, H or 1, T or 1); None for 1."""
    replaced: tuple[Replaced, ...] = ()
    """Heads with replaced weights; the last one wins for a row."""
    words: tuple[str, ...] = ()
    hides_keys: bool = False

    def masked(self, mask: Mask, word: str) -> "EditedWeights":
        """The weights of the pairs a bound mask allows; each row keeps its sum, unless no key is left to it."""
        before = () if self.call.mask is None else self.call.mask.factors()
        call = replace(self.call, mask=And((*before, mask)) if before else mask)
        replaced = self._reweighted(self._rendered(mask)) if self.replaced else ()
        return replace(self, call=call, replaced=replaced, words=(*self.words, word), hides_keys=True)

    def biased(self, bias: Bias, word: str) -> "EditedWeights":
        """The weights times exp(bias), each row scaled so it keeps its sum."""
        call = replace(self.call, bias=added(self.call.bias, bias))
        replaced = self._reweighted(self._exponential(bias)) if self.replaced else ()
        return replace(self, call=call, replaced=replaced, words=(*self.words, word))

    def scaled(self, factor: Tensor, word: str) -> "EditedWeights":
        """The weights times factors (B or 1, H or 1, T or 1)."""
        whole = factor if self.factor is None else self.factor * factor
        replaced = tuple(self._times(one, factor) for one in self.replaced)
        return replace(self, factor=whole, replaced=replaced, words=(*self.words, word))

    def with_heads(self, replaced: Replaced, word: str) -> "EditedWeights":
        return replace(self, replaced=(*self.replaced, replaced), words=(*self.words, word))

    def _rendered(self, mask: Mask) -> Tensor:
        sizes, device = self.call.sizes, self.call.query.device
        return mask.block(range(sizes.queries), range(sizes.keys), sizes=sizes, device=device).to(torch.float32)

    def _exponential(self, bias: Bias) -> Tensor:
        sizes, nothing = self.call.sizes, self.call.query.new_empty(0)
        return bias.block(range(sizes.queries), range(sizes.keys), query=nothing, key=nothing, sizes=sizes).exp()

    def _reweighted(self, factors: Tensor) -> tuple[Replaced, ...]:
        return tuple(replace(one, weights=self._keeping_sums(one, factors)) for one in self.replaced)

    def _keeping_sums(self, one: Replaced, factors: Tensor) -> Source:
        chosen = factors if factors.shape[1] == 1 else factors[:, one.heads]
        before = row_sums(one.weights)
        scaled = ScaledSource(one.weights, self._of_flat_heads(one, chosen))
        after = row_sums(scaled)
        kept = torch.where(after == 0, 0.0, before / after.masked_fill(after == 0, 1.0))
        return ScaledSource(scaled, kept.reshape(-1, kept.shape[-1], 1).to(scaled.dtype))

    def _times(self, one: Replaced, factor: Tensor) -> Replaced:
        chosen = factor if factor.shape[1] == 1 else factor[:, one.heads]
        return replace(one, weights=ScaledSource(one.weights, self._of_flat_heads(one, chosen[..., None])))

    def _of_flat_heads(self, one: Replaced, tensor: Tensor) -> Tensor:
        """A tensor (B or 1, n or 1, t, s) with one row per flat head of the replaced heads."""
        lead = (self.call.sizes.flat_batch, len(one.heads))
        return tensor.expand(*lead, *tensor.shape[2:]).flatten(0, 1).to(one.weights.dtype)

    def run(self, values: Tensor, backend: BackendName | None = None) -> "EditedCall":
        chosen = choose_backend(self.call, backend)
        attended = run_call(self.call, values, values, backend, return_weights=True, keep_values=False)
        assert isinstance(attended, Attended)
        sizes, weights = self.call.sizes, attended.weights
        output = attended.output.reshape(sizes.flat_batch, sizes.heads, sizes.queries, -1)
        source = weights.source
        if self.factor is not None:
            output = output * self.factor[..., None].to(output.dtype)
            whole = self.factor.expand(sizes.flat_batch, sizes.heads, -1).flatten(0, 1)
            source = ScaledSource(source, whole[..., None].to(source.dtype))
        for one in self.replaced:
            output = self._put(output, one, values)
            source = self._joined(source, one)
        output = output.reshape(*sizes.leading, *output.shape[-2:])
        final = weights if source is weights.source else AttentionMap(source)
        return EditedCall(output, final, weights, f"{chosen.name}: {', '.join(self.words)}", self.hides_keys)

    def _put(self, output: Tensor, one: Replaced, values: Tensor) -> Tensor:
        group = self.call.group
        own = values[:, one.heads // group] if group > 1 or len(one.heads) < values.shape[1] else values[:, one.heads]
        made = (AttentionMap(one.weights) @ own.to(one.weights.dtype)).to(output.dtype)
        made = torch.where(one.where[..., None], made, output[:, one.heads])
        return output.index_copy(1, one.heads, made)

    def _joined(self, source: Source, one: Replaced) -> Source:
        sizes, device = self.call.sizes, one.heads.device
        batch, heads = sizes.flat_batch, sizes.heads
        place = torch.zeros(heads, dtype=torch.long, device=device)
        place[one.heads] = torch.arange(len(one.heads), device=device)
        flat_heads = torch.arange(batch, device=device)[:, None] * len(one.heads) + place
        rows = torch.zeros(batch, heads, one.where.shape[-1], dtype=torch.bool, device=device)
        rows[:, one.heads] = one.where.expand(batch, -1, -1)
        is_new = rows.flatten(0, 1)[..., None]
        wide = one.weights.choose(flat_heads.reshape(-1), sizes.leading)
        return SumSource(
            (ScaledSource(source, (~is_new).to(source.dtype)), ScaledSource(wide, is_new.to(source.dtype)))
        )


@dataclass(frozen=True, slots=True, eq=False)
class EditedCall:
    output: Tensor
    """(batch..., H, T, E)"""
    weights: AttentionMap
    softmax: AttentionMap
    plan: str
    hides_keys: bool
