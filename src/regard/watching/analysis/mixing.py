"""Which modules of a model mix positions, measured: one changed token, and a look at the outputs of the others."""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeGuard

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.tensors.torch_private import tree_leaves, tree_map
from regard.tensors.undisturbed import evaluated
from regard.watching.interference import FollowedRun, NumberedCall
from regard.watching.report import is_inside, mixers_in, without_calls

if TYPE_CHECKING:
    from regard.watching.watch import Seen

LEAST = 1e-5
"""A change below this share of the largest output is rounding: a mixture of experts multiplies other groups of rows."""
MEASURED = "a changed token changes the outputs of others"


def measure_mixing(seen: "Seen", run: Callable[[], object]) -> dict[str, str]:
    """Run a watched model again, and find the modules that mix positions and that no map shows.

    Each module gets its own input, with one token changed. If its output changes at other positions, it mixes these,
    however it is written and called. From then on the report and the analyses of `seen` go by this too. The model runs
    once, and once more for each level of its modules. A module without an axis of as many positions in its inputs and
    outputs as there are tokens is not told, nor is one that refuses another token (its input holds positions).

    Args:
        seen: the result of `regard.watch`, no longer open.
        run: a function that runs the model on the input that was watched, `lambda: model(x)`, with more than one token.
            It runs in evaluation mode; modes, buffers and the random state are restored.

    Returns:
        The path of each module that mixes positions unread, with the evidence.

    Raises:
        ArgumentError: the model did not run, or nothing tells how many tokens it got.

    >>> import regard
    >>> model = nn.Sequential(nn.Linear(4, 4), nn.GRU(4, 4, batch_first=True))
    >>> x = torch.randn(2, 5, 4)
    >>> with regard.watch(model) as seen:
    ...     output = model(x)
    >>> measure_mixing(seen, lambda: model(x))
    {'1': 'a changed token changes the outputs of others'}
    """
    if not hasattr(seen, "record"):
        raise ArgumentError(f"seen must be what regard.watch gives, got {type(seen).__name__}: {seen!r:.80}")
    from regard.watching.hooks.open_threads import uncompiled

    record, modules = seen.record, seen.modules
    with uncompiled(record):
        first = _RecordedRun()
        with first.through(modules), evaluated(modules[""]):
            run()
        lengths = {n for one in seen.maps for n in one.shape[-2:]} or first.lengths
        if not (lengths := lengths - {1}):
            raise ArgumentError("measure_mixing() needs a run of the watched model on more than one token")
        told: dict[str, bool] = {}
        for depth in sorted({path.count(".") for path in modules if path}):
            at_once = {path: one for path, one in modules.items() if path and path.count(".") == depth}
            told |= _told_by(run, modules[""], at_once, partial(_ChangedRun, first.given, lengths))
    record.measured |= told.keys()
    mixing = {path for path in told if told[path]}
    # A convolution may be a part of the mixing alone; the functions of a module with parts say more than this run.
    known = {path for path in record.mixes if [*modules[path].children()]}
    made = {call.name for call in seen.calls if call.kind == "compression"}  # (with an indexer in it)
    unnamed = {one for one in without_calls(mixing, {call.name for call in seen.calls})
               if not any(is_inside(path, one) for path in known) and not any(is_inside(one, path) for path in made)
               }  # fmt: skip
    record.mixes |= {_deepest(path, mixing, modules): (MEASURED, None) for path in sorted(unnamed)}
    return mixers_in(record)


class _RecordedRun(FollowedRun):
    def __init__(self) -> None:
        super().__init__()
        self.given: dict[NumberedCall, tuple[list[Tensor], list[Tensor]]] = {}
        self.lengths: set[int] = set()
        """The lengths of the model's inputs, after the batch."""

    def begin_anew(self) -> None:
        """It is one run: where the model itself is not followed, calls count through it."""

    def entered(self, call: NumberedCall, inputs: Any) -> Any:
        self.given[call] = [t.detach().clone() for t in _tensors(inputs) if _is_float(t)], []
        if not call[0]:
            self.lengths |= {x.shape[1] for x in _tensors(inputs) if x.dim() > 1}

    def left(self, call: NumberedCall, output: Any) -> Any:
        self.given[call][1].extend(t.detach().clone() for t in _tensors(output))


