"""A map in place of a tensor: functions of torch, NumPy, arithmetic, iteration.

`strict_maps` makes an error of those that need the dense matrix, with the line of its cause.
"""

import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from types import FrameType
from typing import TYPE_CHECKING, Any, Self

import numpy as np
import torch
from torch import Tensor

from regard.errors import ArgumentError, TooLargeError
from regard.lazy import Displayed
from regard.maps.sources.derived import CastSource
from regard.maps.sources.source import Source
from regard.maps.statistics.of_map import MapStatistics
from regard.maps.torch_functions import NOT_LAZY, lazily, moved

_strict: ContextVar[bool] = ContextVar("strict maps", default=False)
_OURS = ("regard", "torch")
LAZILY = {
    **dict.fromkeys(("log", "log2", "entr", "xlogy"), "use map.entropy(), or regard.divergence(a, b, kind='kl')"),
    **dict.fromkeys(("mse_loss", "__sub__", "sub", "cosine_similarity", "kl_div"), "use regard.divergence(a, b, kind)"),
    **dict.fromkeys(("__mul__", "mul"), "use map.average(dim, weights=...), or multiply the result of map @ x"),
    "einsum": "use map @ x or map.mT @ x",
    **dict.fromkeys(("max", "amax", "min"), "use map.top_keys(1) or map.pooled(rows, columns, 'max')"),
    **dict.fromkeys(("sort", "argsort", "kthvalue"), "use map.top_keys(k) or map.top_p_count(p)"),
    **dict.fromkeys(("cumsum", "quantile"), "use map.top_p_count(p)"),
    **dict.fromkeys(("avg_pool2d", "max_pool2d", "interpolate"), "use map.pooled(rows, columns, how)"),
    **dict.fromkeys(("diagonal", "gather", "take"), "use map[..., rows, columns] with two index tensors"),
    **dict.fromkeys(("transpose", "swapaxes", "t"), "use map.mT"),
    **dict.fromkeys(("flatten", "view", "reshape", "unsqueeze", "select"), "use an index, or torch.cat of maps"),
    **dict.fromkeys(("float", "half", "double", "bfloat16", "type_as"), "use map.to(dtype)"),
    **dict.fromkeys(("tolist", "numpy", "numpy.asarray"), "read rows of it, or map.pooled(rows, columns)"),
    **dict.fromkeys(("svdvals", "svd", "matrix_norm"), "multiply: map @ x and map.mT @ x"),
}
"""Lazy alternatives of functions that need the matrix."""


@contextmanager
def strict_maps() -> Iterator[None]:
    """Inside `with regard.maps.strict_maps():` no function of torch or NumPy may turn a map into its dense matrix.

    Most functions of torch make the matrix (batch..., H, T, S) of a map, up to the limit of `dense()`. With strict maps
    such a call raises an error with the line instead. `map.dense()` itself is always allowed.

    >>> import torch, regard
    >>> x = torch.eye(3)
    >>> weights = regard.attention(x, x, x, return_weights=True).weights
    >>> with strict_maps():
    ...     weights.sum(-2)  # lazy: the weight that each key gets
    tensor([1., 1., 1.])
    """
    token = _strict.set(True)
    try:
        yield
    finally:
        _strict.reset(token)


def refuse_if_strict(asked: str, shape: tuple[int, ...]) -> None:
    if _strict.get():
        instead = LAZILY.get(asked.removesuffix("()"), "ask the map (docs/maps.md lists its questions)")
        raise TooLargeError(
            f"{asked} would make the dense weights {shape} of a map, at {_line()}; maps are strict here: "
            f"{instead}, call .dense() where the matrix is wanted, or leave strict_maps()"
        )


def _line() -> str:
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and str(frame.f_globals.get("__name__", "")).split(".")[0] in _OURS:
        frame = frame.f_back
    return "an unknown line" if frame is None else f"{frame.f_code.co_filename}:{frame.f_lineno}"


