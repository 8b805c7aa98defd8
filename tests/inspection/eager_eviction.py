"""Eviction as papers write it: eager attention over a cache that is never cut, with dropped keys masked out.

Nothing of regard is used here, and no key ever moves, so that neither positions nor heads can be mistaken.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

Rule = Callable[[int, Tensor, Tensor], Tensor]
"""(layer, weights (B, H, T, S), which keys are left (B, G, S)) -> which keys are left."""


class Evicting:
    """Attention of transformers that forgets keys by a rule; `alive` has those that are left, by layer."""

    def __init__(self, rule: Rule) -> None:
        self.rule = rule
        self.alive: dict[int, Tensor] = {}
        self.real: Tensor | None = None
        """Which tokens of the prompt are no padding, (B, S)."""

    def __call__(
        self, module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        batch, groups, keys, _ = key.shape
        queries, layer = query.shape[2], module.layer_idx
        before = self.alive.get(layer, torch.zeros(batch, groups, 0, dtype=torch.bool))
        alive = F.pad(before, (0, keys - before.shape[-1]), value=True)
        if self.real is not None and not before.shape[-1]:
            alive = alive & self.real[:, None]
        heads = query.shape[1] // groups
        scores = query @ key.repeat_interleave(heads, 1).mT * kwargs["scaling"]
        seen = torch.arange(keys) <= torch.arange(keys - queries, keys)[:, None]
        seen = seen & alive.repeat_interleave(heads, 1)[:, :, None]
        weights = scores.masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num()
        self.alive[layer] = self.rule(layer, weights, alive)
        return (weights @ value.repeat_interleave(heads, 1)).transpose(1, 2), weights


def use(model: Any, rule: Rule) -> Evicting:
    """Let a model attend by a rule."""
    found = Evicting(rule)
    AttentionInterface.register("evicting", found)
    # Without a mask function transformers makes no mask, and the attention above is causal by itself.
    AttentionMaskInterface._global_mapping.pop("evicting", None)
    model.set_attn_implementation("evicting")
    return found


def grouped(scores: Tensor, groups: int) -> Tensor:
    """The mean over the query heads of a key head, (B, H, S) -> (B, G, S)."""
    return scores.unflatten(1, (groups, -1)).mean(2)


def best(scores: Tensor, among: Tensor, count: int) -> Tensor:
    """Where the largest scores are, of those that may be chosen; of equal ones (maxima of neighbours) the earlier."""
    order = scores.masked_fill(~among, -torch.inf).sort(dim=-1, descending=True, stable=True).indices
    return torch.zeros_like(among).scatter(-1, order[..., :count], True)


def newest(alive: Tensor, count: int) -> Tensor:
    """The last keys that are left."""
    return alive & (alive.flip(-1).cumsum(-1).flip(-1) <= count)


def heavy_hitters(budget: int, recent: int) -> Rule:
    """Zhang et al. 2023, algorithm 1: attention summed over all queries until now, and the last keys."""
    total: dict[int, Tensor] = {}

    def rule(layer: int, weights: Tensor, alive: Tensor) -> Tensor:
        so_far = total.get(layer)
        now = grouped(weights.sum(2), alive.shape[1])
        total[layer] = now if so_far is None else now + F.pad(so_far, (0, now.shape[-1] - so_far.shape[-1]))
        if int(alive[0, 0].sum()) <= budget:
            return alive
        last = newest(alive, recent)
        return last | best(total[layer], alive & ~last, budget - recent)

    return rule


def token_omission(budget: int) -> Rule:
    """Oren et al. 2024, section 3.2: the keys of the newest query, averaged over heads."""

    def rule(layer: int, weights: Tensor, alive: Tensor) -> Tensor:
        if int(alive[0, 0].sum()) <= budget:
            return alive
        return best(weights[:, :, -1].mean(1)[:, None].expand(alive.shape), alive, budget)

    return rule


def observation(budget: Callable[[int], int], window: int, width: int, pool: Callable[..., Tensor]) -> Rule:
    """Li et al. 2024, listing 1: the last queries of the prompt vote, and votes are pooled; window keys stay."""

    def rule(layer: int, weights: Tensor, alive: Tensor) -> Tensor:
        queries, keys = weights.shape[-2:]
        if queries == 1 or budget(layer) >= keys:
            return alive
        votes = grouped(weights[:, :, -window:, :-window].sum(2), alive.shape[1])
        pooled = pool(votes, kernel_size=width, padding=width // 2, stride=1)
        chosen = best(pooled, alive[..., :-window], budget(layer) - window)
        return F.pad(chosen, (0, window), value=True)

    return rule


def pyramid_budget(layers: int, budget: int, window: int, keys: int) -> Callable[[int], int]:
    """Cai et al. 2024, as in the authors' code: beta = 20, and steps that are rounded down."""
    least = (budget - window) // 20
    most = (budget - window) * 2 - least
    if most >= keys - window:
        most = keys - window
        least = (budget - window) * 2 - most
    step = (most - least) // (layers - 1)
    return lambda layer: most - layer * step + window
