"""Labels of positions are proved: a part of the input changes, and the positions that stand for it move, no others."""

import itertools
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from math import comb, prod
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.tasks.pictures.token_maps import AxisLabels
from regard.tasks.viewing.image_cells import ImageCells

OF_TOKENS = ("input_ids", "decoder_input_ids")
QUARTERS = 4
"""Parts of a sound that change one after the other."""
LEAST_OWN = 0.8
"""The least share of positions that the change of their own quarter moves most; of an order by chance it is 0.25."""


class NoPart(Enum):
    OWN = "own"
    """A learned token: it moves with no part."""
    UNKNOWN = "unknown"
    """Nothing is claimed of it."""


class ClaimedAxis(NamedTuple):
    labels: list[str]
    parts: Sequence[Any]
    """The name of an input of tokens and a position in it; row and column of `cells`; or an `NoPart`."""
    cells: ImageCells | None = None
    is_time: bool = False
    """Whether positions follow one another as the moments of a sound do; `parts` is empty."""


ClaimedAxes = tuple[Sequence[ClaimedAxis], Sequence[ClaimedAxis]]
"""The possible meanings of the queries and the keys of a map."""


class MapPlace(NamedTuple):
    module: nn.Module
    call: int
    """Which call of the module."""
    sequences: int
    """How many sequences enter it,"""
    sequence: int
    """and which of them is shown."""
    queries: int
    keys: int
    is_crossing: bool


