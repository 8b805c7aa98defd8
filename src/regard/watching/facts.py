"""The mask of one watched call at the kernel, the distribution of its weight, and the keys that each query chose."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import fmean

import torch
from torch import Tensor

from regard.call.biases.base import Bias, DenseBias
from regard.call.masks.base import And, DenseMask
from regard.call.masks.basic import Causal, predicate
from regard.call.masks.row_spans import RowSpans
from regard.call.normalizations import Softmax
from regard.call.shapes import Sizes, take, take_pairs
from regard.errors import NotKeptError, OverwrittenError, RegardError
from regard.kernels import row_state
from regard.kernels.base import Call
from regard.kernels.recurrence import fault_of
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import CallSource
from regard.maps.sources.factors import ShiftedBias
from regard.maps.sources.linear_recurrent import LinearRecurrent
from regard.maps.sources.source import LinearSource
from regard.tensors.memory import widest_dtype
from regard.tensors.tile_sizes import fitting, ranges
from regard.tensors.undisturbed import undisturbed
from regard.watching.kept.mask_kind import MaskKind, kind_of
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
    read = _softmax_of(call)
    if read is None or read[0].normalization.has_base:
        return KeyChoice(None, without_first, None)
    own, state = read
    bias = None if isinstance(own.bias, DenseBias) else own.bias
    rest = [one for one in (() if own.mask is None else own.mask.factors()) if not isinstance(one, DenseMask)]

    def dense_sum(keys: Tensor) -> Tensor:
        mask = And((*rest, Causal(kind.offset), DenseMask(keys.to(own.key.device)[:, None, None])))
        return row_state(replace(own, bias=bias, mask=mask))

    with undisturbed():
        dense = dense_sum(real)
        first = torch.exp(dense_sum(torch.nn.functional.one_hot(first_key, own.sizes.keys).bool()) - dense)[
            lost.expand(dense.shape)
        ]
        shares = torch.exp(state - dense)[chose[:, None].expand(state.shape)]
    return KeyChoice(_share(shares), without_first, _share(first))


def _softmax_of(call: Observed) -> tuple[Call, Tensor] | None:
    """The call of a softmax whose dense bias, if any, hides keys and does nothing else, and its row state."""
    source = None if call.map is None else call.map.source
    if not isinstance(source, CallSource) or call.is_stored:
        return None
    own, state = source.factors.read()
    hides = own.bias.tensor.detach() if isinstance(own.bias, DenseBias) else torch.zeros(())
    is_choice = bool(((hides == 0) | (hides <= HIDDEN)).all()) and not isinstance(own.bias, ShiftedBias)
    return (own, state) if is_choice and isinstance(own.normalization, Softmax) else None


def _share(of_rows: Tensor) -> float | None:
    """The mean of shares in [0, 1]; None without any."""
    return float(of_rows.mean(dtype=widest_dtype(of_rows.device)).clamp(0.0, 1.0)) if of_rows.numel() else None


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
    count, rate, keys, chooser = call.blocks.number, call.blocks.rate, call.map.shape[-1], call.chooser
    on_blocks = call.map[..., keys - count :].sum(-1)
    weight = _share(on_blocks) or 0.0
    is_choice = chooser is not None and chooser.each < count
    read = _softmax_of(call) if is_choice and call.over_tokens is not None else None
    if chooser is None or read is None:
        return BlockFacts(rate, count, weight, chooser if is_choice else None)
    own, state = read
    earlier = predicate(
        lambda batch, head, query, key: (keys <= key + count) & (key + count < keys + (query + 1) // rate)
    )
    with undisturbed():
        dense = row_state(replace(own, normalization=own.normalization.base, bias=None, mask=earlier))
        shares = on_blocks.reshape(state.shape) * torch.exp(state - dense)
    ready = (torch.arange(own.sizes.queries, device=shares.device) + 1) // rate
    return BlockFacts(rate, count, weight, chooser, _share(shares[..., ready > chooser.each]))


@dataclass(frozen=True, slots=True, eq=False)
class Facts:
    """The mask of a call, and shares of the weight: means over rows with a key, over heads and over the batch. Shares
    are in [0, 1]."""

    mask: MaskKind
    later: float | None
    """The share on keys after the query's own position; None for unknown query positions, as in cross-attention."""
    first: float | None
    """The share on the first visible key (large for a sink)."""
    no_key: int
    """How many of the rows of all sequences have no key; rows the model then spread evenly count too."""
    rows: int
    seen: RowSpans
    choice: KeyChoice | None = None
    """The measures of the keys that each query chose; None for other masks."""
    blocks: BlockFacts | None = None
    """The blocks of tokens among the keys, of which the rest tells nothing; None without any."""
    fault: str = ""
    """The range that a factor of a linear recurrence does not keep."""

    def __str__(self) -> str:
        shares = (("later positions", self.later), ("the first key", self.first))
        said = ", ".join(f"{_percent(share)} on {what}" for what, share in shares if share is not None)
        rows = f"{self.no_key} of {self.rows} rows without a key" if self.no_key else ""
        mask = f"mask: {self.mask}{' (read from the weights)' if self.mask.of_weights else ''}"
        parts = (mask, self.choice, said and f"weight: {said}", rows, self.blocks, self.fault)
        return "; ".join(said for part in parts if (said := str(part or "")))


