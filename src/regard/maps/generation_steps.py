"""The steps of a generation as one map."""

from collections.abc import Sequence

from regard.errors import require
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.stack import StackSource, starts_of
from regard.maps.sources.summary import SummarySource, joined_steps


def stack(maps: Sequence[AttentionMap], *, starts: Sequence[int] | None = None) -> AttentionMap:
    """The steps of a generation as one map: rows concatenated, and exact zeros for keys a step did not have.

    `Seen.joined` finds the steps among the calls of a watched module.

    Args:
        maps: (batch..., H, T_t, S_t), one for each step, usually with T_t = 1.
        starts: the index of each step's first key among all keys, above 0 where a sliding window has dropped earlier
            keys. The default is 0 for all steps.

    Returns:
        A map (batch..., H, sum of T_t, largest of start + S_t).

    For maps with statistics only, those of queries are concatenated, and those of keys are summed.

    Raises:
        ArgumentError: there are no maps, or not one start of at least 0 for each of them.
        NotKeptError: the steps have statistics only, and none of these can be joined.
        ShapeError: the maps differ in leading dimensions, dtype or device.

    >>> import regard, torch
    >>> k = torch.zeros(3, 1)
    >>> steps = [regard.attention(k[:1], k[:n], k[:n], return_weights=True).weights for n in (2, 3, 2)]
    >>> stack(steps, starts=(0, 0, 1)).dense()
    tensor([[0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333],
            [0.0000, 0.5000, 0.5000]])
    """
    require(maps, Sequence, "maps", "a sequence of maps")
    for one in maps:
        require(one, AttentionMap, "each of maps", "an AttentionMap")
    sources = [one.source for one in maps]
    places = starts_of(sources, starts)
    summaries = [source for source in sources if isinstance(source, SummarySource)]
    if len(summaries) == len(sources):
        return AttentionMap(joined_steps(summaries, places))
    return AttentionMap(StackSource(tuple(sources), places))
