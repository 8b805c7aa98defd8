"""Statistics instead of factors: what is kept of a call whose queries and keys are let go at once."""

from collections.abc import Sequence
from typing import Any, Literal, NoReturn, Self

import torch
from torch import Tensor

from regard.errors import ArgumentError, NotKeptError
from regard.inspection.capture.factors import undisturbed
from regard.maps import statistics as st
from regard.maps.base import DENSE_LIMIT_BYTES, Summary, check_names
from regard.maps.tiles import Statistic
from regard.mechanisms.byte_size import human
from regard.weights import AttentionMap

Answers = dict[Statistic, tuple[Tensor, ...]]


class Summarize:
    """Which statistics of each call `regard.watch(model, keep=...)` keeps, and their sizes.

    Args:
        names: of those that `AttentionMap.summary` knows: received, entropy, participation, distance, max, argmax,
            topk, quantile_mass, pooled, pooled_mean, pooled_sum, pooled_max. None means received, entropy, topk and
            pooled.
        k: for topk; a call with fewer keys keeps as many as it has.
        p: for quantile_mass.
        rows: for pooled; calls of fewer queries keep a row for each.
        columns: for pooled, in the same way.
        how: for pooled.

    A head of T queries and S keys takes 4 (S + T) bytes for received and entropy, 8 k T for topk and
    4 rows columns for a picture: as it stands 57 MB for 144 heads at T = S = 8192.

    Raises:
        ArgumentError: an unknown name, or a size out of range.

    >>> Summarize("entropy", "topk", k=2)
    Summarize('entropy', 'topk', k=2)
    """

    def __init__(
        self,
        *names: str,
        k: int = 4,
        p: float = 0.9,
        rows: int = 128,
        columns: int = 128,
        how: Literal["mean", "sum", "max"] = "mean",
    ) -> None:
        self.names = names or ("received", "entropy", "topk", "pooled")
        check_names(self.names, "Summarize()")
        if k < 1 or not 0 < p <= 1 or rows < 1 or columns < 1 or how not in ("mean", "sum", "max"):
            raise ArgumentError(
                "Summarize() needs k, rows and columns of at least 1, p in (0, 1] and how of 'mean', 'sum' or 'max'; "
                f"got {k}, {rows}, {columns}, {p} and {how!r}"
            )
        self.k, self.p, self.rows, self.columns, self.how = k, p, rows, columns, how

    def statistics(self, of: AttentionMap) -> dict[str, Statistic]:
        """By name, for the sizes of a map."""
        k = min(self.k, of.shape[-1])
        return of._named(self.names, k=k, p=self.p, rows=self.rows, columns=self.columns, how=self.how)

    def __repr__(self) -> str:
        """As it is written."""
        sizes = [f"k={self.k}"] if "topk" in self.names else []
        sizes += [f"p={self.p}"] if "quantile_mass" in self.names else []
        if any(name.startswith("pooled") for name in self.names):
            sizes += [f"rows={self.rows}", f"columns={self.columns}"]
        sizes += [f"how={self.how!r}"] if "pooled" in self.names else []
        return f"Summarize({', '.join([*map(repr, self.names), *sizes])})"