@torch.no_grad()
def facts_of(call: Observed) -> Facts:
    """Compute the facts of a call of `seen.calls`, in at most two passes over the map, in linear memory.

    Raises:
        NotKeptError: only statistics of the call were recorded, or it could not be read.
        OverwrittenError: the model has overwritten tensors of the map.

    >>> import regard
    >>> x = torch.zeros(1, 1, 4, 2)
    >>> class Attention(torch.nn.Module):
    ...     def forward(self, x):
    ...         return regard.attention(x, x, x, mask=regard.prefix(2))
    >>> model = Attention()
    >>> with regard.watch(model) as seen:
    ...     output = model(x)
    >>> print(facts_of(seen.calls[0]))
    mask: prefix of 2; weight: 12 % on later positions, 40 % on the first key
    """
    if call.map is None or not call.map.source.has_blocks:
        raise NotKeptError(f"{call.name!r}: nothing was kept from which its mask could be read")
    if call.kind == "compression":
        raise NotKeptError(f"{call.name!r} makes blocks of tokens, and has no mask")
    if call.blocks is not None:
        return _with_blocks(call, call.map.shape[-1] - call.blocks.number)
    if not min(call.sizes.map_shape):
        raise NotKeptError(f"{call.name!r} has an empty map {tuple(call.map.shape)}")
    factors = call.factors
    seen = spans_of_weights(call) if factors is None else spans_of_call(factors.call, factors.even)
    if isinstance(call.map.source, LinearSource):
        count, source = seen.first.shape[1] * call.sizes.flat_batch, call.map.source
        fault = fault_of(source.recurrence) if isinstance(source, LinearRecurrent) else None
        return Facts(kind_of(seen), 0.0, None, 0, count, seen, fault=str(fault or ""))
    kind, chooser = kind_of(seen), call.chooser
    if chooser is not None and kind.is_unknown and not kind.ahead and int(seen.count.max()) == chooser.each:
        # (Padding may leave a row fewer keys than were chosen.)
        kind = replace(kind, pattern="chosen", size=chooser.each, chooser=chooser.module)
    # (`scores * mask - 1e4 * (1 - mask)` hides keys.)
    changed = next((c.format(float(flag)) for c, flag in call.changed if kind.pattern == "none" and flag), "")
    kind = replace(kind, added=changed if factors is None else _two_numbers(factors.call.bias))
    is_known = call.sizes.queries == call.sizes.keys or kind.tells_positions
    no_key = (~seen.live).unflatten(0, seen.shape).any(1)
    return Facts(
        mask=kind,
        later=None if call.crosses is True or not is_known else _later(call, kind, seen),
        first=_on_first(call, seen),
        no_key=int(no_key.sum()) * (call.sizes.flat_batch // len(no_key)),
        rows=call.sizes.flat_batch * no_key.shape[1],
        seen=seen,
        choice=choice_of(call, kind, seen),
    )


def spans_of_call(call: Call, even: Tensor | None) -> RowSpans:
    """The visible keys by the mask and the bias of a call; `even` are the rows that the model spread evenly."""
    sizes, device = call.sizes, call.query.device
    found = None if call.bias is not None or even is not None else RowSpans.of(call.mask, sizes, device)
    if found is not None:
        return found

    def read(rows: range) -> tuple[Tensor, Tensor | None]:
        spread = even if even is None or even.shape[-1] == 1 else even[..., rows.start : rows.stop]
        return allowed_pairs(call, rows), spread

    return RowSpans.read(read, sizes.queries, fitting(CHUNK_ELEMENTS, sizes.flat_batch * sizes.heads * sizes.keys))


def allowed_pairs(call: Call, rows: range) -> Tensor:
    """The pairs that the mask and the bias of a call allow, for some rows: bool (B or 1, H or 1, rows, S)."""
    sizes, columns = call.sizes, range(call.sizes.keys)
    seen = torch.ones((1, 1, len(rows), sizes.keys), dtype=torch.bool, device=call.query.device)
    for factor in () if call.mask is None else call.mask.factors():
        if isinstance(factor, DenseMask) and factor.tensor.dim() == 4:
            # A slice is many times faster than single pairs.
            seen = seen & take_pairs(factor.tensor, rows, columns)
        else:
            seen = seen & call.allowed(factor, rows, columns)
    if isinstance(call.bias, DenseBias):
        vectors = {"query": take(call.query, rows), "key": call.key}
        seen = seen & (call.bias.block(rows, columns, **vectors, sizes=sizes) > HIDDEN)
    return seen


def spans_of_weights(call: Observed) -> RowSpans:
    """The visible keys by weights that a model computed itself, which are not 0, over all heads together."""
    assert call.map is not None
    weights, (queries, keys) = call.map, call.map.shape[-2:]
    if isinstance(weights.source, LinearSource):
        found = RowSpans.of(weights.source.mask, Sizes((1,), 1, 1, queries, keys, True), weights.device)
        assert found is not None, "it is a range for each query"
        return found
    heads = weights.shape[-3] if weights.dimensions.has_heads_last else 1
    has_keys = call.has_keys is not None and bool(call.has_keys)

    def read(rows: range) -> tuple[Tensor, Tensor | None]:
        block = weights.block(rows, range(keys)).reshape(-1, heads, len(rows), keys)
        seen = block != 0
        if has_keys:
            return seen.any(1, keepdim=True), None
        # Where a mask leaves no key, models spread a row evenly over hidden keys. Equal scores do so too.
        spread = (block.amax(-1) == torch.where(seen, block, torch.inf).amin(-1)) & (seen.sum(-1) > 1)
        return seen.any(1, keepdim=True), spread.all(1, keepdim=True)

    step = fitting(CHUNK_ELEMENTS, math.prod(weights.leading) * keys)
    return RowSpans.read(read, queries, step, is_exact=False)


def _with_blocks(call: Observed, positions: int) -> Facts:
    assert call.map is not None
    own: AttentionMap = call.map[..., :positions]
    facts = facts_of(replace(call, made=own, factors=None, is_stored=True, blocks=None, chooser=None))
    on_blocks = call.map[..., positions:].sum(-1).reshape(call.sizes.flat_batch, -1, facts.seen.count.shape[-1])
    sees = (on_blocks > 0).any(1)
    seen = replace(facts.seen, count=facts.seen.count + sees, live=facts.seen.live | sees)
    return replace(facts, seen=seen, no_key=int((~seen.live).sum()), blocks=blocks_of(call))


def _two_numbers(bias: Bias | None) -> str:
    """The two values of a bias with no other, such as a bool mask that is added: it hides no key."""
    if not isinstance(bias, DenseBias):
        return ""
    tensor = bias.tensor.detach()
    low, high = tensor.where(tensor > HIDDEN, torch.inf).min(), tensor.max()
    is_of_two = bool(((tensor == low) | (tensor == high) | (tensor <= HIDDEN)).all()) and low < high
    return f"{float(low):g} and {float(high):g} are added to the scores" if is_of_two else ""


def _mean(call: Observed, seen: RowSpans, of_rows: Tensor) -> float | None:
    """The mean of values (..., T) over the rows with a key."""
    sizes = call.sizes
    live = seen.live.unflatten(0, seen.shape).expand(sizes.flat_batch, sizes.heads, sizes.queries)
    return _share(of_rows.reshape(live.shape)[live])


def _on_first(call: Observed, seen: RowSpans) -> float | None:
    assert call.map is not None
    shape = call.sizes.flat_batch, call.sizes.heads, call.sizes.queries
    first = seen.keys.unflatten(0, seen.shape).any(1).long().argmax(-1).expand(shape[0])
    places, which = first.unique(return_inverse=True)
    columns = [call.map.block(range(shape[2]), range(n, n + 1)).reshape(shape) for n in places.tolist()]
    return _mean(call, seen, torch.stack(columns)[which, torch.arange(shape[0], device=which.device)])


def _later(call: Observed, kind: MaskKind, seen: RowSpans) -> float | None:
    assert call.map is not None
    if not kind.ahead:
        return 0.0
    weights, (queries, keys) = call.map, call.map.shape[-2:]
    # (Made before the blocks: small tensors between large ones keep glibc from using the memory of the last block.)
    places = torch.arange(keys, device=weights.device)
    found = torch.empty(weights.shape[:-1], dtype=weights.dtype, device=weights.device)
    for rows in ranges(queries, fitting(CHUNK_ELEMENTS, math.prod(weights.leading) * keys)):
        later = places > (torch.arange(rows.start, rows.stop, device=weights.device) + kind.offset)[:, None]
        found[..., rows.start : rows.stop] = (weights.block(rows, range(keys)) * later).sum(-1)
    return _mean(call, seen, found)


def _percent(share: float) -> str:
    """A share in percent, with two significant digits.

    >>> _percent(0.0), _percent(0.12345), _percent(0.00001), _percent(1.0)
    ('0 %', '12 %', '0.001 %', '100 %')
    """
    return f"{float(f'{100 * share:.2g}'):g} %" if share < 0.995 else f"{100 * share:.3g} %"


MOST_CALLS = 16
"""The most calls of one module in the report: a generation makes thousands, of milliseconds each."""


def facts_by_mask(calls: Sequence[Observed]) -> list[str]:
    """The facts of the calls of one module: a line for each kind of mask, with the means of its calls. Of many calls
    some are read, the first and the last among them, and the lines say how many."""
    kinds: dict[tuple[object, ...], list[Facts]] = {}
    most = min(len(calls), MOST_CALLS)
    for call in (calls[round(n * (len(calls) - 1) / max(1, most - 1))] for n in range(most)):
        try:
            facts = facts_of(call)
        except OverwrittenError as error:
            call.notes.append(f"not read: {error}")
        except RegardError:
            continue
        else:
            kinds.setdefault((facts.mask.pattern, facts.mask.size, facts.mask.padding, facts.fault), []).append(facts)
    lines = []
    for alike in kinds.values():
        later, first = (
            fmean(known) if (known := [share for share in shares if share is not None]) else None
            for shares in ([one.later for one in alike], [one.first for one in alike])
        )
        no_key, rows = sum(one.no_key for one in alike), sum(one.rows for one in alike)
        mean = replace(alike[-1], later=later, first=first, no_key=no_key, rows=rows)
        several = f"; {len(alike)} of {most} calls" if len(kinds) > 1 else ""
        lines.append(f"{mean}{several}{f'; read from {most} of {len(calls)} calls' if most < len(calls) else ''}")
    return lines