class _ChangedRun(_RecordedRun):
    """A run in which each followed module gets its inputs of another run, with one token changed, and gives its
    outputs of that run, so that the lengths of a model that predicts them stay the same."""

    def __init__(self, given: dict[NumberedCall, tuple[list[Tensor], list[Tensor]]], lengths: set[int]) -> None:
        super().__init__()
        self.given, self.lengths = given, lengths
        self.mixes: dict[str, bool] = {}
        """Whether each module mixes positions, as far as its outputs tell."""

    def entered(self, call: NumberedCall, inputs: Any) -> Any:
        kept = iter(self.given.get(call, ((), ()))[0])
        return tree_map(lambda x: self._changed(next(kept, x)) if _is_float(x) else x, inputs)

    def left(self, call: NumberedCall, output: Any) -> Any:
        inputs, before = self.given.get(call, ([], []))
        outputs = _tensors(output)
        sizes = {x.shape[axis] for x in inputs for axis in self._axes(x)[:1]}
        reached = [self._reaches_others(one, other, sizes) for one, other in zip(before, outputs, strict=False)
                   if _is_float(one)]  # fmt: skip
        if told := [one for one in reached if one is not None]:
            self.mixes[call[0]] = self.mixes.get(call[0], False) or any(told)
        kept = iter(before)
        same = len(before) == len(outputs)
        return tree_map(lambda x: next(kept) if _is_dense(x) else x, output) if same else None

    def _axes(self, x: Tensor) -> list[int]:
        return [axis for axis in range(1, x.dim()) if x.dim() > 2 and x.shape[axis] in self.lengths]

    def _changed(self, x: Tensor) -> Tensor:
        x = x.clone()
        for axis in self._axes(x)[:1]:
            token = x.select(axis, x.shape[axis] // 2)
            with torch.random.fork_rng():
                token += torch.randn_like(token) * (x.std() + 1)
        return x

    def _reaches_others(self, one: Tensor, other: Tensor, sizes: set[int]) -> bool | None:
        """True if two outputs differ, and along no axis of tokens at the changed token alone; None without an axis."""
        axes = [axis for axis in self._axes(one) if one.shape[axis] in sizes]
        if one.shape != other.shape or not axes:
            return None
        differs = (one - other).abs() > LEAST * one.abs().amax().clamp_min(torch.finfo(one.dtype).tiny)
        places = [torch.tensor(one.shape[axis] // 2, device=one.device) for axis in axes]
        return all(bool(differs.index_fill(axis, at, False).any()) for axis, at in zip(axes, places, strict=True))


def _told_by(
    run: Callable[[], object], model: nn.Module, modules: dict[str, nn.Module], make: Callable[[], _ChangedRun]
) -> dict[str, bool]:
    while True:
        changed = make()
        try:
            # Each run begins with the same random numbers: lengths may be drawn.
            with changed.through(modules), evaluated(model):
                run()
        except Exception:  # of any kind: it is that of a model which was given other numbers than its own
            if not changed.running:
                raise
            modules = {path: one for path, one in modules.items() if path != changed.running[-1][0]}
        else:
            return changed.mixes


def _is_float(x: object) -> TypeGuard[Tensor]:
    return _is_dense(x) and x.is_floating_point()


def _is_dense(x: object) -> TypeGuard[Tensor]:
    return isinstance(x, Tensor) and not x.is_nested


def _tensors(given: object) -> list[Tensor]:
    return [x for x in tree_leaves(given) if _is_dense(x)]


def _deepest(path: str, mixing: set[str], modules: dict[str, nn.Module]) -> str:
    inner = [one for one in mixing if one.rpartition(".")[0] == path or (not path and "." not in one and one)]
    return _deepest(inner[0], mixing, modules) if len(inner) == 1 and [*modules[inner[0]].children()] else path
