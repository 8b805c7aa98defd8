"""The maps of a view that a page can recompute without a kernel."""

from collections.abc import Sequence

from regard.errors import ArgumentError
from regard.maps.sources.call import CallSource
from regard.views.html.contents import Example
from regard.views.html.factors import factors_of, why_none
from regard.views.html.numbers import as_heads, spans

SHARE = 0.25


def maps_with_factors(examples: Sequence[Example], budget_mb: float) -> list[str]:
    """The names of maps whose queries and keys a page can carry in a quarter of its budget, first come, first carried.

    >>> import torch, regard
    >>> from regard.views import Map
    >>> x = torch.eye(3)
    >>> maps = {"0": Map(regard.map_of(x, x)), "1": Map(torch.eye(3))}
    >>> maps_with_factors([Example("", maps)], 8.0)
    ['0']
    """
    left = SHARE * budget_mb * 2**20
    chosen: dict[str, None] = {}
    without: set[str] = set()
    for example in examples:
        for name, one in example.maps.items():
            heads = as_heads(name, one.weights)
            source, (count, queries, keys) = heads.source, heads.shape
            if why_none(heads) or not isinstance(source, CallSource):
                without.add(name)
                continue
            cost = 4 * 4 / 3 * count * (queries + keys) * source.call.query.shape[-1]
            if cost > left:
                without.add(name)
                continue
            try:
                factors_of(name, heads, spans(heads))
            except ArgumentError:
                without.add(name)
            else:
                left -= cost
                chosen[name] = None
    # A name covers the maps of all examples.
    return [name for name in chosen if name not in without]
