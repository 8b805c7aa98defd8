"""Relevance of tokens through attention, by the rules of Chefer et al. for encoders, decoders and both together."""

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError, TooLargeError, require
from regard.lazy import Displayed, displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.indexing import positions as checked_positions
from regard.maps.statistics.of_map import DENSE_LIMIT_BYTES
from regard.tensors.memory import human
from regard.watching.module_names import Names
from regard.watching.report import given_up, layers_of, require_all_heads

if TYPE_CHECKING:
    from regard.watching.watch import Seen

from dataclasses import replace

from regard.call.normalizations import Softmax
from regard.kernels import execute
from regard.maps.sources.call import source_of_call


@displayed
class AttentionStep(NamedTuple):
    """The attention of one layer: the tokens of one stream look at those of the same stream, or of another."""

    map: AttentionMap
    """(batch..., H, T, S), with its values and the gradient of its output."""
    queries: str = "tokens"
    """The name of the stream of the queries,"""
    keys: str = "tokens"
    """and of the keys' stream: equal for self-attention, different for co-attention."""


Steps = Union["Seen", Iterable[AttentionMap | AttentionStep | tuple[AttentionStep, ...]]]
Layers = Sequence[tuple[AttentionStep, ...]]
"""Groups of steps in order; the steps of one group happen at once."""


def relevance(steps: Steps, *, skip: Names = ()) -> "Relevance":
    r"""The relevance of each input token for each token of the last layer, from one backward pass.

    With $\bar A = \frac1H \sum_h (P_h \odot \partial L / \partial P_h)^+$ of each layer, from the first one up,
    beginning with $R^{ss} = I$ and $R^{sq} = 0$ for streams s, q:

    - self-attention of s (equations 6 and 7): $R^{ss} \leftarrow R^{ss} + \bar A R^{ss}$ and
      $R^{sq} \leftarrow R^{sq} + \bar A R^{sq}$;
    - attention of s to q (equations 10 and 11): $R^{sq} \leftarrow R^{sq} + (\bar R^{ss})^\top \bar A \bar R^{qq}$ and
      $R^{ss} \leftarrow R^{ss} + \bar A R^{qs}$. Here $\bar R^{xx} = \hat R / (\hat R \mathbf 1) + I$ of
      $\hat R = R^{xx} - I$ (equations 8 and 9). Where a row of $\hat R$ is 0, the published code divides 0 by 0, and
      here the row of $\bar R^{xx}$ is that of I.

    Args:
        steps: a `regard.watch(model, values=True, gradients=True)` of one run, after `backward()` on the output to be
            explained, such as the logit of a class. The origin of its keys tells a decoder from its encoder. Or the
            layers in order: maps of self-attention, or an `AttentionStep` for each. Steps in a tuple are simultaneous:
            each reads the R before them.
        skip: the modules of a watched model that it need not go through, as `names` of `regard.watch`.

    Returns:
        A `Relevance`, read by rows. Nothing is computed yet.

    Raises:
        ArgumentError: there are no layers; the watch has several runs, or several stacks without attention between
            them.
        ShapeError: the layers do not fit one another.
        NotSeenError: modules of the watched model besides those in `skip` mix positions and were not read.

    Source: Chefer et al. 2021 (arXiv:2103.15679), section 3.

    >>> import regard
    >>> q, v = torch.zeros(1, 1, 3, 1), torch.tensor([[[[1.0], [2.0], [3.0]]]], requires_grad=True)
    >>> class Attend(torch.nn.Module):
    ...     def forward(self, v):
    ...         return torch.nn.functional.scaled_dot_product_attention(q, q, v, is_causal=True)
    >>> model = torch.nn.Sequential(Attend(), Attend())
    >>> with regard.watch(model, values=True, gradients=True) as seen:
    ...     output = model(v)
    >>> output[0, 0, 2].backward()
    >>> relevance(seen).rows(-1)
    tensor([[0.7130, 1.0370, 2.2222]])
    """
    record: Any = getattr(steps, "record", None)
    rest = given_up(steps, skip, "relevance()")
    require_all_heads(steps, "relevance()")
    return Relevance(_given(steps) if record is None else _observed(record), rest)


