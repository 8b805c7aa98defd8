"""The exact weights of an attention call, never stored."""

from collections.abc import Callable
from os import PathLike
from typing import Self, final

import torch
from torch import Tensor

from regard.backends import choose_backend, execute, row_state
from regard.backends.base import Backend, Call
from regard.errors import ArgumentError, ShapeError
from regard.maps import statistics as st
from regard.maps.base import DENSE_LIMIT_BYTES as DENSE_LIMIT_BYTES
from regard.maps.base import LazyMap
from regard.maps.derived import Weighted
from regard.maps.indices import positions
from regard.maps.products import DotSoftmax
from regard.maps.sources import OfCall
from regard.maps.tiles import Source, Statistic
from regard.mechanisms.byte_size import human
from regard.mechanisms.masks.basic import Causal
from regard.mechanisms.tensor_tree import tensors_mapped


@final
class AttentionMap(LazyMap):
    r"""The weights P of shape (batch..., H, T, S), computed where they are read.

    $P_{ij} = \exp(s_{ij} - \mathrm{lse}_i)$ is a function of what the kernel already has: the map keeps
    queries, keys and one number per row, and computes any block of P from them exactly. Weights are
    float32 (float64 for float64 input), before dropout, and carry gradients to query and key.

    - `map[index]` on leading dimensions is a map again; once a row or a column is named the answer is a
      tensor: `map[0, :, 5]` is what query 5 of sequence 0 attends to, in every head. Integers, slices and
      index tensors mix; two index tensors for rows and columns mean the outer block.
    - `map @ x` is P x for x of shape (..., S, N), in memory linear in T and S.
    - `map.dense()` is the whole of P, if it fits a limit.

    >>> import regard
    >>> x = torch.eye(3)
    >>> output, weights = regard.attention(x, x, x, mask=regard.causal(), return_weights=True)
    >>> weights[1]
    tensor([0.3595, 0.6405, 0.0000])
    >>> torch.allclose(weights @ x, output)
    True
    """

    def __init__(
        self, call: Call, state: Tensor | None, backend: Backend, leading: tuple[int, ...], value: Tensor | None = None
    ) -> None:
        self._call = call
        self._given = state
        self._backend = backend
        self._leading = leading
        self._value = value

    @property
    def _state(self) -> Tensor:
        """The row state; one that the kernel did not return is computed when it is first read."""
        if self._given is None:
            self._given = row_state(self._call)
        return self._given

    @property
    def shape(self) -> torch.Size:
        """(batch..., H, T, S)."""
        return torch.Size((*self._leading, self._call.sizes.queries, self._call.sizes.keys))

    @property
    def dtype(self) -> torch.dtype:
        """float32, or float64 for float64 input."""
        return self._call.compute_dtype

    @property
    def device(self) -> torch.device:
        """Where the factors are."""
        return self._call.query.device

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """The single weights P[..., rows[n], columns[n]], shape (batch..., H, N).

        Raises:
            ShapeError: rows and columns are not 1-D index tensors of one length, or out of range.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
        >>> weights.at(torch.tensor([0, 1]), torch.tensor([0, 2]))
        tensor([0.4711, 0.2645])
        """
        queries, keys = self.shape[-2:]
        i, j = positions(rows, queries, "query", self.device), positions(columns, keys, "key", self.device)
        if not isinstance(i, Tensor) or not isinstance(j, Tensor) or i.shape != j.shape:
            raise ShapeError(
                f"at() takes two 1-D index tensors of one length, got {tuple(rows.shape)} and {tuple(columns.shape)}"
            )
        scores = self._call.pair_scores(i, j)
        weights = self._call.normalization.weights(scores[..., None], self._state[..., i]).squeeze(-1)
        return weights.reshape(*self.leading, len(i))

    def row(self, index: int, *, renormalize: bool = False) -> Tensor:
        """The weights of one query, (batch..., H, S).

        Args:
            index: which.
            renormalize: normalise the row's scores anew instead of reading the stored row state. In float32 scores
                of about 100 leave a log-sum-exp, and with it every weight of the row, off by up to 2e-5 of itself;
                a row that is normalised anew is not.

        Raises:
            ShapeError: the index is out of range.

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.row(-1, renormalize=True)
        tensor([0.2645, 0.2645, 0.4711])
        """
        where = positions(index, self.shape[-2], "query", self.device)
        if not renormalize:
            return self.block(where, range(self.shape[-1]))[..., 0, :]
        normalization = self._call.normalization
        weights, state = normalization.base.normalize(self._call.scores(where, range(self.shape[-1])))
        return normalization.finish(weights, state)[0].reshape(*self._leading, -1)

    def with_heads(self) -> "AttentionMap":
        """The map of an input without a dimension of heads, (batch..., T, S), as (batch..., 1, T, S).

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.with_heads().shape
        torch.Size([1, 3, 3])
        """
        if self._call.sizes.has_heads:
            return self
        return self._like(leading=(*self._leading, 1))

    # -- with values -----------------------------------------------------------------------------------

    def with_values(self, value: Tensor) -> "AttentionMap":
        """The same map together with the values (batch..., G, S, E) that it weighs, which it does not keep by itself.

        Raises:
            ShapeError: the values do not fit the map.

        >>> import regard
        >>> v = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> q = torch.zeros(2, 1)
        >>> weights = regard.attention(q, q, v, return_weights=True).weights.with_values(v)
        >>> weights.value_norms().dense()
        tensor([[2.5000, 0.5000],
                [2.5000, 0.5000]])
        """
        if value.dim() < 2 or value.shape[-2] != self.shape[-1]:
            raise ShapeError(
                f"with_values() needs values of shape (..., {self.shape[-1]}, E) for a map {tuple(self.shape)}, "
                f"got {tuple(value.shape)}"
            )
        _, value = self._call.for_values(value, self._leading)
        heads = self._call.sizes.heads
        return self._like(value=value.repeat_interleave(heads // value.shape[1], 1).flatten(0, 1))

    def value_norms(self) -> LazyMap:
        r"""How large each key's part of the output is: $\lVert P_{ij} v_j \rVert$, a lazy map of the same shape.

        Give the values multiplied by the output projection for the norms of Kobayashi et al.

        Source: Kobayashi et al. 2020 (arXiv:2004.10102), section 3.

        Raises:
            ArgumentError: the map has no values.
        """
        norms = torch.linalg.vector_norm(self._values_kept("value_norms"), dim=-1, keepdim=True)
        return Weighted(self, None, norms, "norms of weighted values")

    def gradient(self, grad_output: Tensor) -> LazyMap:
        r"""How the loss sees each weight: $\partial L / \partial P_{ij} = dO_i \cdot v_j$, a lazy map with signs.

        Args:
            grad_output: dO = dL/dO, of the output's shape (batch..., H, T, E).

        It is dO V^T whether a weight is masked or not. Entropy and shares of the mass mean nothing for it.

        Raises:
            ArgumentError: the map has no values.
            ShapeError: `grad_output` does not have the output's shape.
        """
        return Weighted(self, *self._with_gradient("gradient", grad_output), "gradient", alone=True)

    def relevance(self, grad_output: Tensor) -> LazyMap:
        r"""Weight times gradient: $P_{ij} \, dO_i \cdot v_j$, a lazy map with signs; exactly 0 where masked.

        Its rows sum to dO_i . O_i. Positive parts averaged over heads are the maps of Chefer et al.

        Args:
            grad_output: dO = dL/dO, of the output's shape (batch..., H, T, E).

        Source: Chefer et al. 2021 (arXiv:2103.15679), equation 5.

        Raises:
            ArgumentError: the map has no values.
            ShapeError: `grad_output` does not have the output's shape.
        """
        return Weighted(self, *self._with_gradient("relevance", grad_output), "relevance")

    def _values_kept(self, name: str) -> Tensor:
        if self._value is None:
            raise ArgumentError(
                f"{name}() needs the values, which this map does not keep: map.with_values(value), or "
                "attention(..., keep_values=True)"
            )
        return self._value

    def _with_gradient(self, name: str, grad_output: Tensor) -> tuple[Tensor, Tensor]:
        value = self._values_kept(name)
        expected = (*self._leading, self.shape[-2], value.shape[-1])
        if tuple(grad_output.shape) != expected:
            raise ShapeError(f"{name}() needs the output's gradient {expected}, got {tuple(grad_output.shape)}")
        return grad_output.reshape(len(value), *expected[-2:]).to(self.dtype), value

    # -- where it is -----------------------------------------------------------------------------------

    def to(self, device: torch.device | str) -> "AttentionMap":
        """The map with its factors on another device; itself if they are there. It keeps its graph.

        Tensors that a custom score or predicate closes over stay where they are.
        """
        device = torch.device(device)
        if device == self.device:
            return self
        moved = self._with_tensors(lambda t: t.to(device))
        # Another device may have no kernel for this dtype.
        backend = choose_backend(moved._call, None) if moved._backend.why_not(moved._call) else moved._backend
        return AttentionMap(moved._call, moved._given, backend, moved._leading, moved._value)

    def detach(self) -> "AttentionMap":
        """The map without its graph: nothing that is read from it carries gradients.

        >>> import regard
        >>> q = torch.eye(3, requires_grad=True)
        >>> weights = regard.attention(q, q, q, return_weights=True).weights
        >>> weights.entropy().requires_grad, weights.detach().entropy().requires_grad
        (True, False)
        """
        return self._with_tensors(Tensor.detach)

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> "AttentionMap":
        call, state, value = tensors_mapped((self._call, self._given, self._value), change)
        return AttentionMap(call, state, self._backend, self._leading, value)

    def save(self, path: str | PathLike[str]) -> None:
        """Write the factors (query, key, row state, mask, bias) to a safetensors file, from which `load` reads the map.

        Memory on disk is linear in T and S. Nothing is pickled.

        Raises:
            ArgumentError: a part that no file can hold: a predicate or a score that is a function of one's own.
        """
        from regard.maps.files import save

        save(path, self._call, self._state, self._backend.name, self._leading, self._value)

    @classmethod
    def load(cls, path: str | PathLike[str], *, device: torch.device | str = "cpu") -> "AttentionMap":
        """The map that `save` wrote.

        Raises:
            DataError: the file is not one, is cut short, or names what this version does not know.

        >>> import regard, tempfile, pathlib
        >>> weights = regard.attention(*[torch.eye(3)] * 3, mask=regard.causal(), return_weights=True).weights
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights.save(pathlib.Path(folder, "map.safetensors"))
        ...     AttentionMap.load(pathlib.Path(folder, "map.safetensors")).entropy()
        tensor([0.0000, 0.6532, 1.0581])
        """
        from regard.maps.files import load

        return cls(*load(path, torch.device(device)))

    # -- how it is answered ----------------------------------------------------------------------------

    def _like(self, *, leading: tuple[int, ...] | None = None, value: Tensor | None = None) -> "AttentionMap":
        value = self._value if value is None else value
        leading = self._leading if leading is None else leading
        return AttentionMap(self._call, self._given, self._backend, leading, value)

    def _source(self) -> Source:
        return OfCall(self._call, self._state)

    def _choose(self, cells: Tensor, leading: tuple[int, ...]) -> Self:
        state = self._state.flatten(0, 1)[cells].unsqueeze(1)
        value = None if self._value is None else self._value[cells]
        return type(self)(self._call.select(cells), state, self._backend, leading, value)

    def _product(self, x: Tensor) -> Tensor:
        return self._laid_out(self._product_by_cells(x))

    def _product_by_cells(self, x: Tensor) -> Tensor:
        call, value = self._call.for_values(x, self._leading)
        return execute(self._backend, call, value)[0].flatten(0, 1)

    def _at_once(self, statistic: Statistic) -> tuple[Tensor, ...] | None:
        if isinstance(statistic, st.Product):
            return (self._product_by_cells(self._laid_out(self._for_cells(statistic.x))),)
        if isinstance(statistic, st.Distance):
            return self._distance(statistic.offset)
        if isinstance(statistic, st.Pooled):
            return self._pooled(statistic)
        if isinstance(statistic, st.TILES_ONLY):
            return None
        form = DotSoftmax.of(self._call, self._state, self._backend)
        if form is None:
            return None
        found: tuple[Tensor, ...]
        match statistic:
            case st.Received():
                found = (form.received(),)
            case st.Entropy():
                found = (form.entropy(),)
            case st.Moments():
                found = form.moments()
            case st.TransposedProduct(x):
                found = (form.transposed(self._for_cells(x).unflatten(0, self._state.shape[:2])).mT,)
            case _:
                return None
        return tuple(answer.flatten(0, 1) for answer in found)

    def _pooled(self, picture: st.Pooled) -> tuple[Tensor] | None:
        """A picture of few columns is one product with their indicators, which costs less than tiles."""
        if picture.how == "max" or self._backend.name != "fused" or picture.columns.count > self._call.query.shape[-1]:
            return None
        indicators = torch.nn.functional.one_hot(picture.columns.owners(self.device), picture.columns.count)
        by_columns = self._product_by_cells(indicators.to(self.dtype))
        return (picture.finished(picture.rows.reduce(by_columns, -2, 0, largest=False)[0]),)

    def _for_cells(self, x: Tensor) -> Tensor:
        """x (cells or 1, length, N) for every cell."""
        return x.expand(self._state.shape[0] * self._state.shape[1], *x.shape[1:])

    def _distance(self, offset: int) -> tuple[Tensor] | None:
        """Where no key stands after its query, the distance is a difference of two means."""
        mask, sizes = self._call.mask, self._call.sizes
        factors = () if mask is None else mask.factors()
        if not any(isinstance(m, Causal) and isinstance(m.offset, int) and m.offset <= offset for m in factors):
            return None
        j = torch.arange(sizes.keys, device=self.device, dtype=self.dtype)
        found = self._product_by_cells(torch.stack([torch.ones_like(j), j], -1))
        i = torch.arange(sizes.queries, device=self.device, dtype=self.dtype) + offset
        return ((found[..., 0] * i - found[..., 1]).clamp_min(0.0),)

    def __repr__(self) -> str:
        """What it is, what it holds, and what dense would cost."""
        call = self._call
        mask = "" if call.mask is None else f", {call.mask}"
        bias = "" if call.bias is None else ", with a bias"
        state = () if self._given is None else (self._given,)
        held = sum(t.numel() * t.element_size() for t in (call.query, call.key, *state))
        return (
            f"AttentionMap{tuple(self.shape)} {str(self.dtype).removeprefix('torch.')} on {self.device}: "
            f"{call.normalization} of {call.score}{mask}{bias}; "
            f"holds {human(held)}, dense() would take {human(self.dense_bytes)}"
        )
