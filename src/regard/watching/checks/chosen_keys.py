"""Keys that each query chose, as by an indexer: the share of the weight that they have among all causal keys."""

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.call.biases.base import DenseBias
from regard.call.masks.base import And, DenseMask
from regard.call.masks.basic import Causal
from regard.call.masks.row_spans import RowSpans
from regard.call.normalizations import Softmax
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.maps.sources.call import CallSource
from regard.maps.sources.row_shift import ShiftedBias
from regard.tensors.memory import widest_dtype
from regard.tensors.tile_sizes import fitting, ranges
from regard.tensors.undisturbed import undisturbed
from regard.watching.kept.mask_kind import MaskKind
from regard.watching.kept.mask_reading import CHUNK_ELEMENTS, HIDDEN
from regard.watching.observed import Observed
from regard.watching.running.observed_call import KeysChosen


@dataclass(frozen=True, slots=True)
class KeyChoice:
    """The chosen keys of a call, over the rows that had to choose: those with more causal keys than they may see."""

    recall: float | None
    """The share of the dense map's weight on the chosen keys, the mean over rows and heads; None if it is unknown."""
    without_first: float
    """The share of these rows that did not choose the first key."""
    first: float | None
    """The dense map's weight on the first key in those, the mean; None without such rows, or if it is unknown."""

    def __str__(self) -> str:
        return "" if self.recall is None else f"recall: they have {self.recall:.1%} of the dense map's weight"


def choice_of(call: Observed, kind: MaskKind, seen: RowSpans) -> KeyChoice | None:
    r"""Measure a choice in linear memory: the recall is $\exp(\mathrm{lse}_\mathrm{chosen} - \mathrm{lse}_\mathrm{all
    causal})$ of each row, from one pass over the scores without the choice. None for other masks."""
    if kind.pattern != "chosen" or kind.size is None:
        return None
    place = torch.arange(seen.count.shape[-1], device=seen.count.device) + kind.offset
    hidden = None if call.chooser is None else call.chooser.hidden.to(place.device)
    real = torch.ones(1, seen.keys.shape[-1], dtype=torch.bool, device=place.device) if hidden is None else ~hidden
    # Of padding, there is nothing to choose.
    chose = (real.cumsum(-1)[:, place] > kind.size) & real[:, place]
    first_key = real.long().argmax(-1)
    earliest, live = (x.unflatten(0, seen.shape) for x in (seen.first, seen.live))
    lost = (earliest > first_key[:, None, None]) & chose[:, None] & live
    if not bool(chose.any()):
        return None
    without_first = float(lost[chose[:, None].expand_as(lost)].double().mean())
    recalled = _recalled(call, kind.offset, real, first_key)
    if recalled is None:
        return KeyChoice(None, without_first, None)
    shares, on_first = (x.to(widest_dtype(x.device)) for x in recalled)
    first = float(on_first[lost.expand(shares.shape)].mean()) if bool(lost.any()) else None
    recall = shares[chose[:, None].expand(shares.shape)].mean().clamp(0.0, 1.0)
    return KeyChoice(float(recall), without_first, first)


def _recalled(call: Observed, offset: int, real: Tensor, first_key: Tensor) -> tuple[Tensor, Tensor] | None:
    """The share of the dense weight on the chosen keys, and on the first key, (B, H, T) each. The dense map has the
    real keys, (B or 1, S)."""
    source = None if call.map is None else call.map.source
    if not isinstance(source, CallSource) or call.is_stored:
        return None
    own, chosen = source.factors.read()
    is_plain = isinstance(own.normalization, Softmax) and not own.normalization.has_base
    if not is_plain or isinstance(own.bias, ShiftedBias) or not _is_choice(own):
        return None
    rest = [one for one in (own.mask.factors() if own.mask is not None else ()) if not isinstance(one, DenseMask)]
    bias = None if isinstance(own.bias, DenseBias) else own.bias
    first = torch.nn.functional.one_hot(first_key, own.sizes.keys).bool()
    dense_mask, first_mask = (DenseMask(one.to(own.key.device)[:, None, None]) for one in (real, first))
    with undisturbed():
        dense = row_state(replace(own, bias=bias, mask=And((*rest, Causal(offset), dense_mask))))
        at_first = row_state(replace(own, bias=bias, mask=And((*rest, Causal(offset), first_mask))))
        return torch.exp(chosen - dense), torch.exp(at_first - dense)


@dataclass(frozen=True, slots=True)
class BlockFacts:
    rate: int
    count: int
    weight: float
    """The share of the weight on blocks, the mean over rows and heads."""
    chosen: KeysChosen | None = None
    """The choice of blocks for each query; None where each has all earlier ones."""
    recall: float | None = None
    """The share of the weight that all earlier blocks would get on the chosen ones, the mean over the rows with more
    earlier blocks than they may see; None if it is unknown."""

    def __str__(self) -> str:
        blocks = "block" if self.count == 1 else "blocks"
        said = f"{self.count} {blocks} of {self.rate} tokens, with {self.weight:.1%} of the weight"
        if self.chosen is not None:
            said += f": {self.chosen.each} of the earlier ones for each query, chosen by {self.chosen.module}"
        return said if self.recall is None else f"{said}, with {self.recall:.1%} of the weight that all would get"


def blocks_of(call: Observed) -> BlockFacts:
    assert call.map is not None
    assert call.blocks is not None
    count, rate, keys = call.blocks.number, call.blocks.rate, call.map.shape[-1]
    weight = float(call.map[..., keys - count :].sum(-1).mean().clamp(0.0, 1.0))
    if call.chooser is None or call.chooser.each >= count:
        return BlockFacts(rate, count, weight)
    source = call.map.source
    if call.over_tokens is None or not isinstance(source, CallSource) or call.is_stored:
        return BlockFacts(rate, count, weight, call.chooser)
    own, places = source.factors.call, torch.arange(count, device=call.map.device)
    bare, shares = replace(own, mask=None, bias=None), []
    if isinstance(own.normalization, Softmax) and _is_choice(own):
        for rows in ranges(own.sizes.queries, fitting(CHUNK_ELEMENTS, own.sizes.flat_batch * own.sizes.heads * count)):
            ready = (torch.arange(rows.start, rows.stop, device=places.device) + 1) // rate
            with undisturbed():
                scores = bare.scores(rows, range(keys - count, keys))
                chosen = own.scores(rows, range(keys - count, keys)) > HIDDEN
            dense = scores.masked_fill(places >= ready[:, None], -torch.inf).logsumexp(-1)
            share = torch.exp(scores.masked_fill(~chosen, -torch.inf).logsumexp(-1) - dense)
            shares.append(share[..., ready > call.chooser.each])
    found = torch.cat(shares, -1) if shares else torch.empty(0, device=places.device)
    recall = float(found.mean(dtype=widest_dtype(found.device)).clamp(0.0, 1.0)) if found.numel() else None
    return BlockFacts(rate, count, weight, call.chooser, recall)


def _is_choice(own: Call) -> bool:
    """Whether a dense bias hides keys and does nothing else."""
    if not isinstance(own.bias, DenseBias):
        return True
    tensor = own.bias.tensor.detach()
    return bool(((tensor == 0) | (tensor <= HIDDEN)).all())
