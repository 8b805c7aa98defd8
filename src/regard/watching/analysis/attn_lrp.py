"""AttnLRP inside of attention: how the relevance of an output is shared out among weights, queries, keys and values."""

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from regard.call.normalizations import Softmax
from regard.errors import ArgumentError, ShapeError, require
from regard.kernels import execute
from regard.lazy import displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.call import source_of_call


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