@dataclass(frozen=True, slots=True)
class PlaceProof:
    """Runs a model on changed inputs, and compares the positions that enter the modules of its maps.

    Of images attention is silenced meanwhile, so that positions stay apart in every layer. Of tokens and sounds the
    first module that has an axis decides for the axis, and the pass ends there.
    """

    run: Callable[[Mapping[str, Any]], Any]
    """Runs the model on inputs."""
    inputs: Mapping[str, Any]
    fixed: frozenset[int]
    """Tokens that are not changed: marks decide about more than their own position."""
    vocabulary: int
    seed: Tensor
    """The state of random numbers in which the maps were made."""

    def labels(
        self, claims: Mapping[str, ClaimedAxes], places: Mapping[str, MapPlace]
    ) -> dict[str, tuple[AxisLabels, AxisLabels]]:
        every = [axis for axes in claims.values() for either in axes for axis in either]
        is_image = any(axis.cells is not None for axis in every)
        asked = dict(claims) if is_image else _first_of_each(claims)
        proved = set[Any]()
        for cells, is_time in dict.fromkeys((axis.cells, axis.is_time) for axis in every):
            codes = _codes(self._parts(cells))
            changes = self._quarters() if is_time else self._coded(cells, codes)
            wanted = {name: places[name] for name in asked}
            found = [self._positions(one, wanted, silent=is_image) for one in (self.inputs, *changes)]
            for name, axes in asked.items():
                for side, axis in [(n, one) for n in (0, 1) for one in axes[n]]:
                    if (axis.cells, axis.is_time) == (cells, is_time):
                        moved = [_moved(one.get((name, side)), found[0].get((name, side))) for one in found[1:]]
                        if _agrees(axis, moved, codes):
                            proved.add((name, side, id(axis)) if is_image else id(axis))

        def found_for(name: str, side: int) -> AxisLabels:
            axes = (one for one in claims[name][side] if ((name, side, id(one)) if is_image else id(one)) in proved)
            return next((axis.labels for axis in axes), None)

        return {name: (found_for(name, 0), found_for(name, 1)) for name in claims}

    # -- changed inputs ----------------------------------------------------------------------------------

    def _parts(self, cells: ImageCells | None) -> list[Any]:
        ids = [(name, self.inputs[name]) for name in OF_TOKENS if isinstance(self.inputs.get(name), Tensor)]
        tokens = [(name, n) for name, rows in ids for n, one in enumerate(rows[0].tolist()) if one not in self.fixed]
        return [*tokens, *(cells.each() if cells is not None else ())]

    def _coded(self, cells: ImageCells | None, codes: Mapping[Any, tuple[int, ...]]) -> Iterator[dict[str, Any]]:
        """An input for each digit, in which those parts are changed whose code has a 1 there."""
        for digit in range(1 + max((place for code in codes.values() for place in code), default=0)):
            yield self._changed(cells, {part for part, code in codes.items() if digit in code})

    def _changed(self, cells: ImageCells | None, chosen: Container[Any]) -> dict[str, Any]:
        changed = dict(self.inputs)
        for name in OF_TOKENS:
            if isinstance(ids := changed.get(name), Tensor):
                row = [self._other(one) if (name, n) in chosen else one for n, one in enumerate(ids[0].tolist())]
                changed[name] = torch.tensor([row]).expand_as(ids)
        if cells is not None:
            pixels = changed["pixel_values"]
            noise = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(0), dtype=pixels.dtype)
            changed["pixel_values"] = torch.where(cells.mask(pixels.shape, chosen), pixels + 1 + noise, pixels)
        return changed

    def _other(self, token: int) -> int:
        others = ((token + step) % self.vocabulary for step in range(1, self.vocabulary))
        return next((one for one in others if one not in self.fixed), token)

    def _quarters(self) -> list[dict[str, Any]]:
        name, sound = next((n, x) for n, x in self.inputs.items() if isinstance(x, Tensor) and x.is_floating_point())
        axis = max(range(1, sound.dim()), key=lambda n: sound.shape[n])
        found = []
        for quarter in range(QUARTERS):
            begin, end = (sound.shape[axis] * n // QUARTERS for n in (quarter, quarter + 1))
            other = sound.clone()
            part = other.narrow(axis, begin, end - begin)
            part += torch.randn(part.shape, generator=torch.Generator().manual_seed(quarter)) * (1 + sound.std())
            found.append({**self.inputs, name: other})
        return found

    # -- passes ------------------------------------------------------------------------------------------

    def _positions(
        self, inputs: Mapping[str, Any], places: Mapping[str, MapPlace], *, silent: bool
    ) -> dict[tuple[str, int], Tensor]:
        """The positions (n, features) that enter the modules, as queries (0) and as keys (1) of the maps."""
        found, before = dict[tuple[str, int], Tensor](), torch.get_rng_state()
        torch.set_rng_state(self.seed)
        try:
            with _recorded(places, found, silent=silent):
                self.run(inputs)
        except _EnoughSeen:
            pass
        finally:
            torch.set_rng_state(before)
        return found


class _EnoughSeen(BaseException):
    """Every position that is asked for has been read, so that the pass ends. No handler of errors takes it for one."""


@contextmanager
def _recorded(places: Mapping[str, MapPlace], found: dict[tuple[str, int], Tensor], *, silent: bool) -> Iterator[None]:
    with ExitStack() as hooks:
        for module in dict.fromkeys(place.module for place in places.values()):
            here = {name: place for name, place in places.items() if place.module is module}
            hook = _Reading(here, found, None if silent else len(places))
            hooks.callback(module.register_forward_pre_hook(hook, with_kwargs=True).remove)
            if silent:
                hooks.callback(module.register_forward_hook(_silenced).remove)
        yield


class _Reading:
    def __init__(self, places: dict[str, MapPlace], found: dict[tuple[str, int], Tensor], most: int | None) -> None:
        self._places, self._found, self._most, self._calls = places, found, most, 0

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [one for one in (*args, *kwargs.values()) if isinstance(one, Tensor) and one.is_floating_point()]
        for name, place in self._places.items():
            if place.call != self._calls:
                continue
            of_queries = [rows for one in given if (rows := _rows(one, place.queries, place)) is not None]
            of_keys = [rows for one in given if (rows := _rows(one, place.keys, place)) is not None]
            if of_queries:
                self._found[name, 0] = of_queries[0]
            if not place.is_crossing and place.queries == place.keys and of_queries:
                self._found[name, 1] = of_queries[0]
            elif of_keys:
                self._found[name, 1] = of_keys[-1]
        self._calls += 1
        if self._most is not None and len({name for name, _ in self._found}) == self._most:
            raise _EnoughSeen


def _rows(given: Tensor, count: int, place: MapPlace) -> Tensor | None:
    for lead, rows in ((given.shape[:-2], given.shape[-2:-1]), (given.shape[:-3], given.shape[-3:-1])):
        if given.dim() > len(rows) and prod(rows) == count and prod(lead) in (1, place.sequences):
            whole = given.reshape(prod(lead), count, given.shape[-1])
            return whole[place.sequence if len(whole) > 1 else 0].detach().float().cpu()
    return None


def _silenced(module: nn.Module, args: Any, output: Any) -> Any:
    if isinstance(output, Tensor):
        return torch.zeros_like(output) if output.is_floating_point() else output
    if type(output) in (tuple, list):
        return type(output)(_silenced(module, args, one) for one in output)
    return output


def _moved(positions: Tensor | None, before: Tensor | None) -> Tensor | None:
    if positions is None or before is None or positions.shape != before.shape:
        return None
    return (positions - before).abs().amax(-1).nan_to_num(nan=0.0)


def _codes(parts: Sequence[Any]) -> dict[Any, tuple[int, ...]]:
    """Codes of as many ones each, by the places of the ones: what moves with two parts has more ones than any."""
    digits = next(n for n in itertools.count(1) if comb(n, (n + 1) // 2) >= len(parts))
    return dict(zip(parts, itertools.combinations(range(digits), (digits + 1) // 2), strict=False))


def _agrees(axis: ClaimedAxis, moved: Sequence[Tensor | None], codes: Mapping[Any, tuple[int, ...]]) -> bool:
    if any(one is None for one in moved):
        return False
    sizes = torch.stack([one for one in moved if one is not None])
    if axis.is_time:  # frames overlap at the ends of quarters, and convolutions of positions reach beyond them
        count, moments = sizes.shape[-1], torch.arange(sizes.shape[-1]) * QUARTERS
        strongest = sizes.argmax(0) * count
        is_own = (moments < strongest + count) & (moments + QUARTERS > strongest)  # a moment may lie in two quarters
        return bool((sizes > 0).any(0).all()) and float(is_own.float().mean()) >= LEAST_OWN
    has_moved = [tuple(n for n, one in enumerate(each) if one) for each in (sizes > 0).T.tolist()]
    # (A learned token, or a mark, does not change.)
    return all(part is NoPart.UNKNOWN or codes.get(part, ()) == ones
               for part, ones in zip(axis.parts, has_moved, strict=True))  # fmt: skip


def _first_of_each(claims: Mapping[str, ClaimedAxes]) -> dict[str, ClaimedAxes]:
    known, found = set[int](), dict[str, ClaimedAxes]()
    for name, axes in claims.items():
        if ids := {id(axis) for side in axes for axis in side} - known:
            found[name] = axes
            known |= ids
    return found
