"""Examples of a page or a view from a recording, from maps, or from examples."""

from collections.abc import Sequence
from typing import Any, cast

import numpy as np
from torch import nn

from regard.errors import ArgumentError, ShapeError
from regard.maps.attention_map import AttentionMap
from regard.tensors.kinds import refuse_wrong_kinds
from regard.views.html.contents import Example, Map
from regard.watching.analysis.tables import Maps, named

Viewed = Maps | Sequence[Example] | Example | nn.Module
"""The recording of `regard.watch`, attention maps, a model with its inputs, or examples."""


def examples_of(maps: Viewed, tokens: Any, source: Sequence[str] | None, sequence: int, title: str) -> list[Example]:
    """The examples given, or one of all maps, with the errors of `regard.view`; `tokens` are a model's inputs."""
    if isinstance(maps, nn.Module):
        maps, tokens = (maps, tokens) if tokens is not None else maps, None
    given = [maps] if isinstance(maps, Example) else list(maps) if isinstance(maps, list | tuple) else []
    if not given or not all(isinstance(one, Example) for one in given):
        return [model_example(cast(Maps, maps), tokens, source, sequence=sequence, title=title)]
    if tokens is not None or source is not None or sequence != 0:
        raise ArgumentError("examples have labels of their own: leave tokens, source and sequence out")
    if not all(example.maps for example in given):
        raise ArgumentError("each example needs at least one map")
    for example in given:
        if example.show and example.show not in example.maps:
            raise ArgumentError(f"show must name one of the maps {', '.join(example.maps)}; got {example.show!r}")
    return given


@refuse_wrong_kinds
def model_example(
    maps: Maps,
    tokens: Sequence[str] | None = None,
    source: Sequence[str] | None = None,
    *,
    sequence: int = 0,
    title: str = "",
) -> Example:
    """Every head of every layer as one example of a page of several: `page([model_example(seen, tokens)], path=path)`.

    Args:
        maps: the recording of `regard.watch`, a model with its inputs, or maps or tensors (batch..., H, T, S). For
            short inputs: the page holds weights.
        tokens: labels for every axis of as many queries or keys.
        source: labels of another sequence, such as an encoder's; at equal lengths, queries and keys take `tokens`.
        sequence: the sequence of the batch, counted through all its dimensions.
        title: of the example; "" for the name of the watched model's class.

    Raises:
        ArgumentError: no maps.
        ShapeError: no such sequence, or labels that fit no map.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 3, 4)
    >>> maps = [regard.attention(q, q, q, return_weights=True).weights]
    >>> model_example(maps, ["le", "chat", "dort"]).maps["0"].rows
    ['le', 'chat', 'dort']
    """
    found = named(maps)
    given = [list(labels) for labels in (tokens, source) if labels is not None]
    lengths = {n for _, one in found for n in one.shape[-2:]}
    for labels in given:
        if len(labels) not in lengths:
            raise ShapeError(f"{len(labels)} labels came for maps of {', '.join(map(str, sorted(lengths)))} tokens")

    def fitting(count: int) -> list[str] | None:
        return next((labels for labels in given if len(labels) == count), None)

    made = {
        name: Map(of_sequence(one, sequence), fitting(one.shape[-2]), fitting(one.shape[-1])) for name, one in found
    }
    return Example(title_of(maps, title), made)


def title_of(shown: Viewed, title: str) -> str:
    """The title if there is one; else it says of which model the attention is, as far as this is known."""
    model = shown[0] if isinstance(shown, tuple) and shown else shown
    if not isinstance(model, nn.Module):
        model = getattr(shown, "modules", {}).get("")
    return title or ("Attention" if model is None else f"Attention of {type(model).__name__}")


def of_sequence(weights: AttentionMap, sequence: int) -> AttentionMap:
    """The map (H, T, S) of one sequence of the batch; raises ShapeError if there is no such sequence."""
    batch = weights.leading[:-1]
    count = int(np.prod(batch))
    if not 0 <= sequence < count:
        raise ShapeError(f"sequence must be in [0, {count}), got {sequence}: the map is {tuple(weights.shape)}")
    chosen = weights[tuple(int(i) for i in np.unravel_index(sequence, batch))] if batch else weights
    assert isinstance(chosen, AttentionMap)
    return chosen
