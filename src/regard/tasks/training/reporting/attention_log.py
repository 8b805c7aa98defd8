"""The heads of a model in training: entropy, largest logit and share of the first key, at each validation."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from regard.errors import ArgumentError
from regard.maps.attention_map import AttentionMap
from regard.tasks.training.reporting.events import Callback, Event, HeadsMeasured, Started, Validated
from regard.watching.analysis.measured_heads import measured_heads, with_logits

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
                if not any(map(with_logits, self._attend())):
                    raise ArgumentError("the attention of this model cannot be logged, because it has none")
            case Validated():
                found = head_statistics(self._attend(), event.step)
                for callback in self._tell:
                    callback(found)
            case _:
                pass


def head_statistics(passes: Iterable[Mapping[str, AttentionMap]], step: int = 0) -> HeadsMeasured:
    """Entropy, largest logit and share of the first key of each head, over all queries of several passes.

    Layers of linear attention are left out: they have no logits, and weights below 0.

    >>> import regard, torch
    >>> q = torch.zeros(1, 2, 2, 4)
    >>> found = head_statistics([{"layer": regard.map_of(q, q, mask=regard.causal())}])
    >>> [round(entropy, 4) for entropy in found.entropy["layer"]], found.sink_share["layer"]
    ([0.3466, 0.3466], [0.75, 0.75])
    """
    found = measured_heads(passes)
    return HeadsMeasured(
        step=step,
        entropy={name: heads.entropy.tolist() for name, heads in found.items()},
        largest_logit={name: heads.largest_logit.tolist() for name, heads in found.items()},
        sink_share={name: heads.first_key.tolist() for name, heads in found.items()},
    )
