"""Statistics of each head: distance, entropy and positions of its attention."""

from collections.abc import Collection, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.call.shapes import index_tensor
from regard.errors import ArgumentError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.combined import shares_of_sizes
from regard.maps.sources.source import LinearSource, Statistic
from regard.maps.statistics.definitions import (
    Entropy,
    Largest,
    ParticipationRatio,
    SumsOfKeys,
    TopWeights,
    distance_in,
)
from regard.maps.statistics.divergence import divergence
from regard.maps.statistics.key_sets import AtPlaces, OfEqualTokens
from regard.maps.statistics.tiles import ask, ask_all
from regard.tensors.kinds import refuse_wrong_kinds
from regard.watching.analysis.tables import HeadTable, Maps, named, table, watched
from regard.watching.module_names import Names
from regard.watching.observed import Record
from regard.watching.report import given_up, layers_of, maps_of_layers, require_all_heads

TokenTexts = Sequence[str] | Sequence[Sequence[str]]


@refuse_wrong_kinds
@torch.no_grad()
def head_table(
    maps: Maps, tokens: TokenTexts | None = None, *, ids: Tensor | None = None, skip: Names = ()
) -> HeadTable:
    r"""Compute statistics of every head, each a mean over the queries with a key and over the batch.

    Query i is at position p = S - T + i, as under a causal mask with a cache.

    - distance: $\sum_j P_{ij} |p - j|$ in positions
    - entropy: in nats
    - self: $P_{ip}$, the weight on the query's own position
    - previous: $P_{i,p-1}$, the weight on the position before it
    - first: $P_{i0}$, the weight on the first position, over queries at other positions; large for a sink
    - induction, if tokens are given: the weight on keys j < p after an equal token (token j - 1 equals the query's
      own), over queries with such keys. It is 1 for a head that always finds the token that followed last time.
    - duplicate, if tokens are given: the weight on keys j < p with a token equal to the query's own, over queries with
      such keys

    Args:
        maps: the result of `regard.watch`, a model with its inputs, or maps or tensors (batch..., H, T, S).
        tokens: the tokens as strings, one for each key, for induction and duplicate; or a list of them for each
            sequence of the batch.
        ids: the same as numbers, (batch..., S) or (S,), such as the inputs of a model.
        skip: the modules of a watched model that the table need not cover, as `names` of `regard.watch`.

    Returns:
        A table with one layer for each map; NaN if no query counts (a sequence without repetition, T = S = 1), or
        if the map has not as many keys as there are tokens. Memory is linear in T and S; induction goes by tiles.

    Attention to another sequence has no distance and no position of its own: these columns are NaN. Attention over the
    outputs of layers, and a convolution beside attention, are no layers of the table.

    Of linear attention, whose weights have signs, the columns are those of the shares $|P_{ij}| / \sum_j |P_{ij}|$.
    For maps with statistics only, the table has distance and entropy where recorded. One of "top_weight", "top_keys"
    and "participation_ratio" must be recorded too: it marks the queries with keys.

    Raises:
        ShapeError: the tokens or ids fit none of the maps.
        ArgumentError: `tokens` are no strings, or came with `ids`.
        NotSeenError: modules of the watched model besides those in `skip` mix positions and were not read.
        NotKeptError: a map's statistics give none of the columns, or do not mark the queries with keys.

    Source: Olsson et al. 2022 (arXiv:2209.11895), for induction ("prefix matching"); Clark et al. 2019
    (arXiv:1906.04341), for the others; Wang et al. 2022 (arXiv:2211.00593), for duplicate tokens.

    >>> import regard
    >>> q = torch.zeros(1, 2, 3, 1)
    >>> weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
    >>> print(head_table(weights, ["so", "and", "so"]))
    layer  head  distance  entropy     self  previous    first  induction  duplicate
    0         0      0.50     0.60     0.61      0.42     0.42       0.33       0.33
    0         1      0.50     0.60     0.61      0.42     0.42       0.33       0.33
    """
    maps, ids = watched(maps), ids if tokens is None else _ids_of(tokens, ids)
    require_all_heads(maps, "head_table()")
    rest, record = given_up(maps, skip, "head_table()"), getattr(maps, "record", None)
    crosses: list[bool] = []
    if isinstance(record, Record):
        calls = layers_of(record, crossing=True)
        crosses = [not call.is_of_positions for call in calls]
        maps = maps_of_layers(maps)
    found = named(maps)
    if ids is not None and not any(_fits(ids, one) for _, one in found):
        shapes = ", ".join(dict.fromkeys(str(tuple(one.shape)) for _, one in found))
        got = tuple(ids.shape) if isinstance(ids, Tensor) else type(ids).__name__
        raise ShapeError(f"one token or id is needed for each key of the maps {shapes}; got {got}")
    numbers = [_numbers(one, ids) for _, one in found]
    for own in (own for own, cross in zip(numbers, crosses, strict=False) if cross):
        own |= {name: torch.full_like(own[name], torch.nan) for name in OF_ONE_SEQUENCE & own.keys()}
    return table([name for name, _ in found], numbers, rest)


