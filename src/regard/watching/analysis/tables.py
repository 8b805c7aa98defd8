"""Tables of statistics for every head of every layer, and their maps."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Union

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.lazy import Displayed
from regard.maps.attention_map import AttentionMap
from regard.maps.sources.given import given_weights
from regard.tensors.undisturbed import evaluated

if TYPE_CHECKING:
    from regard.watching.watch import Seen

AnyMap = AttentionMap | Tensor
Maps = Union["Seen", AnyMap, Mapping[str, AnyMap], Iterable[AnyMap | None], tuple[nn.Module, Any]]
"""A watch, one map, maps by name, maps in order, or a model with its inputs. A tensor of weights is a map, and the
`attentions` of transformers are maps in order."""
SHOWN = 24
"""The most heads printed; `top` and `[...]` know all."""


def watched(maps: Any) -> Any:
    """A model with its inputs as the watch of one run without gradients; anything else as it is.

    The inputs are a tuple of arguments, a mapping of named ones, or one argument.
    """
    if isinstance(maps, nn.Module):
        raise ArgumentError(
            f"a model is looked at with its inputs: give the pair of both; got {type(maps).__name__} alone"
        )
    if not (isinstance(maps, tuple) and len(maps) == 2 and isinstance(maps[0], nn.Module)):
        return maps
    from regard.watching.watch import watch

    model, inputs = maps
    with evaluated(model), watch(model) as seen:
        if isinstance(inputs, Mapping):
            model(**inputs)
        else:
            model(*(inputs if isinstance(inputs, tuple) else (inputs,)))
    return seen


def named(maps: Maps) -> list[tuple[str, AttentionMap]]:
    """Name each map (batch..., H, T, S): by the path of its module, the caller's name, or an index.

    A map without heads gets one; another order of its dimensions becomes this one. A tensor becomes a map of given
    weights, and None, which transformers has for a layer without attention, is passed over.
    """
    maps = watched(maps)
    items: Any = getattr(maps, "items", None)
    found: list[tuple[str, Any]]
    if isinstance(maps, AttentionMap | Tensor):
        found = [("0", maps)]
    elif callable(items) and not isinstance(maps, type):
        keyed = [(key if isinstance(key, tuple) and len(key) == 2 else (str(key), 0), one) for key, one in items()]
        calls = [name for (name, _), _ in keyed]
        found = [(name if calls.count(name) == 1 else f"{name} [{call}]", one) for (name, call), one in keyed]
    elif isinstance(maps, Iterable):
        found = [(str(number), one) for number, one in enumerate(maps) if one is not None]
    else:
        found = [("", maps)]
    found = [(name, AttentionMap(given_weights(one)) if isinstance(one, Tensor) else one) for name, one in found]
    if not found:
        raise ArgumentError("there are no maps to look at: nothing was seen")
    if wrong := [type(one).__name__ for _, one in found if not isinstance(one, AttentionMap)]:
        raise ArgumentError(f"this takes what regard.watch saw, attention maps, or tensors; got {', '.join(wrong)}")
    for name, one in found:
        one.source.require_heads(f"this, for {name!r},")
    return [(name, one.with_heads()) for name, one in found]


@dataclass(frozen=True, slots=True, eq=False)
class HeadTable(Displayed):
    """Statistics of every head of every layer; `print` it.

    `table["entropy"]` is a tensor (layers, heads), NaN where a layer has fewer heads than another or the number
    means nothing.

    >>> table = HeadTable(("0", "1"), {"entropy": torch.tensor([[1.0, 2.0], [3.0, float("nan")]])})
    >>> print(table)
    layer  head  entropy
    0         0     1.00
    0         1     2.00
    1         0     3.00
    >>> table.top("entropy", 1)
    [('1', 0, 3.0)]
    """

    layers: tuple[str, ...]
    columns: dict[str, Tensor]
    given_up: tuple[str, ...] = ()
    """Modules that mix positions and are not covered."""

    def __getitem__(self, name: str) -> Tensor:
        """The values (layers, heads) of a column; raises ArgumentError without such a column."""
        if name not in self.columns:
            raise ArgumentError(f"the table has the columns {', '.join(self.columns)}; got {name!r}")
        return self.columns[name]

    def top(self, name: str, count: int = 5) -> list[tuple[str, int, float]]:
        """The heads with the largest values of a column, from the largest down: (layer, head, value)."""
        numbers = self[name]
        order = numbers.nan_to_num(nan=-torch.inf).flatten().argsort(descending=True, stable=True)[:count].tolist()
        places = [divmod(place, numbers.shape[1]) for place in order]
        return [(self.layers[i], j, float(numbers[i, j])) for i, j in places if not numbers[i, j].isnan()]

    def __str__(self) -> str:
        """A line for each head; if there are many heads, only the first and the last."""
        width = max(5, *(len(layer) for layer in self.layers))
        lines = [f"{'layer':<{width}}  head" + "".join(f"  {name:>7}" for name in self.columns)]
        numbers = torch.stack(list(self.columns.values()), -1)
        rows = [(i, j) for i in range(len(self.layers)) for j in range(numbers.shape[1])]
        rows = [(i, j) for i, j in rows if not numbers[i, j].isnan().all()]
        kept = rows if len(rows) <= SHOWN else [*rows[: SHOWN // 2], None, *rows[-SHOWN // 2 :]]
        for row in kept:
            if row is None:
                lines.append(f"... {len(rows) - SHOWN} more")
                continue
            cells = zip(self.columns, numbers[row].tolist(), strict=True)
            short = [(name, "-" if value != value else f"{value:.2f}") for name, value in cells]
            shown = "".join(f"  {value:>{max(7, len(name))}}" for name, value in short)
            lines.append(f"{self.layers[row[0]]:<{width}}  {row[1]:>4}{shown}")
        return "\n".join([*lines, *(f"not covered: {path}" for path in self.given_up)])

    def __repr__(self) -> str:
        heads = next(iter(self.columns.values())).shape[1]
        return f"HeadTable({len(self.layers)} layers, up to {heads} heads: {', '.join(self.columns)}); print it"


def table(layers: list[str], rows: list[dict[str, Tensor]], given_up: tuple[str, ...]) -> HeadTable:
    heads = max(len(numbers) for row in rows for numbers in row.values())

    def column(name: str) -> Tensor:
        known = [row[name].cpu() if name in row else torch.empty(0, device="cpu") for row in rows]
        return torch.stack([torch.nn.functional.pad(one, (0, heads - len(one)), value=torch.nan) for one in known])

    names = dict.fromkeys(name for row in rows for name in row)
    return HeadTable(tuple(layers), {name: column(name) for name in names}, given_up)
