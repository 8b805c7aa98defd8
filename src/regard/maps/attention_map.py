"""The exact weights of attention, computed on demand."""

import math
import reprlib
from collections.abc import Sequence
from os import PathLike
from types import EllipsisType
from typing import Any, final, overload

import torch
from torch import Tensor

from regard.call.shapes import Dimensions, without_autocast
from regard.errors import OverwrittenError, ShapeError
from regard.maps import files
from regard.maps.indexing import Index, chosen_flat_heads, dimensions_after, is_integer, positions
from regard.maps.sources.axes import SelectionSource, TransposedSource
from regard.maps.sources.call import source_of_call
from regard.maps.sources.derived import WeightedSource, average, heads_last, mean_of_key_heads, mean_of_positive
from regard.maps.statistics.of_map import row_at
from regard.maps.statistics.tiles import product
from regard.maps.tensor_like import TensorLike, as_matrix
from regard.tensors.memory import human


@final
class AttentionMap(TensorLike):
    r"""The weights P of shape (batch..., H, T, S), computed on demand.

    $P_{ij} = \exp(s_{ij} - \mathrm{lse}_i)$ is a function of the kernel's inputs and its log-sum-exp: the map keeps
    queries, keys and one value per row, and computes any block of P from them exactly. Weights are float32 (float64 for
    float64 input), before dropout, and carry gradients to query and key.

    - `map[index]` equals the same index of the tensor. If queries and keys stay, the result is a map, still lazy:
      `map[0]`, `map[..., 1:, 1:]`, `map[:, :, keep]`. Otherwise it is a tensor: `map[0, :, 5]` has the weights of query
      5 of sequence 0, in every head. Index tensors are paired with one another: `map[..., rows, columns]` has single
      weights, in memory linear in their number; `block(rows, columns)` and `only(rows=..., columns=...)` take the
      outer block.
    - `map @ x` is P x for x of shape (..., S, N), in memory linear in T and S.
    - `map.dense()` is the whole of P, up to a memory limit.

    There is one class of maps. Its `source` computes the weights: a call, an average, a selection, steps of a
    generation, weights times values, or saved statistics without weights. A source without the answer raises
    `ArgumentError` (it lacks a tensor) or `NotKeptError` (it has statistics only).

    >>> import regard
    >>> x = torch.eye(3)
    >>> output, weights = regard.attention(x, x, x, mask=regard.causal(), return_weights=True)
    >>> weights[1]
    tensor([0.3595, 0.6405, 0.0000])
    >>> torch.allclose(weights @ x, output)
    True
    """

    # Without an ellipsis the type depends on the map's dimensions: of five, `map[0, 3, 100]` is a map.
    @overload
    def __getitem__(self, index: tuple[int, int, int]) -> Tensor | Any: ...
    @overload
    def __getitem__(self, index: tuple[EllipsisType, int] | tuple[EllipsisType, Tensor, Tensor]) -> Tensor: ...
    @overload
    def __getitem__(self, index: tuple[EllipsisType, int, int | slice] | tuple[EllipsisType, slice, int]) -> Tensor: ...
    @overload
    def __getitem__(self, index: Any) -> Any: ...
    def __getitem__(self, index: Any) -> Any:
        """The same index of the tensor: a map if queries and keys stay, else a tensor. See the class.

        Raises:
            ShapeError: the index does not fit the map.
            TooLargeError: the selected weights exceed the limit of `dense()`.
        """
        if isinstance(index, tuple) and (row := row_at(self.source, index)) is not None:
            return row
        given = Index.of(index, len(self.shape))
        if given.is_points:
            return self._points(given)
        if not given.is_outer:
            return self._weights_of(given)
        chosen = self._choose_leading(given.lead)
        if given.is_whole:
            return chosen
        rows, columns = (
            positions(i, n, name, self.device)
            for i, n, name in zip(given.pair, self.shape[-2:], ("query", "key"), strict=True)
        )
        is_one = [is_integer(i) for i in given.pair]
        if not any(is_one) and len(rows) and len(columns):
            return AttentionMap(SelectionSource(chosen.source, rows, columns))
        weights = chosen.block(rows, columns)
        weights = weights[..., 0, :] if is_one[0] else weights
        return weights[..., 0] if is_one[1] else weights

    def _points(self, index: Index) -> Tensor:
        is_of_all = any(isinstance(i, Tensor) for i in index.lead)
        chosen = self if is_of_all else self._choose_leading(index.lead)
        given, lengths = index.whole if is_of_all else index.pair, chosen.shape
        names = (*("leading" for _ in given[:-2]), "query", "key")
        found: list[Any] = [
            positions(i, n, name, self.device) for i, n, name in zip(given, lengths[-len(given) :], names, strict=True)
        ]
        with without_autocast(self.device):
            if not is_of_all:
                return chosen.source.laid_out(chosen.source.pairs(*found))
            flat_heads = torch.zeros_like(found[-1])
            for place, length in zip(found[:-2], lengths, strict=False):
                flat_heads = flat_heads * length + place
            return self.source.points(flat_heads, *found[-2:]).to(self.dtype)

    def _weights_of(self, index: Index) -> Tensor:
        ones = [isinstance(i, int) and not isinstance(i, bool) for i in index.lead]
        # Integers first, as in torch: other heads and sequences are not computed.
        chosen = self._choose_leading(tuple(i if one else slice(None) for i, one in zip(index.lead, ones, strict=True)))
        rest = (*(i for i, one in zip(index.lead, ones, strict=True) if not one), *index.pair)
        try:
            return as_matrix(chosen, "an index of paired tensors")[rest]
        except (IndexError, TypeError, RuntimeError) as error:
            raise ShapeError(
                f"cannot index a map {tuple(self.shape)} by {reprlib.repr(index.whole)}: {error}"
            ) from error

    def _choose_leading(self, lead: tuple[Any, ...]) -> "AttentionMap":
        if all(isinstance(i, slice) and i == slice(None) for i in lead):
            return self
        flat_heads = chosen_flat_heads(self.shape, lead, self.device)
        whole = flat_heads.numel() == math.prod(self.leading) and all(isinstance(i, int | slice) for i in lead)
        chosen = None if whole else flat_heads.reshape(-1)  # nothing is copied of a batch of one sequence
        names = dimensions_after(lead, self.dimensions, flat_heads.dim())
        return AttentionMap(self.source.choose(chosen, tuple(flat_heads.shape)).with_dimensions(names))

    @property
    def dimensions(self) -> Dimensions:
        """The names of the map's dimensions: which of those before queries and keys count sequences, and which heads.

        >>> import regard
        >>> q = torch.zeros(2, 4, 3, 1)
        >>> weights = regard.attention(q, q, q, return_weights=True).weights
        >>> weights.dimensions, weights[0].dimensions, weights[:, 0].dimensions
        ((batch, head, query, key), (head, query, key), (batch, query, key))
        """
        return self.source.dimensions

    @overload
    def __matmul__(self, other: Tensor) -> Tensor: ...
    @overload
    def __matmul__(self, other: Any) -> Any: ...
    def __matmul__(self, other: Any) -> Any:
        """P @ x for x of shape (S, N) or (batch..., H, S, N); of the map of one call also (batch..., G, S, N).

        Vectors (S,) and maps are accepted as by a tensor.

        Raises:
            ShapeError: x does not fit the map.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights
        >>> weights @ torch.tensor([[1.0], [0.0], [0.0]])
        tensor([[0.4711],
                [0.2645],
                [0.2645]])
        """
        if isinstance(other, Tensor) and other.dim() > 1 and not other.is_complex():
            return product(self.source, other).to(self.dtype)
        this: Any = self
        return torch.matmul(this, other)

    @property
    def mT(self) -> "AttentionMap":
        """The transposed map (batch..., H, S, T), still lazy: `map.mT @ x` sums the x received by every key.

        For softmax of dot products the product is one fused call. Row statistics of it go by tiles.

        >>> import regard
        >>> q = torch.zeros(2, 1)
        >>> weights = regard.attention(q, q, q, mask=regard.causal(), return_weights=True).weights
        >>> weights.mT @ torch.tensor([[1.0], [0.5]])
        tensor([[1.2500],
                [0.2500]])
        """
        return AttentionMap(TransposedSource.of_source(self.source))

    def only(self, *, heads: Any = None, rows: Any = None, columns: Any = None) -> "AttentionMap":
        """A map of some heads, queries or keys, still lazy.

        Args:
            heads: an integer, slice or index tensor for the dimension before queries and keys.
            rows: a slice or a 1-D index tensor (integers or bools) of queries.
            columns: the same for keys. The weights are unchanged, so rows may sum to less than 1.

        Raises:
            ShapeError: an index is out of range, or heads are chosen in a map without heads, or of unknown ones.

        >>> import regard
        >>> weights = regard.attention(*[torch.eye(4)] * 3, return_weights=True).weights
        >>> weights.only(rows=slice(1, 3), columns=torch.tensor([0, 3])).received()
        tensor([0.4302, 0.4302])
        """
        chosen = self
        if heads is not None:
            self.source.require_heads("only(heads=...)")
            if (head := self.dimensions.head) is None:
                said = f"a map {tuple(self.shape)} {self.dimensions} has no heads to choose from"
                raise ShapeError(f"{said}: with_heads() gives it one")
            lead: list[Any] = [slice(None)] * len(self.leading)
            lead[head] = heads
            chosen = self._choose_leading(tuple(lead))
        if rows is None and columns is None:
            return chosen
        places = []
        for index, length, name in zip((rows, columns), self.shape[-2:], ("query", "key"), strict=True):
            places.append(positions(slice(None) if index is None else index, length, name, self.device))
            if not len(places[-1]):
                raise ShapeError(f"a selection needs at least one {name}, got none of {length}")
        return AttentionMap(SelectionSource(chosen.source, *places))

    def average(self, dim: int | None = None, *, weights: Tensor | Sequence[float] | None = None) -> "AttentionMap":
        r"""The mean of the map over heads, or over another dimension before queries and keys; still lazy.

        Args:
            dim: a dimension as in `shape`; None is the heads. For the mean of some heads, select them first.
            weights: one for each head, normalised by their sum. By default all are equal.

        Sums and products of the average are averages of those of the heads; other statistics go by tiles.

        Raises:
            ShapeError: the map has no dimension of heads, or it is not known which one it is; `dimensions` says which.
            ArgumentError: the dimension is not before queries and keys, there are not as many weights, or their sum is
                0 or not finite.

        >>> import regard
        >>> q = torch.randn(2, 4, 5, 3)
        >>> weights = regard.attention(q, q, q, return_weights=True).weights
        >>> torch.allclose(weights.average().dense(), weights.dense().mean(-3))
        True
        """
        return AttentionMap(average(self.source, dim, weights))

    def with_heads(self) -> "AttentionMap":
        """The map with its heads before the queries: (batch..., H, T, S), and (batch..., 1, T, S) without heads.

        Raises:
            ShapeError: it is not known which dimension has the heads.

        >>> import regard
        >>> regard.attention(*[torch.eye(3)] * 3, return_weights=True).weights.with_heads().shape
        torch.Size([1, 3, 3])
        """
        return AttentionMap(heads_last(self.source))

    def per_key_head(self) -> "AttentionMap":
        """The mean over the query heads of each key head, (batch..., G, T, S), still lazy.

        The map itself if each head has its own keys; of a part of a map, the means over its heads. Caches hold keys for
        G heads, so scores of keys are needed for each of these.

        Raises:
            ArgumentError: the map is not from one call.

        >>> import regard
        >>> q, k = torch.zeros(1, 4, 2, 3), torch.zeros(1, 2, 2, 3)
        >>> regard.attention(q, k, k, return_weights=True).weights.per_key_head().shape
        torch.Size([1, 2, 2, 2])
        """
        made = mean_of_key_heads(self.source)
        return self if made is self.source else AttentionMap(made)

    def with_values(self, value: Tensor) -> "AttentionMap":
        """The same map with the values (batch..., G, S, E) of the call. A map keeps no values by default.

        Raises:
            ShapeError: the values do not fit the map.
            ArgumentError: the map is not from one call.

        >>> import regard
        >>> v = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
        >>> q = torch.zeros(2, 1)
        >>> weights = regard.attention(q, q, v, return_weights=True).weights.with_values(v)
        >>> weights.value_norms().dense()
        tensor([[2.5000, 0.5000],
                [2.5000, 0.5000]])
        """
        source = source_of_call(self.source, "with_values()")
        if value.dim() < 2 or value.shape[-2] != self.shape[-1]:
            raise ShapeError(
                f"with_values() needs values of shape (..., {self.shape[-1]}, E) for a map {tuple(self.shape)}, "
                f"got {tuple(value.shape)}"
            )
        return AttentionMap(source.with_value(value))

    def value_norms(self) -> "AttentionMap":
        r"""The size of each key's part of the output: $\lVert P_{ij} v_j \rVert$, a lazy map of the same shape.

        For the norms of Kobayashi et al., pass values times the output projection.

        Source: Kobayashi et al. 2020 (arXiv:2004.10102), section 3.

        Raises:
            ArgumentError: the map has no values.
        """
        values = source_of_call(self.source, "value_norms()").beside.values_for("value_norms()")
        norms = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
        return AttentionMap(WeightedSource(self.source, None, norms, "norms of weighted values"))

    def gradient(self, grad_output: Tensor | None = None) -> "AttentionMap":
        r"""The loss's gradient at each weight: $\partial L / \partial P_{ij} = dO_i \cdot v_j$, a lazy map with signs.

        Args:
            grad_output: dO = dL/dO, of the output's shape (batch..., H, T, E). By default the gradient of a backward
                pass under `regard.watch(model, values=True, gradients=True)`.

        It is dO V^T, also for masked weights. For attention without a fused kernel it is the gradient of the model's
        own weights. Entropy and shares of the mass have no meaning for it.

        Raises:
            ArgumentError: the values were not kept, or the gradient of the output was neither given nor kept; or the
                map is not from one call.
            GradientError: there was no backward pass, or more than one; the message says why.
            ShapeError: `grad_output` does not have the output's shape.
        """
        return AttentionMap(self.source.gradient(grad_output, "gradient"))

    def attribution(self, grad_output: Tensor | None = None) -> "AttentionMap":
        r"""Weight times gradient: $P_{ij} \, dO_i \cdot v_j$, a lazy map with signs; exactly 0 where masked.

        Its rows sum to dO_i . O_i: to first order, the part of the loss due to each weight of each head.

        Args:
            grad_output: as in `gradient`.

        Raises:
            ArgumentError, GradientError, ShapeError: as `gradient` does.
        """
        return AttentionMap(self.source.gradient(grad_output, "attribution"))

    def relevance(self, grad_output: Tensor | None = None) -> "AttentionMap":
        r"""The positive relevance of each key: $\bar A_{ij} = \frac1H \sum_h (P_{hij} \, dO_{hi} \cdot v_{hj})^+$.

        The positive part of `attribution`, as a mean over heads: a lazy map (batch..., T, S) without negative elements.
        `regard.watching.relevance` follows it through all layers.

        Args:
            grad_output: as in `gradient`.

        Source: Chefer et al. 2021 (arXiv:2103.15679), equation 5.

        Raises:
            ArgumentError, GradientError, ShapeError: as `gradient` does; also if sequences and heads are in one
                dimension, in an unknown order.

        >>> import regard
        >>> q, v = torch.zeros(1, 2, 2, 1), torch.tensor([[[[1.0], [0.0]], [[-1.0], [3.0]]]])
        >>> output, weights = regard.attention(q, q, v, return_weights=True, keep_values=True)
        >>> weights.relevance(torch.ones_like(output)).dense()
        tensor([[[0.2500, 0.7500],
                 [0.2500, 0.7500]]])
        """
        return AttentionMap(mean_of_positive(self.source, grad_output))

    def detach(self) -> "AttentionMap":
        """The map without its graph: results carry no gradients.

        >>> import regard
        >>> q = torch.eye(3, requires_grad=True)
        >>> weights = regard.attention(q, q, q, return_weights=True).weights
        >>> weights.entropy().requires_grad, weights.detach().entropy().requires_grad
        (True, False)
        """
        return AttentionMap(self.source.mapped(Tensor.detach))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the factors (query, key, row state, mask, bias) to a safetensors file, for `load`.

        Memory on disk is linear in T and S. Nothing is pickled.

        Raises:
            ArgumentError: a part of it cannot be saved, such as a score function, or a predicate of over a million
                pairs; or the map is not from one call.
            FileError: the file cannot be written, such as for want of a folder.
            NotKeptError: it has statistics only; `regard.maps.save_summary` writes these.
        """
        files.save(path, source_of_call(self.source, "save()"))

    @classmethod
    def load(cls, path: str | PathLike[str], *, device: torch.device | str = "cpu") -> "AttentionMap":
        """Read a map written by `save` or `regard.maps.save_summary`.

        Raises:
            DataError: the file is no map, is truncated, or has parts unknown to this version.

        >>> import regard, tempfile, pathlib
        >>> weights = regard.attention(*[torch.eye(3)] * 3, mask=regard.causal(), return_weights=True).weights
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     weights.save(pathlib.Path(folder, "map.safetensors"))
        ...     AttentionMap.load(pathlib.Path(folder, "map.safetensors")).entropy()
        tensor([0.0000, 0.6532, 1.0581])
        """
        return cls(files.load(path, torch.device(device)))

    def __repr__(self) -> str:
        try:
            return self._described()
        except OverwrittenError as error:
            return f"AttentionMap{tuple(self.shape)}, which cannot be read: {error}"

    def _described(self) -> str:
        held = human(sum(t.numel() * t.element_size() for t in self.source.tensors()))
        bytes_of_all = human(self.shape.numel() * self.dtype.itemsize)
        dense = f", dense() would take {bytes_of_all}" if self.source.has_blocks else ""
        kind = str(self.dtype).removeprefix("torch.")
        return f"AttentionMap{tuple(self.shape)} {kind} on {self.device}: {self.source}; holds {held}{dense}"