def _ids_of(tokens: TokenTexts, ids: Tensor | None) -> Tensor:
    if ids is not None:
        raise ArgumentError("tokens and ids are the same, as strings and as numbers: leave one of them out")
    given: list[Any] = [] if isinstance(tokens, str | Tensor) else list(tokens)
    rows = [list(one) for one in given] if given and not isinstance(given[0], str) else [given]
    if not given or not all(isinstance(one, str) for row in rows for one in row) or len(set(map(len, rows))) > 1:
        raise ArgumentError(
            f"tokens are strings, one for each key, or such a list for each sequence; got {tokens!r:.60}. "
            "Numbers go by ids="
        )
    numbers = {one: number for number, one in enumerate(dict.fromkeys(one for row in rows for one in row))}
    found = torch.tensor([[numbers[one] for one in row] for row in rows])
    return found[0] if isinstance(given[0], str) else found


@torch.no_grad()
def compare(one: Maps, other: Maps, *, skip: Names = ()) -> HeadTable:
    """Measure how far the heads of two models, or of one model on two inputs, are apart; maps are paired in order.

    Args:
        one: the result of a watch, or maps (batch..., H, T, S).
        other: the same number of maps, of the same shapes.
        skip: the modules of watched models that the table need not cover, as `names` of `regard.watch`.

    Returns:
        A table with the column "jensen-shannon", the mean over the queries with a key of their `divergence`, in nats
        in [0, ln 2], under the names of `one`.

    Raises:
        ShapeError: the lists have different lengths, or maps have different shapes.
        NotSeenError: modules of a watched model besides those in `skip` mix positions and were not read.

    >>> import regard
    >>> q, k = torch.zeros(2, 1, 1, 4, 1).unbind()
    >>> full = regard.attention(q, k, k, return_weights=True).weights
    >>> causal = regard.attention(q, k, k, mask=regard.causal(), return_weights=True).weights
    >>> print(compare([full], [causal]))
    layer  head  jensen-shannon
    0         0            0.17
    """
    one, other = watched(one), watched(other)
    for side in (one, other):
        require_all_heads(side, "compare()")
    rest = (*given_up(one, skip, "compare()"), *given_up(other, skip, "compare()"))
    ours, theirs = named(maps_of_layers(one)), named(maps_of_layers(other))
    if len(ours) != len(theirs):
        raise ShapeError(f"compare() needs as many maps on both sides, got {len(ours)} and {len(theirs)}")
    rows = [
        {"jensen-shannon": _mean(divergence(a, b, "js"), _live(a) | _live(b))}
        for (_, a), (_, b) in zip(ours, theirs, strict=True)
    ]
    return table([name for name, _ in ours], rows, tuple(dict.fromkeys(rest)))


class QueryValues(NamedTuple):
    values: Tensor
    """(batch..., H, T)."""
    counted: Tensor
    """Of the same shape, or one that broadcasts to it."""

    def mean(self) -> Tensor:
        """The mean over the counted queries and the batch, (H,); NaN without any."""
        return _mean(*self)


class TopOfQueries(NamedTuple):
    weights: Tensor
    """(batch..., H, T, k)."""
    keys: Tensor
    """Of the same shape; -1 where the weight is 0."""


OF_POSITIONS, OF_TOKENS = ("self", "previous", "first"), ("induction", "duplicate")
OF_ONE_SEQUENCE = {"distance", "self", "previous", *OF_TOKENS}
"""Those with no meaning where queries and keys are of two sequences."""
BY_QUERY = ("distance", "entropy", *OF_POSITIONS, *OF_TOKENS, "top_weight")


@torch.no_grad()
def query_values(weights: AttentionMap, ids: Tensor | None, names: Collection[str]) -> dict[str, QueryValues]:
    """The numbers of `head_table` before their means, for names of `BY_QUERY`; "top_weight" is the largest weight.
    Without tokens that fit, "induction" and "duplicate" count no query."""
    return query_values_and_top(weights, ids, names, 0)[0]


def query_values_and_top(
    weights: AttentionMap, ids: Tensor | None, names: Collection[str], k: int
) -> tuple[dict[str, QueryValues], TopOfQueries | None]:
    """See `query_values`; with the k largest weights behind these numbers, from the same pass; None for k = 0."""
    if isinstance(weights.source, LinearSource):
        weights = AttentionMap(shares_of_sizes(weights.source))
    source = weights.source
    # The largest weight marks the queries with keys.
    wanted: dict[str, Statistic] = {"top_weight": Largest()}
    if "entropy" in names:
        wanted["entropy"] = Entropy()
    if "distance" in names:
        wanted["distance"] = distance_in(source.part_of, source.device)
    chosen = _chosen_keys(weights, ids, names)
    ranked = [TopWeights(min(k, weights.shape[-1]))] if k else []
    # All are read in one pass over the weights.
    answers = ask_all(source, [*wanted.values(), *chosen.values(), *ranked])
    top = TopOfQueries(*map(source.laid_out, answers.pop())) if ranked else None
    found = {name: source.laid_out(answer) for name, (answer,) in zip(wanted, answers, strict=False)}
    live = _live(weights) if source.has_signs else found["top_weight"] > 0
    values = {name: QueryValues(one, live) for name, one in found.items()}
    values |= _of_chosen_keys(weights, live, chosen, answers[len(wanted) :])
    return {name: values[name] for name in BY_QUERY if name in names}, top