OF_STORAGE = frozenset(
    {"retain_grad", "register_hook", "register_post_accumulate_grad_hook", "data_ptr", "storage", "untyped_storage"}
)
OF_FORM = frozenset(
    {"dim", "ndim", "ndimension", "size", "numel", "nelement", "element_size", "itemsize", "nbytes", "get_device"}
    | {"is_cpu", "is_cuda", "is_floating_point", "is_complex"}
)
"""Questions to the shape, the dtype and the device alone."""


def _operator(name: str) -> Any:
    def operate(self: "TensorLike", *other: Any) -> Any:
        return self._as(name, *other)

    return operate


class TensorLike(Displayed, MapStatistics, ABC):
    """The interface of a tensor (batch..., H, T, S) computed on demand.

    Code for the `attentions` of a model runs on maps. Lazy are indexing, `@`, `.mT`, `sum`, `mean`, `max`, `argmax`,
    `topk`, `to`, and `torch.stack` and `torch.cat` over the dimensions before queries and keys. Every other function of
    torch gets the dense matrix, under the limit of `dense()`; inside `regard.maps.strict_maps()` it raises an error
    instead. A map is immutable.
    """

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", str(func)), kwargs or {}
        if name.endswith("_") and not name.endswith("__"):
            raise ArgumentError(
                f"{name}() changes a tensor in place, and a map is never changed: use the form without _"
            )
        if name in OF_STORAGE:
            raise ArgumentError(
                f"{name}() belongs to a stored tensor, and a map stores none: make one by map.dense() and keep it"
            )
        if func in (getattr(torch, name, None), getattr(Tensor, name, None)):
            answer = lazily(name, _each(_source, args), _each(_source, kwargs))
            if answer is not NOT_LAZY:
                return _each(lambda one: cls(one) if isinstance(one, Source) else one, answer)
        return func(
            *_each(lambda one: as_matrix(one, f"{name}()"), args),
            **_each(lambda one: as_matrix(one, f"{name}()"), kwargs),
        )

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> Any:
        return np.asarray(as_matrix(self, "numpy.asarray()").detach().cpu().numpy(), dtype=dtype)

    __array_priority__ = 1000
    """NumPy defers arithmetic of its scalars and arrays with a map, as with a tensor."""

    def __dlpack__(self, **options: Any) -> Any:
        return as_matrix(self, "as_tensor()").detach().__dlpack__(**options)

    def __dlpack_device__(self) -> Any:
        return torch.empty(0, device=self.device).__dlpack_device__()

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            found = None if name.startswith("_") else getattr(Tensor, name, None)
            if found is None:
                raise AttributeError(f"an attention map has no attribute {name!r}")
            if name in OF_FORM:
                return getattr(torch.empty((), dtype=self.dtype, device=self.device).expand(self.shape), name)
            if not callable(found):
                return getattr(as_matrix(self, name), name)
            return lambda *args, **kwargs: self._as(name, *args, **kwargs)

    def _as(self, name: str, *args: Any, **kwargs: Any) -> Any:
        return type(self).__torch_function__(getattr(Tensor, name), (type(self),), (self, *args), kwargs)

    __mul__ = __rmul__ = _operator("__mul__")
    __truediv__ = _operator("__truediv__")
    __rtruediv__ = _operator("__rtruediv__")
    __floordiv__ = _operator("__floordiv__")
    __rfloordiv__ = _operator("__rfloordiv__")
    __mod__ = _operator("__mod__")
    __rmod__ = _operator("__rmod__")
    __add__ = __radd__ = _operator("__add__")
    __sub__ = _operator("__sub__")
    __rsub__ = _operator("__rsub__")
    __pow__ = _operator("__pow__")
    __rpow__ = _operator("__rpow__")
    __rmatmul__ = _operator("__rmatmul__")
    __neg__ = _operator("__neg__")
    __pos__ = _operator("__pos__")
    __abs__ = _operator("__abs__")
    __gt__ = _operator("__gt__")
    __ge__ = _operator("__ge__")
    __lt__ = _operator("__lt__")
    __le__ = _operator("__le__")
    __eq__ = _operator("__eq__")
    __ne__ = _operator("__ne__")
    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        if self.shape.numel() != 1:
            raise ArgumentError(
                f"the truth value of a map {tuple(self.shape)} is ambiguous, as that of a tensor is: write `map is not "
                "None`, or compare and use .any() or .all()"
            )
        return bool(self.dense())

    def __float__(self) -> float:
        return float(as_matrix(self, "float()"))

    def __int__(self) -> int:
        return int(as_matrix(self, "int()"))

    def __contains__(self, weight: Any) -> bool:
        return weight in as_matrix(self, "in")

    def __setitem__(self, index: Any, value: Any) -> None:
        raise ArgumentError("a map is never changed: change the tensor map.dense()")

    def sum(self, *args: Any, **kwargs: Any) -> Any:
        """The sum over dimensions, as of a tensor: a map if queries and keys stay, else a tensor.

        Over queries it is `received()`, over keys the sums of rows, each one fused call for softmax of dot products;
        over heads and batches it is lazy.
        """
        return self._as("sum", *args, **kwargs)

    def mean(self, *args: Any, **kwargs: Any) -> Any:
        """The mean over dimensions, as of a tensor: a map if queries and keys stay, else a tensor."""
        return self._as("mean", *args, **kwargs)

    def __iter__(self) -> Iterator[Any]:
        return (self[index] for index in range(len(self)))

    @abstractmethod
    def __getitem__(self, index: Any) -> Any:
        """A map of some heads, or a block of weights."""

    @property
    def requires_grad(self) -> bool:
        """Whether results carry gradients."""
        return any(tensor.requires_grad for tensor in self.source.tensors())

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """The map with its factors on another device, or with its answers in another dtype; it keeps its graph.

        Args:
            args: a device, a dtype, both, or a tensor or map with both, as in `Tensor.to`.
            kwargs: `device` and `dtype`; `non_blocking` and `copy` have no effect.

        Weights are computed as before, and answers are rounded to the dtype at the end. Tensors in the closure of a
        custom score or predicate are not moved.

        Raises:
            ArgumentError: an argument is neither a device nor a floating-point dtype.
            NotKeptError: the map has statistics only, and cannot be moved.
        """
        device, dtype = _place(args, kwargs)
        found = self.source if device is None else moved(self.source, device)
        if dtype is not None:
            found = CastSource.of_dtype(found, dtype)
        return self if found is self.source else type(self)(found)


