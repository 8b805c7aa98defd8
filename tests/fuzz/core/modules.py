"""Our own modules: multi-head attention in one call, in parts and with a cache; against its formula written out."""

import torch
from hypothesis import note
from torch import Tensor

import regard
import regard.nn
from tests.fuzz.core.masks import random_mask
from tests.fuzz.core.normalizations import softmax_of
from tests.fuzz.core.parts import Sides
from tests.fuzz.drawing import Drawn


def check_modules(drawn: Drawn) -> None:
    drawn.of([_check_multi_head, _check_cache, _check_additive])(drawn)


def _make(drawn: Drawn, **more: int) -> tuple[regard.nn.MultiHeadAttention, Sides]:
    groups = drawn.of([1, 2])
    heads = groups * drawn.of([1, 2, 3])
    dim, batch = drawn.of([6, 12]), drawn.of([(2,), (1,), (0,), (2, 3)])
    sides = Sides(batch, heads, groups, drawn.of([4, 1, 9]), drawn.of([5, 1, 8]), dim, dim, True)
    torch.manual_seed(drawn.number(0, 99))
    module = regard.nn.MultiHeadAttention(
        dim, heads, num_kv_heads=groups, head_dim=drawn.of([2, 4, 5]), bias=not drawn.chance(3),
        key_dim=more.get("key_dim"), value_dim=more.get("value_dim"),
    ).double()  # fmt: skip
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter, std=0.6)
    return module, sides


def _by_hand(module: regard.nn.MultiHeadAttention, x: Tensor, y: Tensor, v: Tensor, allowed: Tensor) -> Tensor:
    """softmax(q k / sqrt(D)) v of each head, and the projection out of it."""
    weights = list(module.in_weights)
    parts = list(weights[0].split(module.sizes)) if len(weights) == 1 else weights
    biases = [None] * 3 if module.in_bias is None else list(module.in_bias.split(module.sizes))
    heads = []
    for t, w, b, count in zip((x, y, v), parts, biases, (module.num_heads, *[module.num_kv_heads] * 2), strict=True):
        projected = t @ w.mT if b is None else t @ w.mT + b
        each = projected.unflatten(-1, (count, -1)).transpose(-3, -2)
        heads.append(each.repeat_interleave(module.num_heads // count, -3))
    scores = heads[0] @ heads[1].mT / module.head_dim**0.5
    scores = torch.where(allowed.reshape(*x.shape[:-2], *allowed.shape[1:]), scores, -torch.inf)
    gathered = (softmax_of(scores) @ heads[2]).transpose(-3, -2).flatten(-2)
    out = gathered @ module.out.weight.mT
    return out if module.out.bias is None else out + module.out.bias


def _check_multi_head(drawn: Drawn) -> None:
    choices: list[dict[str, int]] = [{}, {"key_dim": 7}, {"key_dim": 7, "value_dim": 3}]
    widths = drawn.of(choices)
    module, sides = _make(drawn, **widths)
    mask = random_mask(drawn, sides)
    x = drawn.normal(*sides.batch, sides.queries, sides.dim)
    key_dim = widths.get("key_dim", sides.dim)
    y = drawn.normal(*sides.batch, sides.keys, key_dim)
    v = drawn.normal(*sides.batch, sides.keys, widths.get("value_dim", key_dim)) if "value_dim" in widths else y
    note(f"MultiHeadAttention {sides}, {widths}, mask {mask.name}")
    right = _by_hand(module, x, y, v, mask.allowed.expand(sides.flat_full))
    for backend in (None, "tiled", "reference"):
        found, weights = module(x, y, v, mask=mask.mask, backend=backend, return_weights=True)
        torch.testing.assert_close(found, right, rtol=0, atol=1e-9)
        assert weights.shape == sides.full
    found = module.attend(x, module.project(y, v), mask=mask.mask)
    torch.testing.assert_close(found, right, rtol=0, atol=1e-9)


def _check_cache(drawn: Drawn) -> None:
    module, sides = _make(drawn)
    length = drawn.number(1, 9)
    x = drawn.normal(*sides.batch[:1], length, sides.dim)
    whole = module(x, mask=regard.causal())
    cuts = sorted({drawn.number(1, length) for _ in range(drawn.number(0, 3))} | {length})
    note(f"MultiHeadAttention {sides}, {length} positions in pieces that end at {cuts}")
    cache, found, start = None, [], 0
    for cut in cuts:
        piece, cache = module.extend(x[..., start:cut, :], cache)
        found.append(piece)
        start = cut
    torch.testing.assert_close(torch.cat(found, -2), whole, rtol=0, atol=1e-9)


def _check_additive(drawn: Drawn) -> None:
    query_dim, key_dim, hidden = drawn.of([3, 1]), drawn.of([4, 1]), drawn.of([5, 1])
    batch, queries, keys = drawn.of([2, 1, 0]), drawn.of([3, 1]), drawn.of([4, 1])
    torch.manual_seed(drawn.number(0, 99))
    attend = regard.nn.AdditiveAttention(query_dim=query_dim, key_dim=key_dim, hidden_dim=hidden).double()
    q, k, v = drawn.normal(batch, queries, query_dim), drawn.normal(batch, keys, key_dim), drawn.normal(batch, keys, 2)
    lengths = drawn.integers(0, keys, batch)
    note(f"AdditiveAttention({query_dim}, {key_dim}, {hidden}) of {batch} x {queries} x {keys}")
    hidden_units = (q @ attend.query_weight.mT)[..., :, None, :] + (k @ attend.key_weight.mT)[..., None, :, :]
    scores = hidden_units.tanh() @ attend.vector
    keep = torch.arange(keys) < lengths[:, None, None]
    right = softmax_of(torch.where(keep, scores, -torch.inf)) @ v
    torch.testing.assert_close(attend(q, k, v, mask=regard.lengths(lengths)), right, rtol=0, atol=1e-9)