class SummaryMap(AttentionMap):  # type: ignore[misc]
    """What was kept of a call that was watched with `keep="summary"`.

    It answers the statistics that were kept, by the methods of every map (`received()`, `topk(k)` up to the k that was
    kept, `max()` where topk was, the averages over heads that follow from these), and by name in `statistics`. Anything
    else raises `NotKeptError`.
    """

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, what: Summarize, named: dict[str, Statistic], answers: Answers
    ) -> None:
        self._shape, self._kind, self._what, self._names, self._answers = shape, dtype, what, named, answers

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""
        return torch.Size(self._shape)

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 input."""
        return self._kind

    @property
    def device(self) -> torch.device:
        """Where the statistics are."""
        return next(iter(self._answers.values()))[0].device

    @property
    def statistics(self) -> Summary:
        """Everything that was kept, by name."""
        found = {name: self._lookup(statistic) or self._refuse() for name, statistic in self._names.items()}
        return {name: self._finished(name, answers) for name, answers in found.items()}

    def block(self, rows: Any, columns: Any, *, limit_bytes: int = DENSE_LIMIT_BYTES) -> Tensor:
        """Never kept.

        Raises:
            NotKeptError: always.
        """
        self._refuse()

    def _refuse(self) -> NoReturn:
        raise NotKeptError(
            f"of this call only statistics were kept, by {self._what!r}: ask for one of these, name what you need in "
            "watch(..., keep=regard.Summarize(...)), or watch with keep='factors', which can be asked for anything"
        )

    @property
    def _call(self) -> NoReturn:  # type: ignore[override]
        self._refuse()

    _state = _backend = _value = _leading = _call

    def _ask_all(self, statistics: Sequence[Statistic]) -> list[tuple[Tensor, ...]]:
        return [self._lookup(statistic) or self._refuse() for statistic in statistics]

    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        return self._lookup(statistic)

    def _lookup(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        if (found := self._answers.get(statistic)) is not None:
            # Keys are held in 32 bits, and handed out as indices are everywhere.
            return tuple(t if t.is_floating_point() else t.long() for t in found)
        top = next((answers for kept, answers in self._answers.items() if isinstance(kept, st.TopWeights)), None)
        match statistic:
            case st.TopWeights(k) if top is not None and k <= top[0].shape[-1]:
                return top[0][..., :k], top[1][..., :k].long()
            case st.Largest() if top is not None:
                return (top[0][..., 0],)
            case st.Pooled(rows, columns, "sum") if (means := st.Pooled(rows, columns, "mean")) in self._answers:
                return (self._answers[means][0] * statistic.areas(self.device),)
            case st.Pooled(rows, columns, "mean") if (sums := st.Pooled(rows, columns, "sum")) in self._answers:
                return (self._answers[sums][0] / statistic.areas(self.device),)
        return None

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        answers = {s: tuple(t[cells] for t in found) for s, found in self._answers.items()}
        return type(self)((*leading, *self._shape[-2:]), self._kind, self._what, self._names, answers)

    def storages(self) -> dict[int, int]:
        """The bytes held, by storage."""
        tensors = [t for found in self._answers.values() for t in found]
        return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}

    def __repr__(self) -> str:
        """What it is, and what it holds."""
        kind = str(self.dtype).removeprefix("torch.")
        held = human(sum(self.storages().values()))
        return f"SummaryMap{tuple(self.shape)} {kind} on {self.device}: {self._what!r}; holds {held}"


def summarized(of: AttentionMap, what: Summarize) -> SummaryMap:
    """The statistics of a map, computed now, in one pass."""
    # Under a watch the functions that are called here would be taken for the model's.
    with undisturbed(), torch._C.DisableTorchFunction():
        named = what.statistics(of)
        asked = list(dict.fromkeys(named.values()))
        answers = dict(zip(asked, map(_small, of._ask_all(asked)), strict=True))
        return SummaryMap(tuple(of.shape), of.dtype, what, named, answers)


def _small(answers: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """Answers that hold no more than their own bytes; numbers of keys fit into 32 bits."""
    small = (t if t.is_floating_point() else t.int() for t in answers)
    return tuple(t.clone() if t.untyped_storage().nbytes() > t.numel() * t.element_size() else t for t in small)


def joined(maps: Sequence[SummaryMap]) -> SummaryMap:
    """The steps of a generation as one: what is kept of each query below one another, what is kept of each key summed.

    Pictures cannot be joined and are left out.
    """
    first, last = maps[0], max(maps, key=lambda m: m.shape[-1])
    queries, keys = sum(m.shape[-2] for m in maps), last.shape[-1]
    named, answers = {}, {}
    for name in first._names:
        steps = [m._names[name] for m in maps]
        if (statistic := _common(steps, maps)) is None:
            continue
        pieces = [m._answers[step] for m, step in zip(maps, steps, strict=True)]
        named[name], answers[statistic] = statistic, _together(statistic, pieces, keys)
    if not named:
        raise NotKeptError(f"the steps were kept by {first._what!r}, none of which can be joined")
    what = Summarize(*named, k=first._what.k, p=first._what.p, how=first._what.how)
    return SummaryMap((*first.leading, queries, keys), first.dtype, what, named, answers)


def _common(steps: list[Statistic], maps: Sequence[SummaryMap]) -> Statistic | None:
    """The statistic of the joined map that those of its steps are parts of."""
    first, before = steps[0], [0]
    for m in maps[:-1]:
        before.append(before[-1] + m.shape[-2])
    match first:
        case st.Pooled():
            return None
        case st.TopWeights():
            return st.TopWeights(max(step.k for step in steps if isinstance(step, st.TopWeights)))
        case st.Distance():
            starts = {s.offset - b for s, b in zip(steps, before, strict=True) if isinstance(s, st.Distance)}
            return st.Distance(starts.pop()) if len(starts) == 1 else None
    return first


def _together(statistic: Statistic, pieces: list[tuple[Tensor, ...]], keys: int) -> tuple[Tensor, ...]:
    pad = torch.nn.functional.pad
    if isinstance(statistic, st.PerKey):
        return (torch.stack([pad(p, (0, keys - p.shape[-1])) for (p,) in pieces]).sum(0),)
    if isinstance(statistic, st.TopWeights):
        missing = [statistic.k - values.shape[-1] for values, _ in pieces]
        pieces = [
            (pad(values, (0, n)), pad(indices, (0, n), value=-1))
            for (values, indices), n in zip(pieces, missing, strict=True)
        ]
    return tuple(torch.cat(parts, dim=1) for parts in zip(*pieces, strict=True))