def _numbers(weights: AttentionMap, ids: Tensor | None) -> dict[str, Tensor]:
    if weights.source.has_blocks:
        names = [name for name in BY_QUERY[:-1] if ids is not None or name not in OF_TOKENS]
        return {name: one.mean() for name, one in query_values(weights, ids, names).items()}
    live = _live(weights)
    numbers = {}
    if weights.source.keeps(distance_in(weights.source.part_of, weights.device)):
        numbers["distance"] = _mean(weights.distance(), live)
    if weights.source.keeps(Entropy()):
        numbers["entropy"] = _mean(weights.entropy(), live)
    return numbers or weights.source.refuse("distance() or entropy()")


@torch.no_grad()
def patterns(weights: AttentionMap, ids: Tensor | None, live: Tensor) -> dict[str, Tensor]:
    """The columns of `head_table` that name positions or tokens, each (H,), over `live`, the queries with a key."""
    chosen = _chosen_keys(weights, ids, (*OF_POSITIONS, *OF_TOKENS) if ids is not None else OF_POSITIONS)
    answers = ask_all(weights.source, list(chosen.values()))
    return {name: one.mean() for name, one in _of_chosen_keys(weights, live, chosen, answers).items()}


def _live(weights: AttentionMap) -> Tensor:
    source = weights.source
    if not source.has_blocks:
        kept = next((statistic for statistic in (Largest(), ParticipationRatio()) if source.keeps(statistic)), None)
        if kept is None:
            source.refuse("which queries have a key")
        return source.laid_out(ask(source, kept)[0]) > 0
    ones = torch.ones(weights.shape[-1], 1, dtype=weights.dtype, device=weights.device)
    return (weights @ ones)[..., 0] > 0


def _mean(values: Tensor, counted: Tensor) -> Tensor:
    """The mean of values (batch..., H, T) over the counted queries, by head (H,); NaN without any."""
    values, counted = (t.expand_as(values).movedim(-2, 0).flatten(1) for t in (values, counted))
    return values.where(counted, 0.0).sum(-1) / counted.sum(-1)


def _chosen_keys(
    weights: AttentionMap, ids: Tensor | None, names: Collection[str]
) -> dict[tuple[str, ...], SumsOfKeys]:
    part, device, keys = weights.source.part_of, weights.device, weights.shape[-1]
    chosen: dict[tuple[str, ...], SumsOfKeys] = {}
    if of_positions := tuple(name for name in OF_POSITIONS if name in names):
        places = part.positions(device)
        of_names = {"self": places, "previous": places - 1, "first": torch.where(places > 0, 0, -1)}
        # Of each key of the whole, its place among those of the part; -1 at the end is that of no key.
        columns = torch.full((part.keys + 1,), -1, device=device)
        columns[index_tensor(part.columns, device)] = torch.arange(keys, device=device)
        wanted = torch.stack([of_names[name] for name in of_positions])
        chosen[of_positions] = AtPlaces(columns[wanted.where((wanted >= 0) & (wanted < part.keys), -1)])
    if not set(names).isdisjoint(OF_TOKENS):
        # Tokens that fit no map are all different: no query has an equal one.
        is_told = ids is not None and part.columns == range(part.keys) and _fits(ids, weights)
        fit = ids if ids is not None and is_told else torch.arange(keys)
        fit = fit.to(weights.device).expand(*weights.leading[:-1], keys)
        chosen[OF_TOKENS] = OfEqualTokens(fit.reshape(-1, keys), weights.leading[-1], part.positions(device))
    return chosen


def _of_chosen_keys(
    weights: AttentionMap,
    live: Tensor,
    chosen: Mapping[tuple[str, ...], SumsOfKeys],
    answers: Sequence[tuple[Tensor, ...]],
) -> dict[str, QueryValues]:
    values, of_heads = {}, (*weights.leading[:-1], 1, weights.shape[-2])
    for (names, statistic), found in zip(chosen.items(), answers, strict=True):
        has_key = statistic.chains(weights.shape[-1]).first >= 0
        for name, answer, one in zip(names, found, has_key, strict=True):
            counts = live & one.expand(prod(of_heads[:-2]), -1).reshape(of_heads)
            values[name] = QueryValues(weights.source.laid_out(answer), counts)
    return values


def _fits(ids: Tensor, weights: AttentionMap) -> bool:
    shapes = (weights.shape[-1],), (*weights.leading[:-1], weights.shape[-1])
    return isinstance(ids, Tensor) and tuple(ids.shape) in shapes
