"""Linear recurrences over positions, computed chunk by chunk.

With scale c, decay w_t = exp(log_decay_t), write strength beta_t and removal (a_t, b_t), the state is

    S_t = (diag(w_t) - b_t a_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = c S_t^T q_t,

so that o_t = sum over j <= t of P_tj v_j with P_tj = c q_t^T A_t ... A_{j+1} k_j beta_j, where A_t is the bracket.

Source: Yang et al. 2024 (arXiv:2406.06484), section 3.2, for chunks of the delta rule; Yang et al. 2025
(arXiv:2412.06464), section 3.3, with decay; Yang et al. 2024 (arXiv:2312.06635), section 4, for decay by channel.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from regard.call.shapes import Rows
from regard.errors import ArgumentError, NonFiniteError, RegardError
from regard.tensors.guards import has_values, is_transformed

CHUNK = 64
"""The most positions of a chunk: the matrices of its pairs are about as large as queries and keys."""


Joined = list[tuple[Tensor, Tensor]]


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    query: Tensor
    """(N, T, D). The last query stands at the last key: there may be fewer queries than keys."""
    key: Tensor
    """(N, S, D)."""
    scale: float
    """c."""
    log_decay: Tensor | None = None
    """(N, S, 1), or (N, S, D) with a decay for each channel of the keys; at most 0. None for no decay."""
    beta: Tensor | None = None
    """(N, S); None for 1."""
    removal: tuple[Tensor, Tensor] | None = None
    """(a, b) of (N, S, D) each: a reads the state before its decay, and b is taken out of it. None for no removal."""
    by_delta: bool = False
    """Whether a = w k and b = beta k: the delta rule, which replaces the value of a key."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the state: float32, or float64 for float64 input."""
        return torch.promote_types(self.query.dtype, torch.float32)

    @property
    def has_removal(self) -> bool:
        return self.by_delta or self.removal is not None

    @property
    def offset(self) -> int:
        return self.key.shape[1] - self.query.shape[1]

    def tensors(self) -> list[Tensor]:
        found = (self.query, self.key, self.log_decay, self.beta, *(self.removal or ()))
        return [one for one in found if one is not None]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Recurrence":
        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        pair = None if self.removal is None else (change(self.removal[0]), change(self.removal[1]))
        query, key = change(self.query), change(self.key)
        return replace(self, query=query, key=key, log_decay=of(self.log_decay), beta=of(self.beta), removal=pair)

    def chunked(self) -> "Chunks":
        return _chunks(self)

    def __str__(self) -> str:
        width = 0 if self.log_decay is None else self.log_decay.shape[-1]
        decay = "without decay" if not width else "with a decay a head" if width == 1 else "with a decay a channel"
        return decay + (", by the delta rule" if self.by_delta else "" if self.removal is None else ", with removal")


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """n chunks of C positions, or n joined chunks: with x for the values, o = local x + carried S and S' = onward S +
    written^T x. Positions behind the last one fill the last chunk; they write nothing."""

    local: Tensor
    """(N, n, C, C): the weights between the positions of a chunk."""
    carried: Tensor
    """(N, n, C, D): the queries, carried back to the state before the chunk."""
    written: Tensor
    """(N, n, C, D): the keys, carried on to the state after the chunk."""
    onward: Tensor
    """(N, n, D, D): from the state before a chunk to that after it; without removal its diagonal, (N, n, 1, D or 1)."""
    has_removal: bool
    queries: int
    """T."""
    keys: int
    """S."""

    @property
    def size(self) -> int:
        return self.local.shape[-1]

    @property
    def count(self) -> int:
        return self.local.shape[1]

    def product(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """P x for x (N or 1, S, E), with a state (N, D, E) before the first position: (N, T, E), and the last state."""
        x = _in_chunks(x, self.size, self.count * self.size - self.keys)
        steps = (self.written.mT @ x).unbind(1)
        states = [torch.zeros_like(steps[0]) if state is None else state.to(steps[0].dtype)]
        for number, step in enumerate(steps):
            states.append(self._on(self.onward[:, number], states[-1]) + step)
        output = self.local @ x + self.carried @ torch.stack(states[:-1], 1)
        return output.flatten(1, 2)[:, self.keys - self.queries : self.keys], states[-1]

    def transposed_product(self, x: Tensor) -> Tensor:
        """P^T x for x (N or 1, T, E): (N, S, E)."""
        x = torch.nn.functional.pad(x, (0, 0, self.keys - self.queries, self.count * self.size - self.keys))
        x = x.unflatten(1, (self.count, self.size))
        steps = (self.carried.mT @ x).unbind(1)
        after, onward = [torch.zeros_like(steps[0])], self.onward.mT if self.has_removal else self.onward
        for number in range(self.count - 1, 0, -1):
            after.append(self._on(onward[:, number], after[-1]) + steps[number])
        found = self.local.mT @ x + self.written @ torch.stack(after[::-1], 1)
        return found.flatten(1, 2)[:, : self.keys]

    def blocks(self) -> Callable[[Rows, Rows], Tensor]:
        """Weights (N, t, s). All that blocks share is made now: a block may be made again in a backward pass."""
        return partial(self._block, self._joined())

    def _block(self, joined: Joined, rows: Rows, columns: Rows) -> Tensor:
        shift = self.keys - self.queries
        first, stop = _ends(columns)
        begin, end = first // self.size, -(-stop // self.size)
        found = [self._rows(joined, number, place, begin, end) for number, place in self._by_chunk(rows, shift)]
        whole = found[0] if len(found) == 1 else torch.cat(found, 1)
        if not isinstance(rows, range):  # (They are in the order of their chunks.)
            whole = whole[:, ((rows + shift) // self.size).argsort(stable=True).argsort()]
        if isinstance(columns, range):
            return whole[..., columns.start - begin * self.size : columns.stop - begin * self.size]
        return whole[..., columns - begin * self.size]

    def _by_chunk(self, rows: Rows, shift: int) -> Iterator[tuple[int, slice | Tensor]]:
        first, stop = (end + shift for end in _ends(rows))
        for number in range(first // self.size, -(-stop // self.size)):
            start = number * self.size
            if isinstance(rows, range):
                yield number, slice(max(first - start, 0), min(stop - start, self.size))
            else:
                place = rows + shift - start
                yield number, place[(place >= 0) & (place < self.size)]

    def _rows(self, joined: Joined, number: int, place: slice | Tensor, begin: int, end: int) -> Tensor:
        """Queries of one chunk, for the keys of chunks `begin` to `end`, are carried back by the largest joined
        chunks: as many products as the number has binary digits."""
        carried, local = self.carried[:, number, place], self.local[:, number, place]
        found = [local] if begin <= number < end else []
        at = number
        while at > begin:
            level = (at & -at).bit_length() - 1
            written, onward = joined[level]
            before = at - (1 << level)
            one = before >> level
            if before < end:
                weights = carried @ written[:, one].mT
                found.append(weights[..., max(begin - before, 0) * self.size : (end - before) * self.size])
            carried, at = _flushed(self._back(onward[:, one], carried)), before
        later = max(end - max(number + 1, begin), 0) * self.size
        behind = [local.new_zeros(*local.shape[:-1], later)] if later or not found else []
        return torch.cat([*found[::-1], *behind], -1)

    def _joined(self) -> Joined:
        """`written` and `onward` of single chunks, of joined pairs, of four joined chunks, and so on."""
        found = [(self.written, self.onward)]
        while found[-1][0].shape[1] > 1:
            written, onward = (x[:, : x.shape[1] // 2 * 2].unflatten(1, (-1, 2)).unbind(2) for x in found[-1])
            keys = torch.cat([_flushed(self._on(onward[1], written[0].mT).mT), written[1]], -2)
            both = onward[1] @ onward[0] if self.has_removal else onward[1] * onward[0]
            found.append((keys, _flushed(both)))
        return found

    def _on(self, onward: Tensor, state: Tensor) -> Tensor:
        """A state (..., D, E) before a chunk, after it."""
        return onward @ state if self.has_removal else onward.mT * state

    def _back(self, onward: Tensor, rows: Tensor) -> Tensor:
        """Rows (..., D) that read the state after a chunk, as rows that read the one before it."""
        return rows @ onward if self.has_removal else rows * onward


def _chunks(of: Recurrence) -> Chunks:
    keys, dtype = of.key.shape[1], of.dtype
    size = min(CHUNK, 1 << max(keys - 1, 0).bit_length())
    fill = -keys % size

    def cut(x: Tensor) -> Tensor:
        return _in_chunks(x.to(dtype), size, fill)

    query = torch.nn.functional.pad(of.query.to(dtype) * of.scale, (0, 0, of.offset, 0))
    query, key = cut(query), cut(of.key)
    logs = key.new_zeros(*key.shape[:-1], 1) if of.log_decay is None else cut(of.log_decay)
    pairs = _by_head(logs) if logs.shape[-1] == 1 else partial(_by_channel, logs)
    from_start, to_end = logs.cumsum(-2), _after(logs).exp()
    written = key if of.beta is None else key * cut(of.beta[..., None])
    local, carried, kept = pairs(query, written), query * from_start.exp(), from_start[..., -1:, :].exp()
    ends = (of.query.shape[1], keys)
    if not of.has_removal:
        return Chunks(local, carried, written * to_end, kept, False, *ends)
    a, b = (key * logs.exp(), written) if of.removal is None else (cut(of.removal[0]), cut(of.removal[1]))
    read = a * torch.nn.functional.pad(from_start[..., :-1, :], (0, 0, 1, 0)).exp()
    # Row t of `earlier` is a_{t+1}, which reads the state of position t.
    earlier = torch.nn.functional.pad(a[..., 1:, :], (0, 0, 0, 1))
    of_removed = _down(pairs(earlier, b))
    of_keys = of_removed if written is b else _down(pairs(earlier, written))
    # The inverse of I + of_removed: Yang et al. 2024, equation 10 (the UT transform).
    solved = torch.linalg.solve_triangular(of_removed, torch.cat([read, of_keys], -1), upper=False, unitriangular=True)
    read, mixed = solved.split((read.shape[-1], size), -1)
    taken, removed = local if written is b else pairs(query, b), b * to_end
    return Chunks(
        local=local - taken @ mixed,
        carried=carried - taken @ read,
        written=written * to_end - mixed.mT @ removed,
        onward=torch.diag_embed(kept[..., 0, :].expand(*kept.shape[:-2], key.shape[-1])) - removed.mT @ read,
        has_removal=True,
        queries=ends[0],
        keys=keys,
    )


def fault_of(recurrence: Recurrence, values: Tensor | None = None, state: Tensor | None = None) -> RegardError | None:
    most = 2.0 if recurrence.by_delta else torch.finfo(recurrence.dtype).max
    pair = recurrence.removal or (None, None)
    ranges: tuple[tuple[str, Tensor | None, float, float], ...] = (
        ("query", recurrence.query, -torch.inf, torch.inf),
        ("key", recurrence.key, -torch.inf, torch.inf),
        ("value", values, -torch.inf, torch.inf),
        ("decay", recurrence.log_decay, -torch.inf, 0.0),
        ("beta", recurrence.beta, 0.0, most),
        ("a of removal", pair[0], -torch.inf, torch.inf),
        ("b of removal", pair[1], -torch.inf, torch.inf),
        ("state", state, -torch.inf, torch.inf),
    )
    found = [(name, x.detach(), low, high) for name, x, low, high in ranges if x is not None and x.numel()]
    if not found or is_transformed() or not all(has_values(x) for _, x, _, _ in found):
        return None
    ends = torch.stack([torch.stack(x.aminmax()).to(recurrence.dtype) for _, x, _, _ in found]).tolist()
    for (name, _, low, high), (least, largest) in zip(found, ends, strict=True):
        is_finite = least - least == 0 and largest - largest == 0
        if not is_finite and not (name == "decay" and largest <= 0):
            return NonFiniteError(f"{name} must be finite, got values from {least:g} to {largest:g}: find their origin")
        if least < low or largest > high:
            meant = ": it is the logarithm of a factor in [0, 1]" if name == "decay" else ""
            ends_of = (
                "at most 0" if name == "decay" else 'in [0, 2] with removal="delta"' if high == 2 else "at least 0"
            )
            return ArgumentError(f"{name} must be {ends_of}, got values from {least:g} to {largest:g}{meant}")
    return None


def _flushed(x: Tensor) -> Tensor:
    """Zeros for numbers so small that their products would be subnormal: CPUs take ten times as long for these."""
    return torch.nn.functional.hardshrink(x, torch.finfo(x.dtype).tiny ** 0.5)


def _by_head(logs: Tensor) -> Callable[[Tensor, Tensor], Tensor]:
    """A function of left and right, (..., C, D): exp(sum of logs_s for j < s <= t) left_t . right_j, (..., C, C), and
    0 for j > t. Each exponent is summed by itself: a difference of large sums would lose digits."""
    size = logs.shape[-2]
    of_pairs = logs.expand(*logs.shape[:-1], size).tril(-1).cumsum(-2)
    decays = of_pairs.exp().tril()
    return lambda left, right: (left @ right.mT) * decays


def _by_channel(logs: Tensor, left: Tensor, right: Tensor) -> Tensor:
    """The same with logs (..., C, D): sum over d of left_td right_jd exp(sum of logs_sd for j < s <= t).

    C is a power of 2, and two halves meet at their border: the part between two positions is the sum up to it and the
    sum from it, so that no exponent is above 0, and none is a difference.
    """
    found = (left * right).sum(-1)[..., None, None]
    size, half = left.shape[-2], 1
    while half < size:
        a, b, logs_of = (x.unflatten(-2, (-1, 2, half)) for x in (left, right, logs))
        later = a[..., 1, :, :] * logs_of[..., 1, :, :].cumsum(-2).exp()
        cross = later @ (b[..., 0, :, :] * _after(logs_of[..., 0, :, :]).exp()).mT
        first, second = found.unflatten(-3, (-1, 2)).unbind(-3)
        above = torch.cat([first, torch.zeros_like(cross)], -1)
        found = torch.cat([above, torch.cat([cross, second], -1)], -2)
        half *= 2
    return found[..., 0, :, :]


def _after(logs: Tensor) -> Tensor:
    behind = torch.nn.functional.pad(logs[..., 1:, :], (0, 0, 0, 1))
    return behind.flip(-2).cumsum(-2).flip(-2)


def _down(pairs: Tensor) -> Tensor:
    return torch.nn.functional.pad(pairs[..., :-1, :], (0, 0, 1, 0))


def _in_chunks(x: Tensor, size: int, fill: int) -> Tensor:
    return torch.nn.functional.pad(x, (0, 0, 0, fill)).unflatten(1, (-1, size))


def _ends(places: Rows) -> tuple[int, int]:
    if isinstance(places, range):
        return places.start, places.stop
    low, high = (int(end) for end in places.aminmax())
    return low, high + 1