class Relevance(Displayed):
    """The matrices R of a model, read row by row in linear memory, or whole under a limit."""

    def __init__(self, layers: Layers, given_up: tuple[str, ...] = ()) -> None:
        self._layers = layers
        self.given_up = given_up
        """Modules that mix positions, through which it does not go."""
        self.lengths = _lengths(layers)
        """The length of each stream by name, in order of occurrence."""

    def rows(
        self,
        positions: int | Sequence[int] | Tensor,
        *,
        to: str | None = None,
        of: str | None = None,
        limit_bytes: int = DENSE_LIMIT_BYTES,
    ) -> Tensor:
        """The relevance of all tokens of one stream for chosen tokens of another, or of the same.

        Args:
            positions: the position of one token, or of N tokens; a negative one counts from the end.
            to: the stream of these tokens; None is the last one, such as the decoder.
            of: the queried stream; None is the first one, such as the encoder.
            limit_bytes: of R, if it has to be whole.

        Returns:
            (batch..., S) for one token, (batch..., N, S) for N. Each layer costs one pass over the tiles of its map, in
            linear memory; co-attention costs another pass over the layers before it, for the normalisation. R is dense
            only if two streams attend to each other.

        Raises:
            ShapeError: a token does not exist.
            ArgumentError: there is no such stream, or values or gradients were not recorded.
            TooLargeError: R has to be dense, and is too large.
            GradientError: the maps have no gradients; the message says why.
        """
        to, of = self._stream(to, -1), self._stream(of, 0)
        device = self._layers[0][0].map.device
        places = torch.as_tensor(positions, device=device)
        where = checked_positions(places.reshape(-1), self.lengths[to], "token", device)
        assert isinstance(where, Tensor)
        pairs = {(queries, keys) for steps in self._layers for _, queries, keys in steps if queries != keys}
        if any((keys, queries) in pairs for queries, keys in pairs):
            found = self.dense(to=to, of=of, limit_bytes=limit_bytes)[..., where, :]
        else:
            with torch.no_grad():
                found = _RowsOfR(self._means(), self.lengths, of).through(to, where).mT
        return found[..., 0, :] if places.dim() == 0 else found

    def dense(self, *, to: str | None = None, of: str | None = None, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """The dense R, (batch..., tokens of `to`, tokens of `of`), without storing any layer's map.

        Raises:
            ArgumentError: there is no such stream, or values or gradients were not recorded.
            TooLargeError: the matrices R of all streams take more than `limit_bytes`.
            GradientError: the maps have no gradients; the message says why.
        """
        to, of = self._stream(to, -1), self._stream(of, 0)
        first, total = self._layers[0][0].map, sum(self.lengths.values())
        cost = math.prod(_batch(first)) * total * total * first.dtype.itemsize
        if cost > limit_bytes:
            raise TooLargeError(
                f"the relevance of {' and '.join(map(str, self.lengths.values()))} tokens for each other takes "
                f"{human(cost)}, above the limit of {human(limit_bytes)}: ask rows(tokens), or raise limit_bytes"
            )
        with torch.no_grad():
            return _whole(self._means(), self.lengths)[to, of]

    def _means(self) -> Layers:
        return [tuple(step._replace(map=step.map.relevance()) for step in steps) for steps in self._layers]

    def _stream(self, name: str | None, default: int) -> str:
        names = list(self.lengths)
        if name is not None and name not in names:
            raise ArgumentError(f"there is no stream {name!r}; the streams are {', '.join(map(repr, names))}")
        return names[default] if name is None else name

    def __repr__(self) -> str:
        streams = ", ".join(f"{length} of {name!r}" for name, length in self.lengths.items())
        beside = f", not through {', '.join(self.given_up)}" if self.given_up else ""
        return f"Relevance of tokens ({streams}) through {len(self._layers)} layers{beside}"


class _RowsOfR:
    """Rows of R from the last layer back to the first: e^T R is a product of a row with each layer's (I + mean map).
    The rules are linear in R^{x,of} for a fixed stream `of`, except for the normalised factors, which are products of
    self-attention alone unless two streams attend to each other."""

    def __init__(self, layers: Layers, lengths: dict[str, int], of: str) -> None:
        self.layers, self.lengths, self.of = layers, lengths, of

    def through(self, to: str, places: Tensor) -> Tensor:
        """The rows of some tokens as columns, (batch..., S, N)."""
        mean = self.layers[0][0].map
        row = torch.nn.functional.one_hot(places, self.lengths[to]).to(mean.dtype).mT.expand(*mean.leading, -1, -1)
        rows, found = {to: row}, row.new_zeros(*mean.leading, self.lengths[self.of], row.shape[-1])
        for number in reversed(range(len(self.layers))):
            after = dict(rows)
            for mean, queries, keys in self.layers[number]:
                if queries not in after:
                    continue
                row = after[queries]
                if queries == keys:
                    _add(rows, queries, mean.mT @ row)
                if queries != keys and queries == self.of:
                    _add(rows, keys, mean.mT @ row)
                if queries != keys and keys == self.of:
                    passed = mean.mT @ self._normalised(queries, number, row)
                    shares = _over(passed, self._excess(keys, number, torch.ones_like(passed[..., :1])))
                    _add(rows, keys, shares)
                    found = found + passed - shares
        return found + rows[self.of] if self.of in rows else found

    def _normalised(self, stream: str, number: int, x: Tensor) -> Tensor:
        sums = self._excess(stream, number, torch.ones_like(x[..., :1]))
        return _over(self._excess(stream, number, x), sums) + x

    def _excess(self, stream: str, number: int, x: Tensor) -> Tensor:
        """(R - I) x of a stream before a layer."""
        start = x
        for steps in self.layers[:number]:
            for mean, queries, keys in steps:
                if queries == keys == stream:
                    x = x + mean @ x
        return x - start


def _whole(layers: Layers, lengths: dict[str, int]) -> dict[tuple[str, str], Tensor]:
    like = layers[0][0].map
    found = {}
    for to, rows in lengths.items():
        for of, columns in lengths.items():
            blank = torch.zeros(*like.leading, rows, columns, dtype=like.dtype, device=like.device)
            found[to, of] = blank + torch.eye(rows, dtype=like.dtype, device=like.device) if to == of else blank
    for steps in layers:
        more: dict[tuple[str, str], Tensor] = {}
        for mean, queries, keys in steps:
            if queries == keys:
                for of in lengths:
                    _add(more, (queries, of), mean @ found[queries, of])
            else:
                own, other = _normal(found[queries, queries]), _normal(found[keys, keys])
                _add(more, (queries, keys), own.mT @ (mean @ other))
                _add(more, (queries, queries), mean @ found[keys, queries])
        for pair, matrix in more.items():
            found[pair] = found[pair] + matrix
    return found


def _normal(matrix: Tensor) -> Tensor:
    eye = torch.eye(matrix.shape[-1], dtype=matrix.dtype, device=matrix.device)
    excess = matrix - eye
    return _over(excess, excess.sum(-1, keepdim=True)) + eye


def _over(x: Tensor, sums: Tensor) -> Tensor:
    return torch.where(sums > 0, x / sums.masked_fill(sums <= 0, 1.0), 0.0)


def _add(totals: dict[Any, Tensor], name: Any, more: Tensor) -> None:
    totals[name] = totals[name] + more if name in totals else more


def _given(steps: Any) -> Layers:
    found: list[tuple[AttentionStep, ...]] = []
    require(steps, (Iterable, AttentionMap), "steps", "what regard.watch saw, or maps and AttentionSteps")
    for one in [steps] if isinstance(steps, AttentionMap) else steps:
        several = one if isinstance(one, tuple) and not isinstance(one, AttentionStep) else (one,)
        found.append(tuple(AttentionStep(step) if isinstance(step, AttentionMap) else step for step in several))
    if wrong := [type(step).__name__ for many in found for step in many if not isinstance(step, AttentionStep)]:
        raise ArgumentError(
            f"relevance() takes what regard.watch saw, or maps and AttentionSteps; got {', '.join(wrong)}"
        )
    if not found or not all(found):
        raise ArgumentError("there are no layers to follow relevance through: nothing was seen")
    return found


def _observed(record: Any) -> Layers:
    """The layers of a watch, in stacks: the decoder has cross-attention."""
    calls: list[Any] = layers_of(record, crossing=True)
    if over := [call.name for call in calls if call.blocks is not None]:
        raise ArgumentError(f"relevance() has no rule for blocks of tokens, which are keys of {', '.join(over)}")
    if len({call.run for call in calls}) > 1:
        raise ArgumentError(
            "relevance() follows one run of the model, and this watch saw several: watch one run, or hand over the "
            "maps of one as a list"
        )
    crosses = [call.map.shape[-1] != call.map.shape[-2] if call.crosses is None else call.crosses for call in calls]
    stacks = list(dict.fromkeys(_stack(call.name) for call in calls))
    asking = {_stack(call.name) for call, cross in zip(calls, crosses, strict=True) if cross}
    if len(asking) > 1 or len(stacks) > 2 or (len(stacks) == 2 and not asking):
        raise ArgumentError(
            f"which of the stacks {', '.join(map(repr, stacks))} attends to which cannot be told: watch one "
            "of them, or hand over the layers as a list of regard.watching.AttentionStep(map, queries, keys)"
        )
    if not asking:
        return _given([call.map for call in calls])
    (decoder,) = asking
    streams = {stack: "decoder" if stack == decoder else "encoder" for stack in stacks}
    return [
        (AttentionStep(call.map, (own := streams[_stack(call.name)]), "encoder" if cross else own),)
        for call, cross in zip(calls, crosses, strict=True)
    ]  # fmt: skip


def _stack(path: str) -> str:
    """The path of the list of layers around a module; without an index in it, that of the parent module.

    >>> _stack("decoder.layers.0.self_attn"), _stack("decoder.layers.1.encoder_attn"), _stack("first.attention")
    ('decoder.layers', 'decoder.layers', 'first')
    """
    parts = path.split(".")
    number = next((n for n, part in enumerate(parts) if part.isdigit()), max(len(parts) - 1, 0))
    return ".".join(parts[:number])


def _batch(one: AttentionMap) -> tuple[int, ...]:
    head = one.dimensions.head
    return tuple(n for place, n in enumerate(one.leading) if place != head)


def _lengths(layers: Layers) -> dict[str, int]:
    found: dict[str, int] = {}
    asking = {queries for steps in layers for _, queries, keys in steps if queries != keys}
    for is_asking in (False, True):
        for one, queries, keys in (step for steps in layers for step in steps):
            for name, length in ((queries, one.shape[-2]), (keys, one.shape[-1])):
                if (name in asking) is is_asking and found.setdefault(name, length) != length:
                    raise ShapeError(
                        f"relevance() goes through layers of one length, and {name!r} has {found[name]} tokens in one "
                        f"layer and {length} in another: hand over the layers that belong together as a list, with "
                        "regard.watching.AttentionStep(map, queries, keys) for attention to other tokens"
                    )
    batches = {_batch(step.map) for steps in layers for step in steps}
    if len(batches) > 1:
        raise ShapeError(f"relevance() goes through layers of one batch, got the batches {sorted(batches)}")
    return found


@displayed
class AttentionRelevance(NamedTuple):
    """The relevance of weights and values, each in the shape of its tensor. Heads that share keys and values have
    separate shares, whose sums belong to the shared tensors."""

    weights: AttentionMap
    """(batch..., H, T, S), a lazy map with signs: half of the output's relevance."""
    query: Tensor
    """(batch..., H, T, D)."""
    key: Tensor
    """(batch..., H, S, D)."""
    value: Tensor
    """(batch..., H, S, E): the other half of the output's relevance."""


def attn_lrp(weights: AttentionMap, relevance: Tensor, *, epsilon: float = 1e-6) -> AttentionRelevance:
    r"""Distribute the relevance of an attention's output among its weights and vectors, by the rules of AttnLRP.

    - of the product $O = P V$: $R(P_{ij}) = \sum_e P_{ij} V_{je} \frac{R(O_{ie})}{2 O_{ie} + \epsilon}$, and
      $R(V_{je}) = \sum_i$ of the same terms (the uniform rule for products of two factors);
    - of the softmax of scores s: $R(s_{ij}) = s_{ij} (R(P_{ij}) - P_{ij} \sum_k R(P_{ik}))$;
    - of the scores $c \, q_i \cdot k_j$: $R(q_{id}) = \frac12 \sum_j c \, q_{id} k_{jd} R(s_{ij}) / s_{ij}$; so for k.

    It is one forward and one backward pass of attention, in linear memory. The rules are local: the input is the
    relevance of the output, from the rules of all layers above (layer norms, activations, linear layers: see the
    package `lxt`), and the output is for those below. It covers one call: modules that mix positions by other means
    (`seen.report().mixers`) need rules of their own.

    Args:
        weights: a map with values, of a softmax of scaled dot products; a bias takes its own part of a score.
        relevance: R(O), of the output's shape (batch..., H, T, E), before an output projection.
        epsilon: keeps small outputs from being divided by; it has the output's sign.

    Raises:
        ArgumentError: the map has no values, is not that of one call, or its score or normalization is unsupported.
        ShapeError: the relevance does not have the output's shape.

    Source: Achtibat et al. 2024 (arXiv:2402.05602), sections 3.3.1 and 3.3.2.

    >>> import regard
    >>> q, v = torch.zeros(1, 1, 2, 1), torch.tensor([[[[1.0], [3.0]]]])
    >>> output, weights = regard.attention(q, q, v, return_weights=True, keep_values=True)
    >>> found = attn_lrp(weights, output)
    >>> found.weights.dense(), found.value
    (tensor([[[[0.2500, 0.7500],
              [0.2500, 0.7500]]]]), tensor([[[[0.5000],
              [1.5000]]]]))
    """
    require(weights, AttentionMap, "weights", "an AttentionMap")
    source = source_of_call(weights.source, "attn_lrp()")
    call = source.call
    if call.score.dot_scale(call.query.shape[-1]) is None or not isinstance(call.normalization, Softmax):
        raise ArgumentError(f"AttnLRP has rules for a softmax of scaled dot products, and this map is {source}")
    value = source.beside.values_for("attn_lrp()").detach().to(source.dtype)
    expected = (*source.leading, source.queries, value.shape[-1])
    if tuple(relevance.shape) != expected:
        raise ShapeError(f"attn_lrp() needs the output's relevance {expected}, got {tuple(relevance.shape)}")
    call, lead = call.expanded(), (call.sizes.flat_batch, call.sizes.heads)
    with torch.enable_grad():
        parts = [one.detach().to(source.dtype) for one in (call.query, call.key, value.unflatten(0, lead))]
        query, key, held = (one.requires_grad_() for one in parts)
        output, _ = execute(source.backend, replace(call, query=query, key=key, dropout=0.0), held)
        doubled = 2 * output.detach()
        # (With a sign of 0 the output is 0, and so is the relevance to share out.)
        stable = doubled + epsilon * torch.where(doubled < 0, -1.0, 1.0)
        shares = relevance.detach().to(source.dtype).reshape(output.shape) / stable
        grads = torch.autograd.grad(output, (query, key, held), shares)
    factors = (0.5, 0.5, 1.0)
    found = [
        source.laid_out((factor * one.detach() * grad).flatten(0, 1))
        for factor, one, grad in zip(factors, (query, key, held), grads, strict=True)
    ]
    attributed = source.mapped(Tensor.detach).gradient(shares.reshape(expected), "attribution")
    return AttentionRelevance(AttentionMap(attributed), *found)
