"""The oracle: attention written out, with each edit written into it as a change of the weights (B, H, T, S)."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from regard.edits import AddBias, Edit, Knockout, ReplaceWeights, Reweight, ScaleHeads
from tests.fuzz.watch.truths import kernel_weights


def places(index: Any, first: int, count: int) -> Tensor:
    """Which of `count` places, the first of which is `first`, an edit names: bool."""
    numbers = torch.arange(first + count)
    if index is None:
        return torch.ones(count, dtype=torch.bool)
    chosen = numbers[index].reshape(-1) if isinstance(index, int | slice) else numbers[torch.as_tensor(list(index))]
    return torch.isin(numbers[first:], chosen)


def block(edit: Any, shape: torch.Size, first_query: int, heads: Any, keys: Any) -> Tensor:
    batch, n_heads, queries, n_keys = shape
    b = places(edit.batch, 0, batch)[:, None, None, None]
    h = places(heads, 0, n_heads)[None, :, None, None]
    q = places(edit.queries, first_query, queries)[None, None, :, None]
    return b & h & q & places(keys, 0, n_keys)


def same_sums(new: Tensor, old: Tensor) -> Tensor:
    total = new.sum(-1, keepdim=True)
    return torch.where(total == 0, torch.zeros_like(new), new * old.sum(-1, keepdim=True) / total.clamp_min(1e-300))


def chosen(index: Any, count: int) -> list[int]:
    numbers = list(range(count))
    if index is None:
        return numbers
    if isinstance(index, int):
        return [numbers[index]]
    return numbers[index] if isinstance(index, slice) else [numbers[n] for n in index]


def numbers(value: float | Tensor, edit: Any, keys: Any, weights: Tensor, first_query: int, other: float) -> Tensor:
    """A number for each pair: of the value where an edit names the pair, and `other` elsewhere."""
    heads, columns = chosen(edit.heads, weights.shape[1]), chosen(keys, weights.shape[-1])
    wide = torch.full((weights.shape[1], weights.shape[-1]), other, dtype=weights.dtype)
    given = torch.as_tensor(value, dtype=weights.dtype).expand(len(heads), len(columns))
    for n, head in enumerate(heads):
        for m, key in enumerate(columns):
            wide[head, key] = given[n, m]
    where = block(edit, weights.shape, first_query, edit.heads, keys)
    return torch.where(where, wide[None, :, None], torch.full_like(weights, other))


def edited(weights: Tensor, edit: Edit, first_query: int = 0) -> Tensor:
    match edit:
        case Reweight(keys=keys, factor=factor):
            return same_sums(weights * numbers(factor, edit, keys, weights, first_query, 1.0), weights)
        case AddBias(bias=bias, keys=keys):
            return same_sums(weights * numbers(bias, edit, keys, weights, first_query, 0.0).exp(), weights)
        case Knockout(edges=None, keys=keys):
            where = block(edit, weights.shape, first_query, edit.heads, keys)
            return same_sums(weights.masked_fill(where, 0.0), weights)
        case Knockout(edges=edges) if not callable(edges):
            where = block(edit, weights.shape, first_query, edit.heads, None)
            cut = torch.zeros(weights.shape[-2:], dtype=torch.bool)
            for query, key in edges:
                if query >= first_query:
                    cut[query - first_query, key] = True
            return same_sums(weights.masked_fill(where & cut, 0.0), weights)
        case ScaleHeads(factor=factor):
            each = torch.as_tensor(factor, dtype=weights.dtype)
            each = each[:, None] if each.dim() else each
            return weights * numbers(each, edit, None, weights, first_query, 1.0)
        case ReplaceWeights(weights=given) if isinstance(given, Tensor):
            where = block(edit, weights.shape, first_query, edit.heads, None)
            own = given.to(weights.dtype)
            if own.dim() > 2 and own.shape[-3] < weights.shape[1]:
                heads = torch.tensor(chosen(edit.heads, weights.shape[1]))
                own = torch.zeros_like(weights).index_copy(1, heads, own.expand(len(weights), *own.shape[-3:]))
            return torch.where(where, own.expand_as(weights), weights)
    raise AssertionError(edit)


def weights_of(
    query: Tensor, key: Tensor, edits: Sequence[Edit], *, mask: Tensor | None = None, is_causal: bool = False,
    scale: float | None = None, first_query: int = 0,
) -> Tensor:  # fmt: skip
    weights = kernel_weights(query, key, mask, is_causal, scale)
    for edit in edits:
        weights = edited(weights, edit, first_query)
    return weights


def attend(
    query: Tensor, key: Tensor, value: Tensor, edits: Sequence[Edit], *, mask: Tensor | None = None,
    is_causal: bool = False, scale: float | None = None, first_query: int = 0,
) -> Tensor:  # fmt: skip
    """(B, H, T, E), for heads that may be grouped; the mask is bool (True = keep) or added."""
    weights = weights_of(query, key, edits, mask=mask, is_causal=is_causal, scale=scale, first_query=first_query)
    return weights @ value.repeat_interleave(query.shape[1] // key.shape[1], 1)


def into(model: Any, of: dict[str, list[Edit]]) -> Callable[..., Any]:
    by_module: dict[int, list[Edit]] = {
        id(module): of[path] for path, module in model.named_modules() if path in of
    }  # fmt: skip
    path_of = {id(module): path for path, module in model.named_modules()}

    def forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
        scaling: float | None = None, position_bias: Tensor | None = None, **others: Any,
    ) -> tuple[Tensor, None]:  # fmt: skip
        mask = None if attention_mask is None else attention_mask[..., : key.shape[2]]
        if position_bias is not None:
            mask = position_bias if mask is None else position_bias + mask
        crosses = any(part in path_of[id(module)] for part in ("EncDec", "encoder_attn"))
        first = 0 if crosses else key.shape[2] - query.shape[2]
        output = attend(
            query, key, value, by_module.get(id(module), []), mask=mask, scale=scaling, first_query=first
        )  # fmt: skip
        return output.transpose(1, 2).contiguous(), None

    return forward
