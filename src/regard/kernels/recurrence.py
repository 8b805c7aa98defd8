"""Linear recurrences over positions, computed chunk by chunk.

With scale c, decay w_t = exp(log_decay_t), write strength beta_t and removal (a_t, b_t), the state is

    S_t = (diag(w_t) - b_t a_t^T) S_{t-1} + beta_t k_t v_t^T,    o_t = c S_t^T q_t,

so that o_t = sum over j <= t of P_tj v_j with P_tj = c q_t^T A_t ... A_{j+1} k_j beta_j, where A_t is the bracket.

Source: Yang et al. 2024 (arXiv:2406.06484), section 3.2, for chunks of the delta rule; Yang et al. 2025
(arXiv:2412.06464), section 3.3, with decay; Yang et al. 2024 (arXiv:2312.06635), section 4, for decay by channel.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

import torch
from torch import Tensor

from regard.call.shapes import Rows, index_tensor

CHUNK = 64
"""The most positions of a chunk: the matrices of its pairs are about as large as queries and keys."""


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """The factors of N recurrences, one for each head of each sequence. All may have a graph."""

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
    def offset(self) -> int:
        """The position of the first query."""
        return self.key.shape[1] - self.query.shape[1]

    def tensors(self) -> list[Tensor]:
        """The tensors that it holds."""
        found = (self.query, self.key, self.log_decay, self.beta, *(self.removal or ()))
        return [one for one in found if one is not None]

    def mapped(self, change: Callable[[Tensor], Tensor]) -> "Recurrence":
        """The recurrence with each tensor changed."""

        def of(tensor: Tensor | None) -> Tensor | None:
            return None if tensor is None else change(tensor)

        pair = None if self.removal is None else (change(self.removal[0]), change(self.removal[1]))
        query, key = change(self.query), change(self.key)
        return replace(self, query=query, key=key, log_decay=of(self.log_decay), beta=of(self.beta), removal=pair)

    def chunked(self) -> "Chunks":
        """The factors of its chunks."""
        return _chunks(self)


@dataclass(frozen=True, eq=False)
class Chunks:
    """A recurrence in n chunks of C positions: each maps the state before it and its inputs to the state after it.

    With x for the values, o = local x + carried S and S' = decay S - b^T (read S) + written^T x. Positions behind the
    last one fill the last chunk; they write nothing.
    """

    local: Tensor
    """(N, n, C, C): the weights between the positions of a chunk."""
    carried: Tensor
    """(N, n, C, D): the queries, carried back to the state before the chunk."""
    written: Tensor
    """(N, n, C, D): the keys, carried on to the state after the chunk."""
    decay: Tensor
    """(N, n, 1 or D): the decay of the state in the chunk."""
    read: Tensor | None
    """(N, n, C, D): the vectors that read the state before the chunk; None without removal."""
    removed: Tensor | None
    """(N, n, C, D): the vectors that are taken out, carried on to the state after the chunk."""
    queries: int
    """T."""
    keys: int
    """S."""

    @property
    def size(self) -> int:
        """C."""
        return self.local.shape[-1]

    @cached_property
    def count(self) -> int:
        """The number of chunks."""
        return self.local.shape[1]

    def state(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """The states before each chunk (N, n, D, E) and after the last (N, D, E), for values (N or 1, S, E)."""
        steps = (self.written.mT @ self._in_chunks(x, self.keys)).unbind(1)
        states = [torch.zeros_like(steps[0]) if state is None else state.to(steps[0].dtype)]
        for number, step in enumerate(steps):
            states.append(self._onward(number, states[-1]) + step)
        return torch.stack(states[:-1], 1), states[-1]

    def product(self, x: Tensor, state: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """P x for x (N or 1, S, E), with a state (N, D, E) before the first position: (N, T, E), and the last state."""
        before, last = self.state(x, state)
        output = self.local @ self._in_chunks(x, self.keys) + self.carried @ before
        return output.flatten(1, 2)[:, self.keys - self.queries : self.keys], last

    def transposed_product(self, x: Tensor) -> Tensor:
        """P^T x for x (N or 1, T, E): (N, S, E)."""
        x = self._in_chunks(torch.nn.functional.pad(x, (0, 0, self.keys - self.queries, 0)), self.keys)
        steps = (self.carried.mT @ x).unbind(1)
        after = [torch.zeros_like(steps[0])]
        for number in range(self.count - 1, 0, -1):
            after.append(self._back(number, after[-1].mT).mT + steps[number])
        found = self.local.mT @ x + self.written @ torch.stack(after[::-1], 1)
        return found.flatten(1, 2)[:, : self.keys]

    def block(self, rows: Rows, columns: Rows) -> Tensor:
        """The weights of some queries and keys, (N, t, s): queries are carried back, chunk by chunk."""
        device = self.local.device
        at = index_tensor(rows, device) + self.keys - self.queries
        first, stop = _ends(columns)
        lowest, above = (place + self.keys - self.queries for place in _ends(rows))
        size, heads = self.size, self.local.shape[0]
        begin, end = first // size, -(-stop // size)
        found = [at.new_zeros((), dtype=self.local.dtype).expand(heads, len(at), size)] * max(end - begin, 0)
        carried: Tensor | None = None
        for number in range(min(self.count, -(-above // size)) - 1, begin - 1, -1):
            weights = None if carried is None else carried @ self.written[:, number].mT
            back = None if carried is None else self._back(number, carried)
            if number >= lowest // size:
                place = at - number * size
                here = ((place >= 0) & (place < size))[:, None]
                place = place.clamp(0, size - 1)
                own = self.local[:, number, place] * here
                weights = own if weights is None else weights + own
                own = self.carried[:, number, place] * here
                back = own if back is None else back + own
            assert weights is not None
            carried = back
            if number < end:
                found[number - begin] = weights
        if not found:
            return self.local.new_zeros(heads, len(at), 0)
        whole = torch.cat(found, -1)
        if isinstance(columns, range):
            return whole[..., columns.start - begin * size : columns.stop - begin * size]
        return whole[..., columns - begin * size]

    def _in_chunks(self, x: Tensor, length: int) -> Tensor:
        return _in_chunks(x, self.size, self.count * self.size - length)

    def _onward(self, number: int, state: Tensor) -> Tensor:
        """A state (N, D, E) before a chunk, after it."""
        kept = state * self.decay[:, number, :, None]
        if self.read is None or self.removed is None:
            return kept
        return kept - self.removed[:, number].mT @ (self.read[:, number] @ state)

    def _back(self, number: int, rows: Tensor) -> Tensor:
        """Rows (N, t, D) that read the state after a chunk, as rows that read the one before it."""
        kept = rows * self.decay[:, number, None]
        if self.read is None or self.removed is None:
            return kept
        return kept - (rows @ self.removed[:, number].mT) @ self.read[:, number]


def _chunks(of: Recurrence) -> Chunks:
    keys, dtype = of.key.shape[1], of.dtype
    size = min(CHUNK, 1 << max(keys - 1, 0).bit_length())
    fill = -keys % size

    def cut(x: Tensor) -> Tensor:
        return _in_chunks(x.to(dtype), size, fill)

    query = torch.nn.functional.pad(of.query.to(dtype) * of.scale, (0, 0, of.offset, 0))
    query, key = cut(query), cut(of.key)
    logs = key.new_zeros(*key.shape[:-1], 1) if of.log_decay is None else cut(of.log_decay)
    from_start, to_end = logs.cumsum(-2), _after(logs)
    written = key if of.beta is None else key * cut(of.beta[..., None])
    ends = from_start[..., -1, :].exp()
    local, carried = _pairs(query, written, logs), query * from_start.exp()
    last = written * to_end.exp()
    if not of.by_delta and of.removal is None:
        return Chunks(local, carried, last, ends, None, None, of.query.shape[1], keys)
    a, b = (key * logs.exp(), written) if of.removal is None else (cut(of.removal[0]), cut(of.removal[1]))
    before = torch.nn.functional.pad(from_start[..., :-1, :], (0, 0, 1, 0))
    read = a * before.exp()
    # Row t of `earlier` is a_{t+1}, which reads the state of position t.
    earlier = torch.nn.functional.pad(a[..., 1:, :], (0, 0, 0, 1))
    of_keys, of_removed = (_down(_pairs(earlier, right, logs)) for right in (written, b))
    # The inverse of I + of_removed: Yang et al. 2024, equation 10 (the UT transform).
    solved = torch.linalg.solve_triangular(of_removed, torch.cat([read, of_keys], -1), upper=False, unitriangular=True)
    read, mixed = solved.split((read.shape[-1], size), -1)
    taken, removed = _pairs(query, b, logs), b * to_end.exp()
    return Chunks(
        local=local - taken @ mixed,
        carried=carried - taken @ read,
        written=last - mixed.mT @ removed,
        decay=ends,
        read=read,
        removed=removed,
        queries=of.query.shape[1],
        keys=keys,
    )


def _pairs(left: Tensor, right: Tensor, logs: Tensor) -> Tensor:
    """sum over d of left_td right_jd exp(sum of logs_sd for j < s <= t), (..., C, C), 0 for j > t; C is a power of 2.

    Two halves meet at their border: what lies between is the sum up to it and the sum from it, so that no exponent is
    above 0, and none is a difference of large sums.
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
    """The sum of the logs behind each position, up to the last."""
    behind = torch.nn.functional.pad(logs[..., 1:, :], (0, 0, 0, 1))
    return behind.flip(-2).cumsum(-2).flip(-2)


def _down(pairs: Tensor) -> Tensor:
    """The matrix one row further down, under a row of zeros."""
    return torch.nn.functional.pad(pairs[..., :-1, :], (0, 0, 1, 0))


def _in_chunks(x: Tensor, size: int, fill: int) -> Tensor:
    """(N, S, E) as (N, n, size, E), with zeros behind the last position."""
    return torch.nn.functional.pad(x, (0, 0, 0, fill)).unflatten(1, (-1, size))


def _ends(places: Rows) -> tuple[int, int]:
    """The first place, and the one behind the last."""
    if isinstance(places, range):
        return places.start, places.stop
    low, high = (int(end) for end in places.aminmax())
    return low, high + 1