def _place(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[torch.device | None, torch.dtype | None]:
    device, dtype = kwargs.get("device"), kwargs.get("dtype")
    for given in args:
        if isinstance(given, torch.dtype):
            dtype = given
        elif isinstance(given, Tensor | MapStatistics):
            device, dtype = given.device, given.dtype
        elif not isinstance(given, bool) and given is not None:
            device = given
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise ArgumentError(
            f"weights are floating-point numbers, and to() got {dtype!r}: map.dense().to(...) gives others"
        )
    try:
        return None if device is None else torch.device(device), dtype
    except (RuntimeError, TypeError) as error:
        raise ArgumentError(f"to() takes a device or a dtype, got {device!r}") from error


def _source(one: Any) -> Any:
    return one.source if isinstance(one, TensorLike) else one


def as_matrix(one: Any, asked: str) -> Any:
    if not isinstance(one, TensorLike):
        return one
    if one.shape.numel():
        refuse_if_strict(asked, tuple(one.shape))
    return one.dense()


def _each(change: Callable[[Any], Any], tree: Any) -> Any:
    if isinstance(tree, dict):
        return {name: _each(change, one) for name, one in tree.items()}
    if type(tree) in (list, tuple):
        return type(tree)(_each(change, one) for one in tree)
    return change(tree)
