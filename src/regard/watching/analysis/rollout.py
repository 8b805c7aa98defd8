"""Attention rollout: how much the input tokens contribute to chosen tokens, through the layers whose maps there are."""

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor

from regard.errors import ArgumentError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.maps.indexing import positions as checked_positions
from regard.maps.sources.combined import shares_of_sizes
from regard.tensors.kinds import refuse_wrong_kinds
from regard.watching.analysis.tables import Maps, named
from regard.watching.module_names import Names
from regard.watching.observed import Record
from regard.watching.report import given_up, layers_of, require_all_heads

SEVERAL = (
    "a rollout goes through the self-attention of layers of one length, (batch..., H, T, T); got {}: hand over those "
    "of the encoder, or of the decoder, as a list"
)


@refuse_wrong_kinds
def rollout(
    maps: Maps,
    positions: int | Sequence[int] | Tensor,
    *,
    residual: float = 0.5,
    heads: Sequence[float] | Tensor | None = None,
    skip: Names = (),
    signs: Literal["size"] | None = None,
) -> Tensor:
    r"""Attention rollout towards chosen tokens: rows of $A_L \cdots A_2 A_1$, without a T x T matrix.

    $A_l = D_l^{-1} (r I + (1 - r) \bar P_l)$, with $\bar P_l$ the mean of the layer's heads; the diagonal $D_l$ makes
    rows sum to 1. A query without keys passes its own vector on.

    Args:
        maps: the self-attention of the layers, first to last: the result of `regard.watch`, or maps
            (batch..., H, T, T).
        positions: the position of one token of the last layer, or of N tokens; a negative one counts from the end.
        residual: r, the share of the residual connection, in [0, 1].
        heads: a weight for each head, divided by the sum of all; None for equal weights.
        skip: the modules of a watched model that it need not go through, as `names` of `regard.watch`. Without these it
            goes through every module that mixes positions; a list of maps is taken as all there are.
        signs: the rule for maps with weights below 0, such as those of linear attention: "size" takes the shares
            $|P_{ij}| / \sum_j |P_{ij}|$ in their place. Without a rule they are refused.

    Returns:
        (batch..., T) for one token, (batch..., N, T) for N tokens: the elements of a row are at least 0 and sum to 1.
        The cost is two products of each map with N columns. Gradients flow to queries and keys.

    Raises:
        ArgumentError: the residual is outside [0, 1], there are not as many weights as heads, or weights are below 0.
        ShapeError: a map is not square or has another shape than the others, or a token does not exist.
        NotSeenError: modules of the watched model besides those in `skip` mix positions and were not read.

    Source: Abnar & Zuidema 2020 (arXiv:2005.00928), section 3.

    >>> import regard
    >>> q = torch.zeros(1, 1, 3, 1)
    >>> maps = [regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights for _ in range(2)]
    >>> rollout(maps, -1)
    tensor([[0.3194, 0.2361, 0.4444]])
    """
    if not 0.0 <= residual <= 1.0:
        raise ArgumentError(f"residual must be in [0, 1], got {residual}")
    given_up(maps, skip, "rollout()")
    require_all_heads(maps, "rollout()")
    record = getattr(maps, "record", None)
    if isinstance(record, Record):
        if any(call.kind == "cross-attention" and call.map is not None for call in record.calls):
            raise ShapeError(SEVERAL.format("attention to another sequence"))
        maps = [call.over_tokens for call in layers_of(record)]
    layers = [_without_signs(one) if signs == "size" else one for _, one in named(maps)]
    _check(layers)
    length, first = layers[0].shape[-1], layers[0]
    places = torch.as_tensor(positions, device=first.device)
    where = checked_positions(places.reshape(-1), length, "token", first.device)
    assert isinstance(where, Tensor)
    paths = torch.nn.functional.one_hot(where, length).to(first.dtype).mT.expand(*first.leading[:-1], length, -1)
    ones = torch.ones(length, 1, dtype=first.dtype, device=first.device)
    for layer in reversed(layers):
        mean = layer.average(weights=heads)
        paths = paths / (residual + (1 - residual) * (mean @ ones)).clamp_min(torch.finfo(first.dtype).tiny)
        paths = residual * paths + (1 - residual) * (mean.mT @ paths)
    return paths[..., 0] if places.dim() == 0 else paths.mT


def _without_signs(weights: AttentionMap) -> AttentionMap:
    has_signs = weights.source.has_blocks and weights.source.has_signs
    return AttentionMap(shares_of_sizes(weights.source)) if has_signs else weights


def _check(layers: list[AttentionMap]) -> None:
    if any(one.source.has_blocks and one.source.has_signs for one in layers):
        raise ArgumentError(
            "a rollout follows shares of attention, and some weights of these maps are below 0: name the rule for "
            'them, signs="size", or hand over the other maps'
        )
    shapes = {(*one.shape[:-3], *one.shape[-2:]) for one in layers}
    if len(shapes) > 1 or layers[0].shape[-1] != layers[0].shape[-2]:
        raise ShapeError(SEVERAL.format(f"maps {', '.join(sorted(str(tuple(one.shape)) for one in layers))}"))
