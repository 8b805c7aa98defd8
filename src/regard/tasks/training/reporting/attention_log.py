"""The heads of a model in training: entropy, largest logit and share of the first key, at each validation."""

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.linear import LinearSource
from regard.tasks.training.reporting.events import Callback, Event, HeadsMeasured, Started, Validated

Attend = Callable[[], Iterable[Mapping[str, AttentionMap]]]
"""Runs a model, in its present state, over a few fixed sequences: the maps (B, H, T, S) of each pass, by layer. No
query is padding. It leaves the random state as it is."""


class AttentionLog:
    """A callback that measures every head after every validation, and passes the result to other callbacks.

    It runs the validated model, with averaged weights if there are any, on the same few sequences each time, in
    evaluation mode. So it costs one small pass of the model for each validation.

    Raises:
        ArgumentError: when training begins: the model has no attention.
    """

    def __init__(self, attend: Attend, tell: Sequence[Callback]) -> None:
        self._attend, self._tell = attend, tell

    def __call__(self, event: Event) -> None:
        """Measure after a validation; at the start, check that the model has attention."""
        match event:
            case Started():
                if not any(map(_with_logits, self._attend())):
                    raise ArgumentError("the attention of this model cannot be logged, because it has none")
            case Validated():
                found = head_statistics(self._attend(), event.step)
                for callback in self._tell:
                    callback(found)
            case _:
                pass


@torch.no_grad()
def head_statistics(passes: Iterable[Mapping[str, AttentionMap]], step: int = 0) -> HeadsMeasured:
    """Entropy, largest logit and share of the first key of each head, over all queries of several passes.

    Layers of linear attention are left out: they have no logits, and weights below 0.

    >>> import regard
    >>> q = torch.zeros(1, 2, 2, 4)
    >>> found = head_statistics([{"layer": regard.map_of(q, q, mask=regard.causal())}])
    >>> [round(entropy, 4) for entropy in found.entropy["layer"]], found.sink_share["layer"]
    ([0.3466, 0.3466], [0.75, 0.75])
    """
    entropies: dict[str, list[Tensor]] = {}
    sinks: dict[str, list[Tensor]] = {}
    logits: dict[str, list[Tensor]] = {}
    for maps in passes:
        for name, weights in _with_logits(maps).items():
            first = weights.block(range(weights.shape[-2]), range(1))[..., 0]
            for kept, numbers in ((entropies, weights.entropy()), (sinks, first), (logits, weights.max_logit())):
                kept.setdefault(name, []).append(numbers.movedim(-2, 0).flatten(1))
    return HeadsMeasured(
        step=step,
        entropy={name: torch.cat(parts, 1).mean(1).tolist() for name, parts in entropies.items()},
        largest_logit={name: torch.cat(parts, 1).amax(1).tolist() for name, parts in logits.items()},
        sink_share={name: torch.cat(parts, 1).mean(1).tolist() for name, parts in sinks.items()},
    )


def _with_logits(maps: Mapping[str, AttentionMap]) -> dict[str, AttentionMap]:
    return {name: weights for name, weights in maps.items() if not isinstance(weights.source, LinearSource)}
